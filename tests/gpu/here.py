"""Context of a block of `make gpu-check`: device, sizes, folders and measurements."""

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
COLLECTIVE_TIMEOUT_S = 60  # timeout of a collective


class BlockCannotRun(Exception):
    """Raised by a block that cannot run on this machine. The block does not count as failed."""


@dataclass
class BlockContext:
    """Device, sizes and folders of one block.

    Attributes:
        kind: cpu or cuda.
        smallest: use the smallest sizes, for CI.
        folder: folder of this block.
        shared: folder of all blocks; train.run has the path of the run of the block `train`.
        stand_in: the GPU is tests/helpers/standin, which has neither NVML nor CUDA kernels.
        found: measurements for gpu-check.json; kept if the block fails later.
    """

    kind: str
    smallest: bool
    folder: Path
    shared: Path
    stand_in: bool = False
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> Any:
        """The torch.device of the block, with index 0 on CUDA."""
        import torch

        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")

    @property
    def data(self) -> Path:
        """Folder of the synthetic dataset: train/, valid/, test/, schema.yaml."""
        return self.shared / "data"

    def size(self, smallest: T, cpu: T, cuda: T) -> T:
        """Return the size for `smallest`, CPU or CUDA."""
        return smallest if self.smallest else cuda if self.kind == "cuda" else cpu

    @property
    def real(self) -> bool:
        """True if the device is a real GPU."""
        return self.kind == "cuda" and not self.stand_in

    def needs_gpu(self, why: str) -> None:
        """Raise BlockCannotRun if there is no real GPU."""
        if not self.real:
            raise BlockCannotRun(f"no GPU: {why}")

    def about_device(self) -> str:
        """Return the name of the GPU."""
        import torch

        return torch.cuda.get_device_name(self.device)

    def wait(self) -> None:
        """Wait until the device has completed all work."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize()

    @contextmanager
    def group(self) -> Iterator[None]:
        """Initialize a process group with this process as the only rank: NCCL on a GPU, else gloo."""
        import torch.distributed as dist

        join_group(0, 1, self.kind, f"file://{self.folder}/store")
        try:
            yield
        finally:
            dist.destroy_process_group()

    @contextmanager
    def ray(self, kind: str | None = None) -> Iterator[None]:
        """Run training inside the block on a device (default: the block's device).

        On CPU and on the stand-in this starts a local Ray. On a real GPU each run starts its own Ray, as
        `raytrec train` does.
        """
        from standin.worker import start_ray_with_stand_ins

        kind = kind or self.kind
        own = nullcontext() if kind == "cuda" and self.real else start_ray_with_stand_ins(gpus=int(kind == "cuda"))
        # A machine with a stand-in has the CPU packages installed.
        there = patch("raytrec.driver.nodes.get_build_device", lambda: "cuda") if self.stand_in else nullcontext()
        with own, there:
            yield

    def settings(self, name: str, **changes: Any) -> dict[str, Any]:
        """Return RunConfig values for the synthetic data; changes are section__key=value."""
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


def join_group(rank: int, world: int, kind: str, store: str) -> None:
    """Join a process group on this machine; on CUDA, rank r uses GPU r."""
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
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


def run_on_gpus(here: BlockContext, world: int, function: Callable, *args: Any) -> Any:
    """Run function(device, *args) in `world` processes with one GPU each and return the result of rank 0.

    Args:
        here: context of the block.
        world: number of processes.
        function: top-level function of a module; the processes import it.
    """
    import torch
    import torch.multiprocessing as mp

    (here.folder / f"store-{world}").unlink(missing_ok=True)
    mp.spawn(_on_gpu, (world, str(here.folder), function, args), nprocs=world)
    return torch.load(here.folder / "answer.pt", weights_only=False)  # trusted: written by rank 0


def _on_gpu(rank: int, world: int, folder: str, function: Callable, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    join_group(rank, world, "cuda", f"file://{folder}/store-{world}")
    answer = function(torch.device("cuda", rank), *args)
    if rank == 0:
        torch.save(answer, f"{folder}/answer.pt")
    dist.destroy_process_group()


def read_json_records(path: Path) -> list[dict[str, Any]]:
    """Read a JSON lines file of a run folder. Return an empty list if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
