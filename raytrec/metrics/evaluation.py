"""Evaluation rows of a task, metrics that are computed from these rows, and metrics of slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raytrec.common.collectives import Peers
from raytrec.common.formatting import null_nonfinite
from raytrec.metrics.groups import GroupRows, assign_ranks, compute_group_auc
from raytrec.metrics.ranked import BoundedRows, Scores, assign_bins, compute_midpoints, sum_equal_rows
from raytrec.metrics.registry import BOUND_SUFFIX, GroupMetric, Metric, RankedMetric
from raytrec.metrics.selection import Selection

if TYPE_CHECKING:
    from raytrec.data.batch import Batch

AUC_BYTES_PER_ROW = 160  # peak memory per row: float64, sorted, with cumulative sums
MAX_LISTED_SLICES = 10  # maximum number of slices in the list of the largest and in the list of the worst
# Minimum weight of the rows of each label in a listed worst slice. With fewer rows, the AUC is mostly noise.
MIN_SLICE_LABEL_ROWS = 30
MAX_SLICE_NAMES = 100_000  # maximum number of values per column whose text a rank stores


class TaskRows:
    """Rows of one task that this rank evaluates, stored for the metrics and slices that cannot be computed from sums.

    A slice consists of the rows with the same value in a column of eval.slices. The key of a value is an integer
    (data.ids.compute_group_keys).

    Args:
        selection: Metrics and settings of the run.
        task: Name of the task.

    Attributes:
        columns: Columns whose keys the metrics and slices need (argument `keys` of `add`).
        needed: True if any metric or slice needs rows; False for tasks with several outputs.
    """

    def __init__(self, selection: Selection, task: str):
        spec, settings, metrics = selection.tasks[task], selection.settings, selection.of[task]
        self._selection, self._task, self._metrics = selection, task, metrics
        self._ranked = [metric for metric in metrics if issubclass(metric, RankedMetric)]
        self._grouped = [metric for metric in metrics if issubclass(metric, GroupMetric)]
        self._scores = self._groups = None
        self._slices: dict[str, Slices] = {}
        columns: list[str] = []
        if spec.outputs == 1:
            row_args = spec.loss.predict, settings.max_exact_rows
            # These metrics or their curves need rows sorted by prediction.
            if self._ranked or any(metric.ranked_curve is not Metric.ranked_curve for metric in metrics):
                self._scores = Scores(*row_args)
            if self._grouped:
                columns = [spec.group, *[spec.item] * any(metric.needs_item for metric in self._grouped)]
                self._groups = GroupRows(*row_args, columns)
            self._slices = {name: Slices(*row_args, [name]) for name in settings.slices}
        self.columns = list(dict.fromkeys([*columns, *self._slices]))
        stores: list[BoundedRows | None] = [self._scores, self._groups, *self._slices.values()]
        self._stores = [store for store in stores if store is not None]
        self.needed = bool(self._stores)

    def add(
        self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, keys: Mapping[str, torch.Tensor]
    ) -> None:
        """Store rows for the metrics and slices. The arguments are those of BoundedRows.add.

        Raises:
            RunError: Rows of groups exceed eval.max_exact_rows and cannot be written to disk.
        """
        for store in self._stores:
            store.add(logits, labels, weights, keys)

    def figures(self, peers: Peers, device: torch.device) -> tuple[dict[str, float | None], dict]:
        """Return key → value, for ranked and group metrics with their counts, and curves (worker.evaluate.Curves).

        If predictions are binned, the first dict also contains the maximum error of ranked metrics (METRIC_bound).
        Undefined values are None or NaN. All ranks must call this method once, at the end; their results are equal.

        Raises:
            RunError: Rows of groups cannot be written to disk (GroupRows.groups).
        """
        figures: dict[str, float | None] = {}
        curves: dict[str, dict[str, Any]] = {}
        if self._scores:
            self._add_ranked_metrics(peers, device, figures, curves)
        if self._groups:
            self._add_group_metrics(peers, device, figures)
        return {self._key(name): value for name, value in figures.items()}, curves

    def slices(self, peers: Peers, device: torch.device, names: Mapping[str, dict[int, str]]) -> dict[str, Any]:
        """Return column → result of Slices.figures.

        This is a collective operation: every rank must call it. `names` is column → key → text, for the slice values
        that this rank has seen.
        """
        return {column: slices.figures(peers, device, names.get(column, {})) for column, slices in self._slices.items()}

    def _add_ranked_metrics(self, peers: Peers, device: torch.device, figures: dict, curves: dict) -> None:
        """Compute metrics and curves over rows sorted by prediction; add them to `figures` and `curves`."""
        ranked, binned = self._scores.ranked(peers, device)
        totals = _sum_over_ranks([metric.sums(ranked) for metric in self._ranked], peers)
        for metric, sums in zip(self._ranked, totals, strict=True):
            defined = ranked.both_classes
            figures[metric.name] = float(metric.figure(sums)) if defined else None
            if binned and defined and (bound := metric.bound(sums)) is not None:
                figures[metric.name + BOUND_SUFFIX] = float(bound)
        for each in self._metrics:
            if (points := each.ranked_curve(ranked)) is not None:
                curves[self._key(each.ranked_curve.__name__)] = {**points, "metric": self._key(each.name)}

    def _add_group_metrics(self, peers: Peers, device: torch.device, figures: dict) -> None:
        """Add group metrics and their counts to `figures`. One part of the groups is in memory at a time."""
        metrics = self._grouped
        sums: list[dict[str, torch.Tensor]] = [{} for _ in metrics]
        distinct: list[dict[str, torch.Tensor]] = [{} for _ in metrics]
        for groups in self._groups.groups(peers, device):
            for metric, metric_sums, metric_keys in zip(metrics, sums, distinct, strict=True):
                for name, value in metric.sums(groups).items():
                    metric_sums[name] = metric_sums.get(name, 0) + value.double()
                for name, keys in metric.distinct(groups).items():
                    metric_keys[name] = torch.cat([metric_keys.get(name, keys[:0]), keys]).unique()
        for metric_sums, metric_keys in zip(sums, distinct, strict=True):
            metric_sums |= {name: _count_distinct(keys, peers) for name, keys in metric_keys.items()}
        for metric, total in zip(metrics, _sum_over_ranks(sums, peers), strict=True):
            counts = {name: round(float(value)) for name, value in metric.counts(total).items()}
            figures |= {metric.name: float(metric.figure(total)), **counts}

    def _key(self, name: str) -> str:
        return self._selection.key(self._task, name)


def choose_ranking_device(rows: int, device: torch.device, row_bytes: int = AUC_BYTES_PER_ROW) -> torch.device:
    """Return `device`, or the CPU if the rows would take more than half of the free memory of a GPU.

    By default, `row_bytes` is the peak memory per row while an AUC is computed.
    """
    if device.type == "cuda" and rows * row_bytes > torch.cuda.mem_get_info(device)[0] // 2:
        return torch.device("cpu")
    return device


def _sum_over_ranks(sums: list[dict[str, torch.Tensor]], peers: Peers) -> list[dict[str, torch.Tensor]]:
    """Return the sums of several metrics over all ranks, float64 in host memory, using one collective."""
    values = [value for each in sums for value in each.values()]
    if not values:
        return sums
    total = iter(peers.sum(torch.stack([value.double().cpu() for value in values])))
    return [{name: next(total) for name in each} for each in sums]


def _count_distinct(keys: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Return the number of distinct keys that this rank owns among the keys of all ranks.

    This is a collective operation: every rank must call it.
    """
    (owned_keys,) = peers.send([keys], assign_ranks(keys, peers.world))
    return torch.tensor(len(owned_keys.unique()), dtype=torch.float64)


class Slices(BoundedRows):
    """Rows of one task with the slice of each row, at 20 bytes per row.

    Once rows are binned (as in ranked.Scores), memory grows with the number of slices instead of the number of rows.
    """

    _bins: list[torch.Tensor] | None = None  # binned rows in the form returned by `_merge_slice_ties`

    def figures(self, peers: Peers, device: torch.device, names: Mapping[int, str]) -> dict[str, Any]:
        """Return metrics of the largest and the worst slices of all ranks; the result is the same on every rank.

        This is a collective operation: every rank must call it once, after all rows have been added.

        Args:
            peers: Ranks of the evaluation.
            device: Device that sorts the rows.
            names: Key → text of the slice values that this rank has seen.

        Returns:
            A dict with `slices`, the total number of slices, and the lists `largest` and `worst` of at most
            MAX_LISTED_SLICES dicts. Their keys are slice (the value as text; "key N" if no rank has recorded it), rows,
            auc and calibration (None if undefined), and, if all labels are 0 or 1 and rows are binned, auc_bound
            (maximum error of auc). `worst` contains only slices with enough rows (`_measure_slices`).
        """
        if binned := peers.max_number(self._bins is not None) > 0:
            self._compact()
        ties = [x.to(device) for x in self._bins or self._to_ties()]
        ties = _merge_slice_ties(*peers.send(ties, assign_ranks(ties[0], peers.world)))
        keys, rows, metrics, goodness = _measure_slices(ties, peers.max_number(not self._binary) == 0, binned)
        lists = {
            "largest": _list_lowest(-rows, keys, rows, metrics, peers),
            "worst": _list_lowest(goodness, keys, rows, metrics, peers),
        }
        records = [record for listed in lists.values() for record in listed]
        texts: dict[int, str] = {}
        listed_keys = {record["key"] for record in records}
        for rank_texts in peers.objects({key: names[key] for key in listed_keys & names.keys()}):
            texts = rank_texts | texts
        for record in records:
            key = record.pop("key")
            record["slice"] = texts.get(key, f"key {key}")
        return {"slices": int(peers.sum(torch.tensor(len(keys)))), **lists}

    def _compact(self) -> None:
        keys, predictions, *sums = self._to_ties()
        new = [keys, compute_midpoints(assign_bins(predictions)), *sums]
        pairs = zip(self._bins or [x[:0] for x in new], new, strict=True)
        self._bins = _merge_slice_ties(*(torch.cat(pair) for pair in pairs))

    def _to_ties(self) -> list[torch.Tensor]:
        """Return the rows in memory, summed by slice and prediction (`_merge_slice_ties`), and discard the rows."""
        logits, labels, weights, keys = self._concatenate_rows()
        predictions, weights = self._predict(logits.double()).double(), weights.double()
        positive = weights * labels
        sums = positive, weights - positive, weights * predictions, torch.ones_like(weights)
        return _merge_slice_ties(keys, predictions, *sums)


def _merge_slice_ties(keys: torch.Tensor, predictions: torch.Tensor, *sums: torch.Tensor) -> list[torch.Tensor]:
    """Return rows summed by slice and prediction (ties), sorted by slice and descending prediction.

    The columns are slice keys, predictions, and sums over the rows that agree in both: weight × label, weight ×
    (1 − label), weight × prediction, and number of rows. The arguments are the same columns before the summation.
    """
    order = predictions.argsort(descending=True)
    order = order[keys[order].argsort(stable=True)]
    return sum_equal_rows(order, [keys, predictions], sums)


def _measure_slices(
    ties: list[torch.Tensor], binary: bool, binned: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Return the metrics of S slices, in host memory, from the ties of all their rows (`_merge_slice_ties`).

    `binary` is True if all labels are 0 or 1. `binned` is True if nearly equal predictions count as tied.

    Returns:
        (keys, rows, metrics, goodness): the keys of the slices, int64 [S]; their numbers of rows, float64 [S];
        metric name → values, float64 [S] each; and a value that is lowest for the worst slices, float64 [S]. The
        metrics are auc (NaN unless `binary` is True and the slice contains both labels), calibration and, with
        `binary` and `binned`, auc_bound. `goodness` is the AUC or, unless `binary` is True, −|ln calibration|; NaN
        if either label has a total weight below MIN_SLICE_LABEL_ROWS or, unless `binary` is True, if the slice has
        fewer than 2 · MIN_SLICE_LABEL_ROWS rows.
    """
    keys, predictions, positive, negative, predicted, rows = (x.cpu() for x in ties)
    keys, slice_of = keys.unique_consecutive(return_inverse=True)
    auc, has_both = compute_group_auc(slice_of, len(keys), predictions, positive, negative)
    auc = auc.masked_fill(~has_both if binary else torch.ones_like(has_both), float("nan"))
    positives, negatives, rows, predicted, tied = (
        x.new_zeros(len(keys)).index_add_(0, slice_of, x)
        for x in (positive, negative, rows, predicted, positive * negative / 2)
    )
    calibration = predicted / positives
    has_enough = (
        torch.minimum(positives, negatives) >= MIN_SLICE_LABEL_ROWS if binary else rows >= 2 * MIN_SLICE_LABEL_ROWS
    )
    goodness = (auc if binary else -calibration.log().abs()).masked_fill(~has_enough, float("nan"))
    bound = {"auc_bound": tied / (positives * negatives)} if binary and binned else {}
    return keys, rows, {"auc": auc, "calibration": calibration, **bound}, goodness


def _list_lowest(
    values: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, metrics: dict[str, torch.Tensor], peers: Peers
) -> list[dict[str, Any]]:
    """Return key, rows and metrics of the slices of all ranks with the lowest finite `values`.

    The list is sorted by `values` and key and contains at most MAX_LISTED_SLICES slices. A metric is None if undefined.
    This is a collective operation: every rank must call it.
    """
    order = values.nan_to_num(nan=float("inf")).argsort(stable=True)[:MAX_LISTED_SLICES]
    columns = torch.stack([values, rows, *metrics.values()], 1)
    entries = zip(*(x.tolist() for x in peers.gather([columns[order], keys[order]])), strict=True)
    return [
        {"key": key, "rows": int(count)} | null_nonfinite(dict(zip(metrics, figures, strict=True)))
        for (value, count, *figures), key in sorted(entries, key=lambda row: (row[0][0], row[1]))
        if isfinite(value)
    ][:MAX_LISTED_SLICES]


class SliceNames:
    """Texts of slice values, recorded from the batches of an evaluation.

    Args:
        columns: Columns whose values define slices (eval.slices).
        key_columns: Names of the columns of Batch.keys, in order.

    Attributes:
        of: Column → key → text of the value, for the first MAX_SLICE_NAMES values that this rank has seen.
    """

    def __init__(self, columns: Sequence[str], key_columns: Sequence[str]):
        self.of: dict[str, dict[int, str]] = {name: {} for name in columns}
        self._places = {name: key_columns.index(name) for name in columns}

    def note(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches unchanged, and record in `of` the slice values of their rows with a weight above 0.

        Nothing is recorded from batches without keys or without reserved columns.
        """
        for batch in batches:
            if self.of and batch.reserved is not None and batch.keys is not None:
                keys_BK = batch.keys[batch.weights > 0].numpy()
                for name, texts in self.of.items():
                    if name in batch.reserved.column_names:
                        self._record_names(texts, keys_BK[:, self._places[name]], batch.reserved.column(name))
            yield batch

    def _record_names(self, texts: dict[int, str], keys, values) -> None:
        distinct, first = np.unique(keys, return_index=True)
        new = [(key, row) for key, row in zip(distinct.tolist(), first.tolist(), strict=True) if key not in texts]
        for key, row in new[: MAX_SLICE_NAMES - len(texts)]:
            value = values[row].as_py()
            texts[key] = "null" if value is None else str(value)
