"""The lines of all ranks at one step (docs/watch.md), and the MLflow metrics that they become."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any

from raytrec.tracking.aggregate import FIGURES, table_over_ranks

ADDED = ("lookups", "lookup_bytes", "weight_bytes", "state_bytes")  # over the tables of a rank

# MLflow 3.17 shows metrics whose names begin with system/ on its page "System metrics", under these names and
# in these units where its own monitor (mlflow/system_metrics) has them.
MLFLOW_NAMES = {
    "cpu_percent": ("cpu_utilization_percentage", 1),
    "rss_bytes": ("process_memory_usage_megabytes", 1e-6),
    "host_memory_percent": ("system_memory_usage_percentage", 1),
    "network_sent_bytes_per_s": ("network_transmit_megabytes_per_s", 1e-6),
    "network_received_bytes_per_s": ("network_receive_megabytes_per_s", 1e-6),
    "gpu_percent": ("gpu_utilization_percentage", 1),
    "gpu_memory_bytes": ("gpu_memory_usage_megabytes", 1e-6),
}


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
        watch/rank/R/…: load, memory and milliseconds of each phase a step; watch/table/NAME/…: what
        `totals.table_over_ranks` makes of all ranks; watch/rank/R/table/NAME/…; system/rank_R/….
    """
    out: dict[str, float | None] = {}
    names = sorted({name for line in lines for name in line["tables"]})
    for line in lines:
        out |= _of_rank(line)
        if len(lines) * len(names) <= cells:
            for name, figures in line["tables"].items():
                place = f"watch/rank/{line['rank']}/table/{name}"
                out |= {f"{place}/{key}": figures.get(key) for key in FIGURES}
    for name in names:
        figures = table_over_ranks(lines, name)
        out |= {f"watch/table/{name}/{key}": None if isnan(v := figures[key]) else v for key in FIGURES}
    return out


def _of_rank(line: dict[str, Any]) -> dict[str, float | None]:
    place, steps = f"watch/rank/{line['rank']}", max(1, line["steps"])
    out = {f"{place}/{phase}_ms": 1e3 * s / steps for phase, s in line["phases_s"].items()}
    out[f"{place}/step_ms"] = 1e3 * line["seconds"] / steps
    for key in ADDED:
        out[f"{place}/{key}"] = sum(figures[key] for figures in line["tables"].values())
    return out | system_metrics(line["rank"], line["system"])


def system_metrics(rank: int, sample: Mapping[str, float | None]) -> dict[str, float]:
    """A sample of `System` as MLflow metrics: system/rank_R/NAME; what is None is left out.

    Example:
        >>> system_metrics(1, {"cpu_percent": 98.0, "gpu_percent": None})
        {'system/rank_1/cpu_utilization_percentage': 98.0}
    """
    return {
        f"system/rank_{rank}/{name}": sample[key] * factor
        for key, (name, factor) in MLFLOW_NAMES.items()
        if sample.get(key) is not None
    }
