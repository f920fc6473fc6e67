"""An evaluation's rows as a task's metrics need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from raytrec.common.collectives import Peers
from raytrec.metrics.over_ranks.groups import GroupRows, rank_of
from raytrec.metrics.over_ranks.ranked import Counted, Scores
from raytrec.metrics.over_ranks.slices import Slices, summarize
from raytrec.metrics.registry import BOUND, GroupMetric, Metric, RankedMetric
from raytrec.metrics.selection import Selection

AUC_BYTES = 160  # a row, at most: float64, sorted, with cumulative sums


class TaskRows:
    """The rows of one task that this rank evaluates, kept as its metrics and the slices need them.

    Attributes:
        columns: of the keys that they need.
        needed: whether they need rows at all.
    """

    def __init__(self, selection: Selection, task: str):
        about, settings, metrics = selection.tasks[task], selection.settings, selection.of[task]
        self._selection, self._task, self._metrics = selection, task, metrics
        self._scores = self._groups = None
        self._slices: dict[str, Slices] = {}
        columns: list[str] = []
        if about.outputs == 1:
            how = about.loss.predict, settings.max_exact_rows
            # Metrics, or their curves, that need rows in the order of their predictions.
            if any(issubclass(m, RankedMetric) or m.ranked_curve is not Metric.ranked_curve for m in metrics):
                self._scores = Scores(*how)
            if grouped := _of_kind(metrics, GroupMetric):
                columns = [about.group, *[about.item] * any(metric.needs_item for metric in grouped)]
                self._groups = GroupRows(*how, columns)
            self._slices = {name: Slices(*how, [name]) for name in settings.slices}
        self.columns = list(dict.fromkeys([*columns, *self._slices]))
        kept: list[Any] = [self._scores, self._groups, *self._slices.values()]
        self._kept = [each for each in kept if each]
        self.needed = bool(self._kept)

    def add(self, rows: Counted) -> None:
        """Add rows."""
        for kept in self._kept:
            kept.add(rows)

    def figures(self, peers: Peers, place: torch.device) -> tuple[dict[str, float | None], dict]:
        """Figures by their keys, and curves (evaluate.Curves), the same on all ranks; a collective."""
        figures: dict[str, float | None] = {}
        curves: dict[str, dict[str, Any]] = {}
        if self._scores:
            self._rank(peers, place, figures, curves)
        if self._groups:
            self._group(peers, place, figures)
        return {self._key(name): value for name, value in figures.items()}, curves

    def slices(
        self, peers: Peers, place: torch.device, names: Mapping[str, dict[int, str]]
    ) -> dict[str, Any]:
        """Column → the figures of its slices (slices.summarize); a collective.

        Args:
            names: column → the texts of its values that this rank has seen, by their keys.
        """
        return {
            column: summarize(slices.figures(peers, place), peers, names.get(column, {}))
            for column, slices in self._slices.items()
        }

    def _rank(self, peers: Peers, place: torch.device, figures: dict, curves: dict) -> None:
        """Metrics and curves of the rows in the order of their predictions."""
        ranked, binned = self._scores.ranked(peers, place)
        metrics = _of_kind(self._metrics, RankedMetric)
        totals = _added([metric.sums(ranked) for metric in metrics], peers)
        for metric, sums in zip(metrics, totals, strict=True):
            defined = ranked.both_classes
            figures[metric.name] = float(metric.figure(sums)) if defined else None
            if binned and defined:
                figures[metric.name + BOUND] = float(metric.bound(sums))
        for metric in self._metrics:
            if (points := metric.ranked_curve(ranked)) is not None:
                curve = self._key(metric.ranked_curve.__name__)
                curves[curve] = {**points, "metric": self._key(metric.name)}

    def _group(self, peers: Peers, place: torch.device, figures: dict) -> None:
        """Metrics of whole groups, part by part of all of them."""
        metrics = _of_kind(self._metrics, GroupMetric)
        sums: list[dict[str, torch.Tensor]] = [{} for _ in metrics]
        distinct: list[dict[str, torch.Tensor]] = [{} for _ in metrics]
        for groups in self._groups.groups(peers, place):
            for metric, so_far, seen in zip(metrics, sums, distinct, strict=True):
                for name, value in metric.sums(groups).items():
                    so_far[name] = so_far.get(name, 0) + value.double()
                for name, keys in metric.distinct(groups).items():
                    seen[name] = torch.cat([seen.get(name, keys[:0]), keys]).unique()
        for so_far, seen in zip(sums, distinct, strict=True):
            so_far |= {name: _count_distinct(keys, peers) for name, keys in seen.items()}
        for metric, total in zip(metrics, _added(sums, peers), strict=True):
            counts = {name: round(float(value)) for name, value in metric.counts(total).items()}
            figures |= {metric.name: float(metric.figure(total)), **counts}

    def _key(self, name: str) -> str:
        return self._selection.key(self._task, name)


def place_for(rows: int, device: torch.device, row_bytes: int = AUC_BYTES) -> torch.device:
    """Where something of so many rows is kept or computed, by default their AUC: on a GPU if half of its free
    memory is enough."""
    if device.type == "cuda" and rows * row_bytes > torch.cuda.mem_get_info(device)[0] // 2:
        return torch.device("cpu")
    return device


def _of_kind(metrics: list[type[Metric]], kind: type) -> list:
    return [metric for metric in metrics if issubclass(metric, kind)]


def _added(sums: list[dict[str, torch.Tensor]], peers: Peers) -> list[dict[str, torch.Tensor]]:
    """Sums of several metrics over all ranks, by one collective."""
    values = [value for each in sums for value in each.values()]
    if not values:
        return sums
    total = iter(peers.sum(torch.stack([value.double().cpu() for value in values])))
    return [{name: next(total) for name in each} for each in sums]


def _count_distinct(keys: torch.Tensor, peers: Peers) -> torch.Tensor:
    """How many of the distinct keys of all ranks belong to this one."""
    (mine,) = peers.send([keys], rank_of(keys, peers.world))
    return torch.tensor(len(mine.unique()), dtype=torch.float64)
