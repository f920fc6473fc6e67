"""Part of benchmarks/tiers.py that trains a table whose pages do not fit into memory."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from harness import Grid
from rank_group import Ranks, run_script
from tiers_side import BATCH, BATCHES, ROW_BYTES, Settings, Trained, scattered, set_up_once

from raytrec.compat.fbgemm import measure_cache_hits
from raytrec.compat.torchrec_ import iterate_sharded_kernels
from raytrec.embeddings.mapped import ROW_BYTES as ROW_BYTES_IN_MEMORY

EXPONENT = 1.05  # exponent of the lookups' power law
BUDGET = 0.25  # memory for the table, as a share of the table's size
SLACK = 16 << 20  # bytes that the system needs for a process
HOT = 0.75  # share of BUDGET that plan.memory_gib reserves for rows in memory
FEW = 0.01  # share of the table's rows
# Side → (kernel, True if memory is limited, plan.memory_gib as a share of the table).
SIDES = {
    "whole table in a file": ("fused_mmap", True, None),
    "whole table in a file, pages prefetched": ("fused_mmap", True, FEW + ROW_BYTES_IN_MEMORY / ROW_BYTES),
    "hot rows in memory": ("fused_mmap", True, HOT * BUDGET),
    "all in memory": ("fused", False, None),
}


def groups_here() -> Path | None:
    """Return the folder of this process's memory cgroup (v1), or None if no groups can be created there."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, kinds, name = line.split(":", 2)
        folder = Path(f"/sys/fs/cgroup/memory{name}")
        if kinds == "memory" and os.access(folder, os.W_OK):
            return folder
    return None


class Side:
    """Process that trains a table, optionally in a memory cgroup."""

    def set_up(self, settings: dict[str, Any], group: str | None) -> bool:
        """Create and enter the memory cgroup, unless `group` is None, and make the table; return True."""
        self._group = Path(group) if group else None
        if self._group:
            self._group.mkdir()
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
        chosen = Settings(**settings)
        set_up_once(chosen)
        self._trained = Trained(chosen, chosen.rows, fill=True)
        return True

    def bound(self, limit: int | None) -> int:
        """Limit this process's memory, including files, and return the limit in bytes (0: no group).

        Args:
            limit: Limit in bytes; None: the group's current memory without files, plus SLACK, plus the
                share BUDGET of the table.
        """
        if self._group is None:
            return 0
        if limit is None:
            lines = (line.split() for line in (self._group / "memory.stat").read_text().splitlines())
            own = next(int(size) for name, size in lines if name == "rss")
            limit = own + SLACK + int(BUDGET * self._trained.schema.tables["t"].rows * ROW_BYTES)
        (self._group / "memory.limit_in_bytes").write_text(str(limit))
        return limit

    def train(self, turn: int) -> tuple[float, list[float], float | None]:
        """Train BATCHES steps; return the seconds, the losses, and the share of lookups found in memory."""
        trained = self._trained
        batches = trained.random_batches(power_law, seed=turn)
        began = perf_counter()
        losses = [float(outputs.loss.detach()) for outputs in trained.step.train(iter(batches), len(batches))]
        took = perf_counter() - began
        kernels = iterate_sharded_kernels(trained.step.model)
        hits = [share for kernel in kernels if (share := measure_cache_hits(kernel)) is not None]
        return took, losses, hits[0] if hits else None


def side(rank: int, world: int) -> Any:
    """Return the function with which a rank serves requests by calling methods of `Side`."""
    process = Side()
    return lambda method, **values: getattr(process, method)(**values)


def power_law(uniform: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ids drawn from a power law, k^-EXPONENT for the k-th most frequent id, spread over the table.

    Args:
        uniform: Uniform random numbers from 0 to 1, float64.
        rows: Number of rows in the table.
    """
    last = (rows + 1.0) ** (1 - EXPONENT)
    ranks = (uniform * (last - 1) + 1) ** (1 / (1 - EXPONENT)) - 1
    return scattered(ranks.long().clamp(max=rows - 1), rows)


def run_short(folder: str, gib: float, warm_up: int, turns: int) -> dict[str, Any]:
    """Train all sides in turns of BATCHES new batches, and return their measurements.

    Args:
        folder: Folder for the tables' files.
        gib: Size of the table with its state, in GiB.
        warm_up: Number of turns that are not counted. Memory is limited after the first turn.
        turns: Number of turns that are counted.
    """
    rows, above = int(gib * 2**30) // ROW_BYTES, groups_here()
    durations, losses, hits = ({side: [] for side in SIDES} for _ in range(3))
    ranks: dict[str, Ranks] = {}
    groups = []
    with ExitStack() as at_end:
        at_end.callback(lambda: [group.rmdir() for group in groups if group.exists()])  # after their processes
        for number, (side, (kernel, bounded, memory)) in enumerate(SIDES.items()):
            settings = Settings(kernel, rows, 0, folder, memory and memory * gib)
            ranks[side] = Ranks("tiers_short.py", 1, at_end)
            group = above / f"tiers-{os.getpid()}-{number}" if above and bounded else None
            groups += [group] if group else []
            ranks[side].ask(method="set_up", settings=asdict(settings), group=group and str(group))
        limit = None
        for turn in range(-warm_up, turns):
            for side in SIDES if turn % 2 else reversed(SIDES):
                ((seconds, of_turn, share),) = ranks[side].ask(method="train", turn=turn + warm_up)
                losses[side] += of_turn
                if turn >= 0:
                    durations[side].append(seconds)
                    hits[side] += [share] if share is not None else []
            for side in [side for side, (_, bounded, _) in SIDES.items() if bounded and turn == -warm_up]:
                limit = ranks[side].ask(method="bound", limit=limit)[0] or None
    every = list(losses.values())
    return {
        "rows": rows,
        "bounded": above is not None,
        "rows_per_s": {side: BATCH * BATCHES / median(seconds) for side, seconds in durations.items()},
        "equal": all(each == every[0] and all(map(math.isfinite, each)) for each in every),
        "hits": {side: median(shares) for side, shares in hits.items() if shares},
    }


def short_table(results: dict[str, Any]) -> Grid:
    """Return the table for docs/sharding.md."""
    rates, hits, size = results["rows_per_s"], results["hits"], results["rows"] * ROW_BYTES / 2**20
    slowest, *_ = rates.values()
    rows = [
        [side, f"{rate:,.0f}", f"{rate / slowest:.1f}", f"{hits[side]:.0%}" if side in hits else ""]
        for side, rate in rates.items()
    ]
    title = f"{size:,.0f} MiB, of which {BUDGET:.0%} fit in memory"
    return Grid((title, "rows/s", "rows/s ÷ first variant", "lookups served from memory"), rows)


if __name__ == "__main__":
    run_script(lambda: None, side)
