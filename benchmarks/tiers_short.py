"""Where memory is short: the part of benchmarks/tiers.py in which a table's pages do not fit in memory."""

from __future__ import annotations

import math
import os
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tiers_side import BATCH, BATCHES, ROW_BYTES, Settings, Trained, begin, scattered

from raytrec.compat.fbgemm import cache_hits
from raytrec.compat.torchrec_ import sharded_kernels
from raytrec.embeddings.mapped import ROW_BYTES as ROW_BYTES_IN_MEMORY

EXPONENT = 1.05  # of the power law of lookups
BUDGET = 0.25  # of the table: memory in addition to what the process takes without it
SLACK = 16 << 20  # bytes, of the system for a process
HOT = 0.75  # of that: plan.memory_gib, with which rows are in memory
FEW = 0.01  # of the table's rows
# Side → (kernel, whether memory is bounded, of the table: plan.memory_gib).
SIDES = {
    "whole table in a file": ("fused_mmap", True, None),
    "likewise, pages asked for at once": ("fused_mmap", True, FEW + ROW_BYTES_IN_MEMORY / ROW_BYTES),
    "hot rows in memory": ("fused_mmap", True, HOT * BUDGET),
    "all in memory": ("fused", False, None),
}
_side: Side  # of this process


def groups_here() -> Path | None:
    """The folder of this process's memory cgroup (v1), where it may make others; None: it may not."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, kinds, name = line.split(":", 2)
        folder = Path(f"/sys/fs/cgroup/memory{name}")
        if kinds == "memory" and os.access(folder, os.W_OK):
            return folder
    return None


@dataclass
class Side:
    """What a process trains."""

    trained: Trained
    group: Path | None


def set_up(store: str, settings: Settings, group: Path | None) -> None:
    """Makes the table in a process of its own.

    Args:
        group: of cgroups, in which its memory is bounded; None: it is not.
    """
    global _side
    if group:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    begin(store, settings)
    _side = Side(Trained(settings, settings.rows, fill=True), group)


def bound(limit: int | None) -> int | None:
    """Bounds this process's memory, its own and that of files.

    Args:
        limit: bytes; None: what the group has of its own, with SLACK, and BUDGET of the table.

    Returns:
        The limit; None: it cannot be bounded.
    """
    if _side.group is None:
        return None
    if limit is None:
        lines = (line.split() for line in (_side.group / "memory.stat").read_text().splitlines())
        own = next(int(size) for name, size in lines if name == "rss")
        limit = own + SLACK + int(BUDGET * _side.trained.schema.tables["t"].rows * ROW_BYTES)
    (_side.group / "memory.limit_in_bytes").write_text(str(limit))
    return limit


def train(turn: int) -> tuple[float, list[float], float | None]:
    """Seconds of some steps, their losses, and the share of lookups whose row was in memory."""
    made = _side.trained
    batches = made.random_batches(power_law, seed=turn)
    began = perf_counter()
    losses = [float(outputs.loss.detach()) for outputs in made.step.train(iter(batches), len(batches))]
    took = perf_counter() - began
    hits = [share for kernel in sharded_kernels(made.step.model) if (share := cache_hits(kernel)) is not None]
    return took, losses, hits[0] if hits else None


def power_law(uniform: torch.Tensor, rows: int) -> torch.Tensor:
    """Ids whose k-th is looked up k^-EXPONENT as often as the first, spread over the table.

    Args:
        uniform: float64 from 0 to 1.
    """
    last = (rows + 1.0) ** (1 - EXPONENT)
    ranks = (uniform * (last - 1) + 1) ** (1 / (1 - EXPONENT)) - 1
    return scattered(ranks.long().clamp(max=rows - 1), rows)


def run_short(folder: str, gib: float, warm_up: int, turns: int) -> dict[str, Any]:
    """Trains on all sides in turns, BATCHES new batches at a time.

    Args:
        gib: of the table, with its state. warm_up: turns that are not counted.
    """
    rows, above = int(gib * 2**30) // ROW_BYTES, groups_here()
    took: dict[str, list[float]] = {side: [] for side in SIDES}
    losses: dict[str, list[float]] = {side: [] for side in SIDES}
    hits: dict[str, list[float]] = {side: [] for side in SIDES}
    pools: dict[str, Executor] = {}
    groups = []
    with tempfile.TemporaryDirectory() as stores, ExitStack() as at_end:
        at_end.callback(
            lambda: [group.rmdir() for group in groups if group.exists()]
        )  # when their processes have ended
        for number, (side, (kernel, bounded, memory)) in enumerate(SIDES.items()):
            settings = Settings(kernel, rows, 0, folder, memory and memory * gib)
            pools[side] = at_end.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            group = above / f"tiers-{os.getpid()}-{number}" if above and bounded else None
            groups += [group] if group else []
            pools[side].submit(set_up, f"{stores}/{number}", settings, group).result()
        limit = None
        for turn in range(-warm_up, turns):
            for side in SIDES if turn % 2 else reversed(SIDES):
                seconds, its_losses, share = pools[side].submit(train, turn + warm_up).result()
                losses[side] += its_losses
                if turn >= 0:
                    took[side].append(seconds)
                    hits[side] += [share] if share is not None else []
            for side in [side for side, (_, bounded, _) in SIDES.items() if bounded and turn == -warm_up]:
                limit = pools[side].submit(bound, limit).result()
    every = list(losses.values())
    return {
        "rows": rows,
        "bounded": above is not None,
        "rows_per_s": {side: BATCH * BATCHES / median(seconds) for side, seconds in took.items()},
        "equal": all(each == every[0] and all(map(math.isfinite, each)) for each in every),
        "hits": {side: median(shares) for side, shares in hits.items() if shares},
    }


def document_short(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    rates, hits, size = found["rows_per_s"], found["hits"], found["rows"] * ROW_BYTES / 2**20
    slowest, *_ = rates.values()
    title = f"{size:,.0f} MiB, of which {BUDGET:.0%} fit in memory"
    lines = [f"| {title} | rows a second | ÷ first | lookups of rows in memory |", "|---|---:|---:|---:|"]
    for side, rate in rates.items():
        share = f"{hits[side]:.0%}" if side in hits else ""
        lines.append(f"| {side} | {rate:,.0f} | {rate / slowest:.1f} | {share} |")
    return "\n".join(lines)
