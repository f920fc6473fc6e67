"""Every row of a dataset once, on any number of ranks."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from raytrec.common.errors import RunError
from raytrec.data.stream import Stream
from raytrec.metrics.registry import Metric, RowMetric
from raytrec.metrics.rows import Rows
from raytrec.metrics.selection import Selection
from raytrec.metrics.sums import ROWS, Sums
from raytrec.tasks.outputs import Outputs
from raytrec.worker.fetch import Fetch
from raytrec.worker.gather import gather_to_first, place_for
from raytrec.worker.nonfinite import LATE
from raytrec.worker.step import Step

Curves = dict[str, dict[str, Any]]


def evaluate(
    step: Step, stream: Stream, device: torch.device, selection: Selection
) -> tuple[dict[str, float | None], Curves | None]:
    """Metrics and curves over all rows of the stream's dataset; a collective.

    Logits and labels of all rows are gathered on rank 0 for the tasks with a metric that needs them (8 bytes
    a row and task of its host's memory).

    Returns:
        rows, skipped_rows (data.on_error), each SumMetric on every rank, by their keys; each RowMetric on
        rank 0 (None elsewhere, and where it is not defined). And on rank 0 the curves of metrics that have
        one: key of the curve → its points and the key of its metric; None where there is none.

    Raises:
        RunError: when the ranks together saw more or fewer rows than the dataset has.
    """
    needing = [task for task, metrics in selection.of.items() if any(map(needs_rows, metrics))]
    sums, collected = Sums(selection, device), {task: Collected(task) for task in needing}
    for outputs in step.evaluate(stream.batches()):
        sums.add(outputs)
        for each in collected.values():
            each.add(outputs)
    figures = sums.reduce()
    skipped = stream.dataset.rows - figures[ROWS]
    if skipped < 0 or (skipped and not stream.may_skip):
        raise RunError(
            f"evaluation saw {figures[ROWS]} rows of {stream.dataset.rows}", where=stream.dataset.uri
        )
    of_rows, curves = {}, {}
    for task in needing:
        found, drawn = _of_rows(selection, task, collected[task], device)
        of_rows, curves = of_rows | found, curves | drawn
    return {**of_rows, **figures, "skipped_rows": skipped}, curves or None


def needs_rows(metric: type[Metric]) -> bool:
    """Whether a metric, or its curve, needs all rows at once."""
    return issubclass(metric, RowMetric) or metric.curve is not Metric.curve


def _of_rows(
    selection: Selection, task: str, collected: Collected, device: torch.device
) -> tuple[dict[str, float | None], Curves]:
    """The metrics and curves of one task that need its rows; a collective, which gathers them."""
    logits, labels = (gather_to_first(values, device) for values in collected.take())
    metrics = selection.of[task]
    if logits is None:
        return {selection.key(task, m.name): None for m in metrics if issubclass(m, RowMetric)}, {}
    place = place_for(len(logits), device)
    rows = Rows(logits.to(place), labels.to(place), selection.tasks[task].loss.predict)
    figures, curves = {}, {}
    for metric in metrics:
        key = selection.key(task, metric.name)
        if issubclass(metric, RowMetric):
            value = metric.figure(rows)
            figures[key] = None if value is None else float(value)
        if (points := metric.curve(rows)) is not None:
            curves[selection.key(task, metric.curve.__name__)] = {**points, "metric": key}
    return figures, curves


class Collected:
    """Logits and labels of a rank's rows of one task that count, in host memory: a GPU's is for tables.

    They come from the device a few batches late, so that it never runs dry.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._coming: deque[Fetch] = deque()
        self._parts: list[torch.Tensor] = [torch.empty(2, 0)]

    def add(self, outputs: Outputs) -> None:
        """Adds a batch."""
        own = outputs[self._task]
        self._coming.append(Fetch(torch.stack([own.logits, own.labels, own.weights])))
        if len(self._coming) > LATE:
            self._read()

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and labels of all batches, float32 [rows]."""
        while self._coming:
            self._read()
        logits, labels = torch.cat(self._parts, dim=1)
        return logits, labels

    def _read(self) -> None:
        columns_3B = self._coming.popleft().wait()
        self._parts.append(columns_3B[:2, columns_3B[2] > 0])
