"""Lines of ranks.jsonl combined over steps and over ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import hypot, nan
from typing import Any

from raytrec.common.messages import RankLine
from raytrec.tracking.history import sum_intervals

ADDED = ("lookups", "lookup_bytes", "weight_bytes", "state_bytes")  # over the tables of a rank
WAIT_PHASES = ("input_exchange", "collectives")  # phases in which a rank waits for the others, too

SUMMED = ("weight_bytes", "state_bytes", "lookups", "lookup_bytes", "touched_rows")
MAXIMA = ("max_abs", "row_norm_max")
NORMS = ("weight_norm", "gradient_norm", "update_norm", "state_norm")
OF_IDS = ("occupancy", "admitted_ids", "evicted_ids", "fallback_share", "id_age")  # the same on all ranks
# Figures that are averaged over shards, and the weight of a shard: the whole that its figure is a share of.
WEIGHTS: dict[str, Callable[[dict[str, Any]], float]] = {
    **dict.fromkeys(
        # Ids that are hashed fall on all rows alike.
        ("dead_share", "row_norm_p05", "row_norm_p50", "row_norm_p95", "collision_rate", *OF_IDS),
        lambda entry: entry.get("rows") or 0.0,
    ),
    "unique_ratio": lambda entry: _ids_of_step(entry),
    "changed_share": lambda entry: entry.get("read_ids") or 0.0,
    "cache_hit_rate": lambda entry: entry.get("lookups") or 0.0,
}
FIGURES = (*SUMMED, *MAXIMA, *NORMS, *WEIGHTS)  # of a table, over all ranks
BINS = 30


def table_bytes(entry: dict[str, Any]) -> float:
    """Bytes of weights and optimizer state of a rank's shards of a table."""
    return (entry.get("weight_bytes") or 0.0) + (entry.get("state_bytes") or 0.0)


def own_time(line: RankLine) -> float:
    """Seconds of an interval in which a rank did not wait for others."""
    return line.seconds - sum(line.phase_s(phase) for phase in WAIT_PHASES)


def by_step(lines: list[RankLine]) -> dict[int, list[RankLine]]:
    """Step → the lines of its ranks."""
    steps: dict[int, list[RankLine]] = {}
    for line in lines:
        steps.setdefault(line.step, []).append(line)
    return steps


def by_rank(lines: list[RankLine]) -> dict[int, list[RankLine]]:
    """Rank → its lines, in the order of their steps."""
    ranks: dict[int, list[RankLine]] = {}
    for line in lines:
        ranks.setdefault(line.rank, []).append(line)
    return dict(sorted(ranks.items()))


def last_group(lines: list[RankLine]) -> list[RankLine]:
    """The lines since the group of workers last changed: only these ranks can be compared."""
    kept: list[RankLine] = []
    for line in reversed(lines):
        if kept and (line.attempt, line.world) != (kept[0].attempt, kept[0].world):
            break
        kept.append(line)
    return kept[::-1]


def skip_warmup(lines: list[RankLine]) -> list[RankLine]:
    """The lines of the last group, where there are others without its first interval: readers start in it."""
    group = last_group(lines)
    first = min((line.first_step for line in group), default=0)
    return [line for line in group if line.first_step > first] or group


def sum_over_time(lines: list[RankLine]) -> list[RankLine]:
    """One line for each rank (`sum_intervals`).

    Args:
        lines: of one rank or of several, each rank's in the order of their steps.
    """
    return [sum_intervals(mine) for mine in by_rank(lines).values()]


def order_by_load(lines: list[RankLine]) -> list[str]:
    """All tables, the one with the most bytes looked up first."""
    load: dict[str, float] = {}
    for line in lines:
        for name, entry in line.tables.items():
            load[name] = load.get(name, 0.0) + (entry.get("lookup_bytes") or 0.0)
    return sorted(load, key=lambda name: (-load[name], name))


def combine_shards(lines: list[RankLine], table: str, replicated: bool = False) -> dict[str, Any]:
    """Figures of the shards of a table together, at one step: in MLflow and in the report.

    Args:
        lines: of all ranks at the step.
        replicated: whether every rank holds the whole table, so that norms are those of one rank; the
            entries may have it, too.

    Returns:
        FIGURES: sums, the largest, norms over all shards, or averages by WEIGHTS; NaN where no rank has a
        figure. And `row_norm_counts`, a list of 30 floats, or None.
    """
    entries = [line.tables[table] for line in lines if table in line.tables]
    replicated = replicated or any(entry.get("replicated") is True for entry in entries)
    out: dict[str, Any] = {key: _known(entries, key, sum) for key in SUMMED}
    out |= {key: _known(entries, key, max) for key in MAXIMA}
    out |= {key: _known(entries, key, max if replicated else lambda values: hypot(*values)) for key in NORMS}
    out |= {key: _mean(entries, key, weight) for key, weight in WEIGHTS.items()}
    counts = [c for entry in entries if (c := entry.get("row_norm_counts")) and len(c) == BINS]
    out["row_norm_counts"] = [sum(column) for column in zip(*counts, strict=True)] if counts else None
    return out


def _known(entries: list[dict], key: str, combine: Any) -> float:
    values = [value for entry in entries if (value := entry.get(key)) is not None]
    return float(combine(values)) if values else nan


def _ids_of_step(entry: dict[str, Any]) -> float:
    """The ids that a shard looked up in the probed step: its distinct rows ÷ their ratio to its ids."""
    ratio = entry.get("unique_ratio") or 0.0
    return (entry.get("touched_rows") or 0.0) / ratio if ratio > 0 else 0.0


def _mean(entries: list[dict], key: str, weight: Callable[[dict], float]) -> float:
    """The mean over shards, by weight; the plain one where nothing has weight."""
    pairs = [(value, weight(entry)) for entry in entries if (value := entry.get(key)) is not None]
    if total := sum(w for _, w in pairs):
        return sum(value * w for value, w in pairs) / total
    return sum(value for value, _ in pairs) / len(pairs) if pairs else nan
