"""Benchmark ranks without Ray: groups of processes that serve requests or run one function."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import typer
from harness import HERE, REPO, take_turns

Answer = Callable[..., Any]
FIRST_STEPS = 2  # number of steps of a new model, from which the length of a turn is estimated


def join_group(rank: int, world: int, store: str | Path, device: str = "cpu") -> Any:
    """Make this process a rank of a group on this machine, and return the rank's device.

    The rank uses one thread and prints no warnings or log messages below errors.

    Args:
        rank: Number of the rank.
        world: Number of ranks.
        store: Path of a file that does not exist yet, the same for all ranks.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU per rank).
    """
    import torch
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    torch_device = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(torch_device)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=300),
    )
    torch.manual_seed(rank)
    return torch_device


# Ranks that run one function


def on_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    meanwhile: Callable[[], None] | None = None,
) -> list[Any]:
    """Run function(rank, device, *args) on new ranks, and return each rank's value.

    Args:
        world: Number of ranks.
        function: Function in a module that the ranks can import.
        args: Arguments of the function, which are pickled.
        device: "cpu" or "cuda".
        meanwhile: Function that this process calls repeatedly until the ranks have ended.
    """
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        group = mp.spawn(_run_rank, (world, device, folder, function, args), nprocs=world, join=False)
        while not group.join(timeout=0.01 if meanwhile else None):
            if meanwhile:
                meanwhile()
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world)]


def _run_rank(rank: int, world: int, device: str, folder: str, function: Answer, args: tuple) -> None:
    import torch.distributed as dist

    here = join_group(rank, world, f"{folder}/store", device)
    Path(folder, str(rank)).write_bytes(pickle.dumps(function(rank, here, *args)))
    dist.barrier()
    dist.destroy_process_group()


def group_seconds(call: Callable[[], Any], device: Any = None) -> float:
    """Return the seconds until a call, including its GPU work, has ended on all ranks.

    Args:
        call: Function that every rank calls.
        device: Device of this rank; None: the CPU.
    """
    import torch
    import torch.distributed as dist

    dist.barrier()
    began = perf_counter()
    call()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return perf_counter() - began


# Ranks that serve requests


class Ranks:
    """Processes of one side of a benchmark, each of which replies to a line of JSON with another line.

    Args:
        script: Script in benchmarks/ that calls `run_script` with the side's function.
        world: Number of ranks.
        stack: Exit stack; the processes end when the stack is closed.
    """

    def __init__(self, script: str, world: int, stack: ExitStack):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-"))
        path = os.pathsep.join([str(REPO), str(HERE)])
        command = [sys.executable, "-W", "ignore", str(HERE / script), "side"]
        self._ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(rank), str(world), f"{folder}/store"],
                    env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    cwd=REPO,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            for rank in range(world)
        ]

    def ask(self, **values: Any) -> list[Any]:
        """Send a request to all ranks, and return their replies.

        Raises:
            RuntimeError: A rank exited before it replied.
        """
        for rank in self._ranks:
            rank.stdin.write(json.dumps(values) + "\n")
            rank.stdin.flush()
        answers = [json.loads(rank.stdout.readline() or "null") for rank in self._ranks]
        if None in answers:
            raise RuntimeError(f"a rank exited before it replied to {values}")
        return answers

    def time(self, **values: Any) -> dict[str, float]:
        """Send a request; return s (seconds of the slowest rank) and cpu_s (CPU seconds of all ranks); see `ask`."""
        answers = self.ask(**values)
        return {"s": max(s for s, _ in answers), "cpu_s": sum(cpu for _, cpu in answers)}


def compare(
    sides: dict[str, Ranks],
    requests: dict[str, dict],
    rounds: int,
    rows: int,
    turn_s: float = 0.4,
    first_steps: int = FIRST_STEPS,
) -> dict[str, dict[str, float]]:
    """Return each side's milliseconds per step and CPU-µs per row, as the best values of the side's turns.

    Args:
        sides: Name of a side → the side's ranks, which respond as `trainer` does.
        requests: Name of a side → request that builds the side's model.
        rounds: Number of turns of each side.
        rows: Number of rows per step.
        turn_s: Approximate length of a turn in seconds.
        first_steps: Number of steps that a side trains when its model is built.
    """
    steps = {}
    for side, ranks in sides.items():
        built = ranks.time(**requests[side])["s"] / first_steps
        steps[side] = max(2, min(40, round(turn_s / built)))
    turns = take_turns({side: lambda side=side: sides[side].time(steps=steps[side]) for side in sides}, rounds)
    return {
        side: {
            "step_ms": 1e3 * min(turn["s"] for turn in of_side) / steps[side],
            "cpu_us_per_row": 1e6 * min(turn["cpu_s"] for turn in of_side) / steps[side] / rows,
        }
        for side, of_side in turns.items()
    }


def trainer(build: Callable[..., tuple[Any, Iterator[Any]]]) -> Callable[[int, int], Answer]:
    """Return the function of a side whose ranks train, for `run_script`.

    The request {"steps": n} trains n steps. Any other request is passed to `build`, and the new model is
    trained for FIRST_STEPS steps. The reply is [seconds, CPU seconds], including collation.

    Args:
        build: Function of (rank, world, **request) that returns a Step and batches.
    """

    def side(rank: int, world: int) -> Answer:
        current: list[Any] = []

        def answer(steps: int | None = None, **request: Any) -> tuple[float, float]:
            if steps is None:
                current[:] = build(rank, world, **request)
            return time_steps(*current, steps or FIRST_STEPS)

        return answer

    return side


def run_script(main: Callable[..., None], side: Callable[[int, int], Answer]) -> None:
    """Run a script's command or, if the arguments are `side RANK WORLD STORE`, one of its ranks.

    Args:
        main: Command of the script.
        side: Function of (rank, world) that returns the function that serves requests.
    """
    if sys.argv[1:2] != ["side"]:
        return typer.run(main)
    rank, world, store = sys.argv[2:]
    join_group(int(rank), int(world), store)
    answer = side(int(rank), int(world))
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


# A model on a rank


@dataclass
class Rig:
    """raytrec's training step on this rank, with functions that make batches.

    Attributes:
        step: Training step (worker.step.Step).
        form: Resolved read plan of the rows.
        features: Features of the run.
        collate: Function that makes a batch from pieces of rows.
        rows: Number of rows in the global batch.
    """

    step: Any
    form: Any
    features: Any
    collate: Any
    rows: int

    def piece(self, labels: list[Any], singles: list[Any], bags: Iterable[Any] = ()) -> Any:
        """Return rows with these columns, given as in `batch`."""
        from raytrec.data.canonical import build_canonical_table

        return self.pieces(build_canonical_table(self.form, labels, [], singles, list(bags), len(labels[0])))

    def pieces(self, table: Any) -> Any:
        """Return the rows of a pyarrow Table in canonical form."""
        from raytrec.data.assembler import Rows

        return Rows.of(table.combine_chunks().to_batches()[0])

    def batch(self, labels: Any, singles: list[Any], bags: Iterable[Any] = (), number: int = 0) -> Any:
        """Return a batch for this rank.

        Args:
            labels: Labels, float32 [B].
            singles: Ids of each feature with one id per row, [B].
            bags: (offsets, ids, weights or None) of each list feature.
            number: Step of the batch, counted from 0.
        """
        return self.collate([self.piece([labels], singles, bags)], len(labels), self.rows, number)

    def repeat(self, pieces: list[Any]) -> Iterator[Any]:
        """Yield a batch for each of these pieces of rows in turn, endlessly."""
        for number, piece in enumerate(cycle(pieces)):
            yield self.collate([piece], len(piece), self.rows, number)


def rig(
    schema: dict[str, Any], model: dict[str, Any], world: int, rows: int, lists: Iterable[str] = (), **sections: Any
) -> Rig:
    """Build a model on this rank on CPU, and return the model's Rig.

    Args:
        schema: Content of a schema; by default, with one label `y` and no dense columns.
        model: Section `model` of the configuration.
        world: Number of ranks.
        rows: Number of rows in the global batch.
        lists: Features with a list of ids in each row.
        sections: Other sections of the configuration.
    """
    import torch

    from raytrec.config.features import resolve_features
    from raytrec.config.run_config import RunConfig
    from raytrec.config.schema import Schema
    from raytrec.data.batch import Collator
    from raytrec.data.read_plans import ReadPlan, ResolvedReadPlan
    from raytrec.worker.build import build_step

    parsed = Schema.parse({"labels": ["y"], "dense": [], **schema}, "benchmark")
    values = {"data": {"train": "unused", "global_batch_size": rows}, "scaling": {"num_workers": world}, "model": model}
    config = RunConfig.model_validate(values | sections)
    form = ResolvedReadPlan(ReadPlan(parsed), lists=frozenset(lists) & set(parsed.sparse))
    step, _ = build_step(config, parsed, torch.device("cpu"))
    features = resolve_features(parsed, config.model)
    return Rig(step, form, features, Collator(form, features), rows)


def time_steps(step: Any, batches: Iterator[Any], steps: int) -> tuple[float, float]:
    """Train for some steps, and return this rank's (seconds, CPU seconds)."""
    began, used = perf_counter(), process_time()
    for _ in step.train(batches, steps):
        pass
    return perf_counter() - began, process_time() - used
