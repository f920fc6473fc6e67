"""What a block of `make gpu-check` is given: a device, sizes, folders, and ways to report what it found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60  # of a collective


class CannotRun(Exception):
    """Raised by a block that this machine cannot run, with the reason. The block has not failed."""


@dataclass
class Here:
    """The machine, for one block.

    Attributes:
        kind: cpu or cuda.
        smallest: the smallest sizes that still mean something, for CI.
        folder: of this block alone.
        shared: of all blocks of this check; train/ is the run that the block `train` leaves.
        stand_in: the GPU is tests/helpers/standin, which has neither NVML nor kernels of CUDA's own.
        found: what the block has measured, for gpu-check.json; kept when the block fails later.
    """

    kind: str
    smallest: bool
    folder: Path
    shared: Path
    stand_in: bool = False
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> Any:
        """As torch.device, with its index."""
        import torch

        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")

    @property
    def data(self) -> Path:
        """The synthetic dataset: train/, valid/, test/, schema.yaml."""
        return self.shared / "data"

    def size(self, smallest: T, cpu: T, cuda: T) -> T:
        """One of three sizes."""
        return smallest if self.smallest else cuda if self.kind == "cuda" else cpu

    @property
    def real(self) -> bool:
        """Whether there is a GPU, and no stand-in for one."""
        return self.kind == "cuda" and not self.stand_in

    def needs_gpu(self, why: str) -> None:
        """Raises CannotRun without a GPU."""
        if not self.real:
            raise CannotRun(f"no GPU: {why}")

    def about_device(self) -> str:
        """The GPU's name."""
        import torch

        return torch.cuda.get_device_name(self.device)

    def wait(self) -> None:
        """Returns when the device has done what it was given."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize()

    @contextmanager
    def group(self) -> Iterator[None]:
        """This process as the only rank of a group: NCCL on a GPU, else gloo."""
        import torch.distributed as dist

        join(0, 1, self.kind, f"file://{self.folder}/store")
        try:
            yield
        finally:
            dist.destroy_process_group()

    @contextmanager
    def ray(self, kind: str | None = None) -> Iterator[None]:
        """Runs inside are on this device (default: the block's).

        Where the device is not a real GPU that is in a local Ray, which raytrec uses as it is; else each run
        starts its own, as `raytrec train` does.
        """
        from standin.worker import local_ray

        kind = kind or self.kind
        own = nullcontext() if kind == "cuda" and self.real else local_ray(gpus=int(kind == "cuda"))
        # The packages of a machine with a stand-in are for CPUs.
        there = patch("raytrec.driver.nodes.built_for", lambda: "cuda") if self.stand_in else nullcontext()
        with own, there:
            yield

    def settings(self, name: str, **changes: Any) -> dict[str, Any]:
        """The values of a RunConfig on the synthetic data; changes are section__key=value."""
        values: dict[str, Any] = {
            "run": {"name": name, "dir": str(self.folder / name)},
            "data": {name: str(self.data / name) for name in ("train", "valid", "test")},
            "scaling": {"num_workers": 1, "device": self.kind},
            "checkpoint": {"every_s": None},
            "tracking": {"enabled": False, "report": False, "every_steps": 20},
        }
        values["data"] |= {"global_batch_size": self.size(256, 1024, 2048), "lanes": 6}
        for key, value in changes.items():
            section, _, key = key.partition("__")
            values.setdefault(section, {})[key] = value
        return values


def join(rank: int, world: int, kind: str, store: str) -> None:
    """Makes this process a rank of a group whose ranks are all on this machine, on CUDA with GPU `rank`."""
    import torch
    import torch.distributed as dist

    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def on_gpus(here: Here, world: int, function: Callable, *args: Any) -> Any:
    """What function(device, *args) returns on rank 0 of `world` processes, each with its own GPU.

    Args:
        function: of a module's top level, because the processes import it.
    """
    import torch
    import torch.multiprocessing as mp

    (here.folder / f"store-{world}").unlink(missing_ok=True)
    mp.spawn(_on_gpu, (world, str(here.folder), function, args), nprocs=world)
    return torch.load(here.folder / "answer.pt", weights_only=False)  # our own file


def _on_gpu(rank: int, world: int, folder: str, function: Callable, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    join(rank, world, "cuda", f"file://{folder}/store-{world}")
    answer = function(torch.device("cuda", rank), *args)
    if rank == 0:
        torch.save(answer, f"{folder}/answer.pt")
    dist.destroy_process_group()


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of JSON in a file of a run folder; none without the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
