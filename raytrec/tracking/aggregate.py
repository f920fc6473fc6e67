"""Lines of ranks.jsonl put together: over steps for a rank, over ranks for a table."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, nan, sqrt
from typing import Any

from raytrec.common.formatting import is_step, number, or_0
from raytrec.common.messages import PHASES

ADDED = ("lookups", "lookup_bytes", "weight_bytes", "state_bytes")  # over the tables of a rank
WAITING = ("input_exchange", "collectives")  # phases in which a rank waits for the others, too

LOADS = ("lookups", "lookup_bytes")
SUMMED = ("weight_bytes", "state_bytes", "lookups", "lookup_bytes", "touched_rows")
LARGEST = ("max_abs", "row_norm_max")
NORMS = ("weight_norm", "gradient_norm", "update_norm", "state_norm")
# Of managed ids: what all ranks know together, and each of them says.
OF_IDS = ("occupancy", "admitted_ids", "evicted_ids", "fallback_share", "id_age")
# Figures that are averaged over shards, and what each shard counts for: what its figure is a share of.
WEIGHTS: dict[str, Callable[[dict[str, Any]], float]] = {
    **dict.fromkeys(
        # Ids that are hashed fall on all rows alike.
        ("dead_share", "row_norm_p05", "row_norm_p50", "row_norm_p95", "collision_rate", *OF_IDS),
        lambda entry: or_0(entry.get("rows")),
    ),
    "unique_ratio": lambda entry: _ids_of_step(entry),
    "changed_share": lambda entry: or_0(entry.get("read_ids")),
    "cache_hit_rate": lambda entry: or_0(entry.get("lookups")),
}
FIGURES = (*SUMMED, *LARGEST, *NORMS, *WEIGHTS)  # of a table, over all ranks
BINS = 30


def begin(line: dict[str, Any]) -> int:
    """The step before an interval's first one."""
    if is_step(line.get("first_step")):
        return line["first_step"]
    return line["step"] - max(1, int(or_0(line.get("steps"))))


def phases_of(line: dict[str, Any]) -> dict[str, float]:
    """Seconds in each phase of an interval; 0 for what was not measured."""
    found = line.get("phases_s")
    found = found if isinstance(found, dict) else {}
    return {phase: or_0(found.get(phase)) for phase in PHASES}


def tables_of(line: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Table → what a rank says of its shards."""
    return line.get("tables") or {}


def entries_of(line: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Table → what a rank says of its shards, or rank 0 of all ranks' (RankLine.spread)."""
    spread = line.get("spread")
    return {**tables_of(line), **spread} if isinstance(spread, dict) else tables_of(line)


def entry_of(line: dict[str, Any], table: str) -> dict[str, Any] | None:
    """The entry of one table; None where the line has none."""
    entry = tables_of(line).get(table)
    if entry is None and isinstance(spread := line.get("spread"), dict):
        return spread.get(table)
    return entry


def added(line: dict[str, Any], key: str) -> float:
    """One of ADDED over all tables of a rank."""
    sums = line.get("sums")
    if isinstance(sums, dict):
        return or_0(sums.get(key))
    return sum(or_0(entry.get(key)) for entry in tables_of(line).values())


def spread_part(line: dict[str, Any]) -> dict[str, Any]:
    """What a rank's parts of spread tables come to, as an entry; empty where there are none."""
    if not isinstance(line.get("sums"), dict):
        return {}
    own = tables_of(line).values()
    return {key: added(line, key) - sum(or_0(entry.get(key)) for entry in own) for key in ADDED}


def count_tables(line: dict[str, Any]) -> int:
    """Tables that a rank has a part of."""
    sums = line.get("sums")
    return int(or_0(sums.get("tables"))) if isinstance(sums, dict) else len(tables_of(line))


def lookup_bytes(line: dict[str, Any]) -> float:
    """Bytes that a rank looked up in an interval, over all tables."""
    return added(line, "lookup_bytes")


def table_bytes(entry: dict[str, Any]) -> float:
    """Bytes of weights and optimizer state of a rank's shards of a table."""
    return or_0(entry.get("weight_bytes")) + or_0(entry.get("state_bytes"))


def own_time(line: dict[str, Any]) -> float:
    """Seconds of an interval in which a rank did not wait for others."""
    phases = phases_of(line)
    return or_0(line.get("seconds")) - sum(phases[phase] for phase in WAITING)


def by_step(lines: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Step → the lines of its ranks."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        steps.setdefault(line["step"], []).append(line)
    return steps


def by_rank(lines: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Rank → its lines, in the order of their steps."""
    ranks: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        ranks.setdefault(line["rank"], []).append(line)
    return dict(sorted(ranks.items()))


def last_group(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines since the group of workers last changed: only these ranks can be compared."""
    kept: list[dict[str, Any]] = []
    for line in reversed(lines):
        same = not kept or all(line.get(key) == kept[0].get(key) for key in ("attempt", "world"))
        if not same:
            break
        kept.append(line)
    return kept[::-1]


def skip_warmup(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the last group, where there are others without its first interval: readers start in it."""
    group = last_group(lines)
    first = min((begin(line) for line in group), default=0)
    return [line for line in group if begin(line) > first] or group


def over_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each rank: seconds, steps, phases, lookups summed; the rest as of its last interval.

    Args:
        lines: of one rank or of several, each rank's in the order of their steps.
    """
    out = []
    for mine in by_rank(lines).values():
        of_tables: dict[str, Any] = {"tables": _summed(mine, "tables")}
        if isinstance(mine[-1].get("sums"), dict):
            of_tables["sums"] = _with_loads([line.get("sums") or {} for line in mine])
        if isinstance(mine[-1].get("spread"), dict):
            of_tables["spread"] = _summed(mine, "spread")
        phases = {phase: sum(phases_of(line)[phase] for line in mine) for phase in PHASES}
        sums = {key: sum(or_0(line.get(key)) for line in mine) for key in ("steps", "seconds")}
        out.append({**mine[-1], **sums, "first_step": begin(mine[0]), "phases_s": phases, **of_tables})
    return out


def _summed(lines: list[dict[str, Any]], field: str) -> dict[str, dict[str, Any]]:
    """Table → its last entry, with the loads of all."""
    of_lines = [line.get(field) or {} for line in lines]
    names = dict.fromkeys(name for entries in of_lines for name in entries)
    return {name: _with_loads([entries.get(name, {}) for entries in of_lines]) for name in names}


def _with_loads(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {**entries[-1], **{key: sum((or_0(e.get(key)) for e in entries), 0.0) for key in LOADS}}


def load_order(lines: list[dict[str, Any]]) -> list[str]:
    """All tables, the one with the most bytes looked up first."""
    load: dict[str, float] = {}
    for line in lines:
        for name, entry in entries_of(line).items():
            load[name] = load.get(name, 0.0) + or_0(entry.get("lookup_bytes"))
    return sorted(load, key=lambda name: (-load[name], name))


def table_over_ranks(lines: list[dict[str, Any]], table: str, replicated: bool = False) -> dict[str, Any]:
    """What the shards of a table come to together, at one step: in MLflow and in the report.

    Args:
        lines: of all ranks at the step.
        replicated: whether every rank holds the whole table, so that norms are those of one rank; the
            entries may say so, too.

    Returns:
        FIGURES: sums, the largest, norms over all shards, or averages by WEIGHTS; NaN where no rank has a
        figure. And `row_norm_counts`, a list of 30 floats, or None.
    """
    entries = [entry for line in lines if (entry := entry_of(line, table)) is not None]
    replicated = replicated or any(entry.get("replicated") is True for entry in entries)
    out: dict[str, Any] = {key: _known(entries, key, sum) for key in SUMMED}
    out |= {key: _known(entries, key, max) for key in LARGEST}
    out |= {key: _known(entries, key, max if replicated else _root_of_squares) for key in NORMS}
    out |= {key: _mean(entries, key, weight) for key, weight in WEIGHTS.items()}
    counts = [c for entry in entries if (c := counts_of(entry.get("row_norm_counts")))]
    out["row_norm_counts"] = [sum(column) for column in zip(*counts, strict=True)] if counts else None
    return out


def _known(entries: list[dict], key: str, combine: Any) -> float:
    values = [v for entry in entries if not isnan(v := number(entry.get(key)))]
    return float(combine(values)) if values else nan


def _root_of_squares(values: list[float]) -> float:
    return sqrt(sum(value * value for value in values))


def _ids_of_step(entry: dict[str, Any]) -> float:
    """The ids that a shard looked up in the probed step: its distinct rows ÷ their ratio to its ids."""
    ratio = or_0(entry.get("unique_ratio"))
    return or_0(entry.get("touched_rows")) / ratio if ratio > 0 else 0.0


def _mean(entries: list[dict], key: str, weight: Callable[[dict], float]) -> float:
    """The mean over shards, by weight; the plain one where nothing has weight."""
    pairs = [(number(e.get(key)), weight(e)) for e in entries]
    pairs = [(value, w) for value, w in pairs if not isnan(value)]
    total = sum(w for _, w in pairs)
    if total:
        return sum(value * w for value, w in pairs) / total
    return sum(value for value, _ in pairs) / len(pairs) if pairs else nan


def counts_of(value: Any) -> list[float] | None:
    """The bins of a histogram; None where it is none."""
    return [or_0(count) for count in value] if isinstance(value, list) and len(value) == BINS else None
