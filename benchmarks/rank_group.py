"""Ranks of a benchmark that starts them itself, without Ray."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

HERE = Path(__file__).parent


class Ranks:
    """The processes of one side of a benchmark: each is told a line of JSON, and answers with one.

    Args:
        script: in benchmarks/, what each of them runs with RANK WORLD STORE.
        tree: of the code, which may be an older one.
    """

    def __init__(self, script: str, tree: Path, world: int, stack: ExitStack):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-"))
        path, place = os.pathsep.join([str(tree), str(HERE)]), str(HERE / script)
        self._ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", place, str(rank), str(world), f"{folder}/store"],
                    env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    cwd=tree,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            for rank in range(world)
        ]

    def tell(self, **values: Any) -> dict[str, float]:
        """What they answer of seconds: those of the slowest, CPU seconds of all."""
        answers = self.ask(**values)
        return {"s": max(s for s, _ in answers), "cpu_s": sum(cpu for _, cpu in answers)}

    def ask(self, **values: Any) -> list[list[float]]:
        """What each of them answers."""
        for rank in self._ranks:
            rank.stdin.write(json.dumps(values) + "\n")
            rank.stdin.flush()
        answers = [json.loads(rank.stdout.readline() or "null") for rank in self._ranks]
        if None in answers:
            raise RuntimeError(f"a rank has ended: {values}")
        return answers


def time_steps(step: Any, batches: Iterator[Any], steps: int) -> tuple[float, float]:
    """(seconds, CPU seconds) of so many steps of training, in a rank."""
    began, used = perf_counter(), process_time()
    for _ in step.train(batches, steps):
        pass
    return perf_counter() - began, process_time() - used


def batches_of(collate: Any, pieces: list[Any], rows: int, global_rows: int) -> Iterator[Any]:
    """Batches of these pieces of rows, over and over, without end."""
    return (collate([piece], rows, global_rows, at) for at, piece in enumerate(cycle(pieces)))


def serve_steps(
    rank: int, world: int, store: str, build: Callable[[dict], tuple[Any, Iterator[Any]]]
) -> None:
    """Does what the lines of JSON say, until there are none: {"steps"} trains so many steps; of any other,
    `build` makes a Step and its batches, of which two are trained."""
    join_group(rank, world, store)
    for line in sys.stdin:
        told = json.loads(line)
        if "steps" not in told:
            step, batches = build(told)
        print(json.dumps(time_steps(step, batches, told.get("steps", 2))), flush=True)


def take_turns(
    sides: dict[str, Ranks], step_s: dict[str, float], rounds: int, rows: int, turn_s: float = 0.4
) -> dict[str, dict[str, float]]:
    """ms of a step and CPU-µs of a row, of each side: the best of its turns.

    Args:
        step_s: about how long a step of each takes.
        rows: of a step.
        turn_s: about how long a turn takes.
    """
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, ranks in sides.items():
            steps = max(2, min(40, round(turn_s / step_s[side])))
            told = ranks.tell(steps=steps)
            turns[side].append({name: value / steps for name, value in told.items()})
    return {
        side: {
            "step_ms": 1e3 * min(turn["s"] for turn in of_side),
            "cpu_us_per_row": 1e6 * min(turn["cpu_s"] for turn in of_side) / rows,
        }
        for side, of_side in turns.items()
    }


def join_group(rank: int, world: int, store: str) -> None:
    """Makes this process a quiet rank, with one thread, of a gloo group on this machine.

    Args:
        store: a file that does not exist yet, the same for all ranks.
    """
    import torch
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    torch.manual_seed(rank)
