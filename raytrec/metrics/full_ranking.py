"""Which metrics full rankings have (eval.retrieval): those of groups with one positive row. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from raytrec.metrics.registry import METRICS, GroupMetric, at_places

PREFIX = "retrieval"  # of their keys
ROWS, ITEMS, UNKNOWN = f"{PREFIX}.rows", f"{PREFIX}.items", f"{PREFIX}.unknown_items"  # counted beside them


def ranking_metrics(places: Sequence[int]) -> list[type[GroupMetric]]:
    """The metrics of full rankings.

    Args:
        places: k of those of the first k places.
    """
    able = [m for m in METRICS.parts.values() if issubclass(m, GroupMetric) and "of_ranks" in vars(m)]
    of_places = [at_places(m, k) for m in able if m.at_k for k in dict.fromkeys(places)]
    return [*of_places, *(m for m in able if not m.at_k)]
