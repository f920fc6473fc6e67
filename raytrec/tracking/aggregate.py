"""Aggregate the lines of ranks.jsonl over steps and ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from math import hypot, nan
from typing import Any

from raytrec.common.messages import RankLine
from raytrec.tracking.history import sum_intervals

RANK_SUM_KEYS = ("lookups", "lookup_bytes", "weight_bytes", "state_bytes")  # summed over the tables of a rank
WAIT_PHASES = ("input_exchange", "collectives")  # phases that include waiting for other ranks

SUMMED = ("weight_bytes", "state_bytes", "lookups", "lookup_bytes", "touched_rows")
MAXIMUM_KEYS = ("max_abs", "row_norm_max")
NORM_KEYS = ("weight_norm", "gradient_norm", "update_norm", "state_norm")
ID_STATISTIC_KEYS = ("occupancy", "admitted_ids", "evicted_ids", "fallback_share", "id_age")  # equal on all ranks
# Statistic → function that returns a shard's weight in the average, which is the total to which the statistic refers.
WEIGHTS: dict[str, Callable[[dict[str, Any]], float]] = {
    **dict.fromkeys(
        # Hashed ids are spread evenly over rows, so shards are weighted by rows.
        ("dead_share", "row_norm_p05", "row_norm_p50", "row_norm_p95", "collision_rate", *ID_STATISTIC_KEYS),
        lambda entry: entry.get("rows") or 0.0,
    ),
    "unique_ratio": lambda entry: _estimate_step_ids(entry),
    "changed_share": lambda entry: entry.get("read_ids") or 0.0,
    "cache_hit_rate": lambda entry: entry.get("lookups") or 0.0,
}
FIGURES = (*SUMMED, *MAXIMUM_KEYS, *NORM_KEYS, *WEIGHTS)  # statistics of a table over all ranks
BINS = 30  # number of bins of row_norm_counts


def sum_table_bytes(entry: dict[str, Any]) -> float:
    """Return the bytes of weights and optimizer state of a rank's shards of a table, an entry of RankLine.tables."""
    return (entry.get("weight_bytes") or 0.0) + (entry.get("state_bytes") or 0.0)


def get_own_time_s(line: RankLine) -> float:
    """Return the seconds of an interval without the phases in which ranks wait for each other (WAIT_PHASES)."""
    return line.seconds - sum(line.phase_s(phase) for phase in WAIT_PHASES)


def by_step(lines: list[RankLine]) -> dict[int, list[RankLine]]:
    """Group lines by step, in the order in which the steps first occur."""
    steps: dict[int, list[RankLine]] = {}
    for line in lines:
        steps.setdefault(line.step, []).append(line)
    return steps


def by_rank(lines: list[RankLine]) -> dict[int, list[RankLine]]:
    """Group lines by rank, sorted by rank; the order of each rank's lines is kept."""
    ranks: dict[int, list[RankLine]] = {}
    for line in lines:
        ranks.setdefault(line.rank, []).append(line)
    return dict(sorted(ranks.items()))


def select_last_group(lines: list[RankLine]) -> list[RankLine]:
    """Return the trailing lines of the last worker group, because only lines of the same group are comparable.

    Lines belong to the same group if their attempt and their number of ranks are the same.
    """

    def is_in_last(line: RankLine) -> bool:
        return (line.attempt, line.world) == (lines[-1].attempt, lines[-1].world)

    return list(takewhile(is_in_last, reversed(lines)))[::-1]


def skip_warmup(lines: list[RankLine]) -> list[RankLine]:
    """Return the lines of the last worker group without the group's first interval, in which readers start.

    The first interval is kept if it is the only one.
    """
    group = select_last_group(lines)
    first = min((line.first_step for line in group), default=0)
    return [line for line in group if line.first_step > first] or group


def sum_over_time(lines: list[RankLine]) -> list[RankLine]:
    """Return one line per rank, summed over intervals (`sum_intervals`).

    Args:
        lines: Lines of any number of ranks; each rank's lines must be ordered by step.
    """
    return [sum_intervals(rank_lines) for rank_lines in by_rank(lines).values()]


def order_by_load(lines: list[RankLine]) -> list[str]:
    """Return the names of all tables in the lines, ordered by descending number of bytes looked up, then by name."""
    load: dict[str, float] = {}
    for line in lines:
        for name, entry in line.tables.items():
            load[name] = load.get(name, 0.0) + (entry.get("lookup_bytes") or 0.0)
    return sorted(load, key=lambda name: (-load[name], name))


def combine_shards(lines: list[RankLine], table: str, replicated: bool = False) -> dict[str, Any]:
    """Return the combined statistics of a table's shards at one step, for MLflow and the report.

    Args:
        lines: Lines of all recorded ranks at the step.
        table: Table name.
        replicated: True if every rank holds the complete table, in which case norms are combined as maxima; the key
            `replicated` of an entry has the same effect.

    Returns:
        Each name in FIGURES → its values combined over shards: the sum (SUMMED), the maximum (MAXIMUM_KEYS), the root
        of the sum of squares (NORM_KEYS), or the mean weighted by WEIGHTS; NaN if no rank has a value. Also
        row_norm_counts → list of BINS counts summed over shards, or None if no rank has counts.
    """
    entries = [line.tables[table] for line in lines if table in line.tables]
    replicated = replicated or any(entry.get("replicated") is True for entry in entries)
    out: dict[str, Any] = {key: _merge(entries, key, sum) for key in SUMMED}
    out |= {key: _merge(entries, key, max) for key in MAXIMUM_KEYS}
    out |= {key: _merge(entries, key, max if replicated else lambda values: hypot(*values)) for key in NORM_KEYS}
    out |= {key: _compute_weighted_mean(entries, key, weight) for key, weight in WEIGHTS.items()}
    counts = [c for entry in entries if (c := entry.get("row_norm_counts")) and len(c) == BINS]
    out["row_norm_counts"] = [sum(column) for column in zip(*counts, strict=True)] if counts else None
    return out


def _merge(entries: list[dict], key: str, combine: Any) -> float:
    values = [value for entry in entries if (value := entry.get(key)) is not None]
    return float(combine(values)) if values else nan


def _estimate_step_ids(entry: dict[str, Any]) -> float:
    """Return the number of ids looked up in the probed step: distinct rows ÷ ratio of distinct rows to ids."""
    ratio = entry.get("unique_ratio") or 0.0
    return (entry.get("touched_rows") or 0.0) / ratio if ratio > 0 else 0.0


def _compute_weighted_mean(entries: list[dict], key: str, weight: Callable[[dict], float]) -> float:
    """Return the weighted mean over shards; the unweighted mean if all weights are 0; NaN without values."""
    pairs = [(value, weight(entry)) for entry in entries if (value := entry.get(key)) is not None]
    if total := sum(w for _, w in pairs):
        return sum(value * w for value, w in pairs) / total
    return sum(value for value, _ in pairs) / len(pairs) if pairs else nan
