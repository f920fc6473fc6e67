"""The lines of all ranks at one step (docs/watch.md), and the MLflow metrics that they become."""

from __future__ import annotations

from math import sqrt
from typing import Any

from raytrec.tracking.system import system_metrics

ADDED = ("lookups", "lookup_bytes", "weight_bytes", "state_bytes")
NORMS = ("weight_norm", "gradient_norm", "update_norm", "state_norm")
LARGEST = ("max_abs", "row_norm_max")
AVERAGED = (
    "row_norm_p05",
    "row_norm_p50",
    "row_norm_p95",
    "unique_ratio",
    "dead_share",
    "changed_share",
    "cache_hit_rate",
    "collision_rate",
)
PER_RANK = (*ADDED, *NORMS, *LARGEST, *AVERAGED, "touched_rows")


class Lines:
    """Gathers what ranks say until all have spoken of a step."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], list[dict[str, Any]]] = {}

    def add(self, line: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The lines of all ranks in their order, once the last has come."""
        key = line["attempt"], line["step"]
        lines = self._waiting.setdefault(key, [])
        lines.append(line)
        if len(lines) < line["world"]:
            return None
        for old in [k for k in self._waiting if k <= key]:  # of groups that have ended meanwhile, too
            del self._waiting[old]
        return sorted(lines, key=lambda line: line["rank"])


def rank_metrics(lines: list[dict[str, Any]], cells: int) -> dict[str, float | None]:
    """MLflow's figures of one step.

    Args:
        lines: of all ranks.
        cells: up to so many ranks × tables, those of each table on each rank are among them.

    Returns:
        watch/rank/R/…: load, memory and milliseconds of each phase a step; watch/table/NAME/…: sums, norms
        and maxima over ranks, and averages of shares and quantiles, weighted by rows;
        watch/rank/R/table/NAME/…; system/rank_R/….
    """
    out: dict[str, float | None] = {}
    names = sorted({name for line in lines for name in line["tables"]})
    for line in lines:
        out |= _of_rank(line)
        if len(lines) * len(names) <= cells:
            for name, figures in line["tables"].items():
                place = f"watch/rank/{line['rank']}/table/{name}"
                out |= {f"{place}/{key}": figures.get(key) for key in PER_RANK}
    for name in names:
        shards = [line["tables"][name] for line in lines if name in line["tables"]]
        out |= {f"watch/table/{name}/{key}": value for key, value in over_ranks(shards).items()}
    return out


def _of_rank(line: dict[str, Any]) -> dict[str, float | None]:
    place, steps = f"watch/rank/{line['rank']}", max(1, line["steps"])
    out = {f"{place}/{phase}_ms": 1e3 * s / steps for phase, s in line["phases_s"].items()}
    out[f"{place}/step_ms"] = 1e3 * line["seconds"] / steps
    for key in ADDED:
        out[f"{place}/{key}"] = sum(figures[key] for figures in line["tables"].values())
    return out | system_metrics(line["rank"], line["system"])


def over_ranks(shards: list[dict[str, Any]]) -> dict[str, float | None]:
    """One table's figures over the ranks that have a shard of it. Data-parallel tables are counted on each
    rank: their memory and lookups add up, their norms are those of one copy."""
    copies = len(shards) > 1 and all(shard.get("replicated") for shard in shards)
    out: dict[str, float | None] = {key: sum(shard[key] for shard in shards) for key in ADDED}
    for key in NORMS:
        values = _known(shards, key)
        out[key] = (max(values) if copies else sqrt(sum(v * v for v in values))) if values else None
    for key in LARGEST:
        out[key] = max(_known(shards, key), default=None)
    for key in AVERAGED:
        weighted = [(s["rows"], s[key]) for s in shards if s.get(key) is not None and s["rows"]]
        rows = sum(weight for weight, _ in weighted)
        out[key] = sum(weight * value for weight, value in weighted) / rows if rows else None
    return out


def _known(shards: list[dict[str, Any]], key: str) -> list[float]:
    return [shard[key] for shard in shards if shard.get(key) is not None]
