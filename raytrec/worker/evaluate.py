"""Every row of a dataset once, on any number of ranks."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from raytrec.common.errors import RunError
from raytrec.data.stream import Stream
from raytrec.metrics.over_ranks.evaluation import Counted, TaskRows
from raytrec.metrics.over_ranks.exchange import Exchange
from raytrec.metrics.over_ranks.names import Names
from raytrec.metrics.registry import Metric, RowMetric
from raytrec.metrics.rows import Rows
from raytrec.metrics.selection import Selection
from raytrec.metrics.sums import ROWS, Sums
from raytrec.tasks.outputs import Outputs
from raytrec.tasks.task import key_columns
from raytrec.worker.fetch import Fetch
from raytrec.worker.full_ranking import ranking_of
from raytrec.worker.gather import gather_to_first, place_for
from raytrec.worker.nonfinite import LATE
from raytrec.worker.step import Step

Curves = dict[str, dict[str, Any]]
SLICES = "slices"  # the key of the figures of slices


def evaluate(
    step: Step, stream: Stream, device: torch.device, selection: Selection, items: Stream | None = None
) -> tuple[dict[str, Any], Curves | None]:
    """Metrics and curves over all rows of the stream's dataset; a collective.

    Rows of tasks whose metrics need more than sums are kept in host memory, up to eval.max_exact_rows,
    and sorted or grouped by all ranks together (metrics/over_ranks). Only for a RowMetric of the user's all
    rows are gathered on rank 0.

    Args:
        items: those of eval.retrieval, among which every row's item is ranked; None: it is not.

    Returns:
        rows, skipped_rows (data.on_error), each metric with what is counted beside it, by their keys, None
        where it is not defined: on every rank, but for RowMetrics, which are None elsewhere than on rank 0.
        With `items` also retrieval.METRIC and counts beside it; with eval.slices also slices: task → column →
        slices.summarize. And on rank 0 the curves of metrics
        that have one: key of the curve → its points and the key of its metric; None where there is none.

    Raises:
        RunError: when the ranks together saw more or fewer rows than the dataset has.
    """
    sums, kept = Sums(selection, device), {task: TaskRows(selection, task) for task in selection.of}
    gathered = {task: Gathered(selection, task) for task in selection.of if needs_rows(selection, task)}
    collected = [
        Collected(task, [*([rows] if rows.needed else []), *filter(None, [gathered.get(task)])], rows.columns)
        for task, rows in kept.items()
        if rows.needed or task in gathered
    ]
    slices = selection.settings.slices
    names = Names(slices, key_columns(list(selection.tasks.values()), slices))
    ranking = ranking_of(selection, device, step, items)
    batches = names.note(stream.batches())
    for outputs in step.evaluate(ranking.note(batches), "query") if ranking else step.evaluate(batches):
        if ranking:
            ranking.add(outputs.vectors)
        sums.add(outputs)
        for each in collected:
            each.add(outputs)
    for each in collected:
        each.finish()
    figures = sums.reduce()
    skipped = stream.dataset.rows - figures[ROWS]
    if skipped < 0 or (skipped and not stream.may_skip):
        raise RunError(
            f"evaluation saw {figures[ROWS]} rows of {stream.dataset.rows}", where=stream.dataset.uri
        )
    exchange, further, curves = Exchange(device), {}, {}
    for task, rows in kept.items():
        place = place_for(stream.dataset.rows, device)
        found, drawn = rows.figures(exchange, place)
        further, curves = further | found, curves | drawn
        if task in gathered:
            found, drawn = gathered[task].figures(device)
            further, curves = further | found, curves | drawn
    if ranking:
        further |= ranking.figures()
    if slices:
        further[SLICES] = {task: rows.slices(exchange, place, names.of) for task, rows in kept.items()}
    return {**further, **figures, "skipped_rows": skipped}, (exchange.rank == 0 and curves) or None


def needs_rows(selection: Selection, task: str) -> bool:
    """Whether a metric of a task, or its curve, needs all rows at once."""
    return any(issubclass(m, RowMetric) or m.curve is not Metric.curve for m in selection.of[task])


class Gathered:
    """The rows of one task that are to be gathered on rank 0, for metrics of the user's."""

    def __init__(self, selection: Selection, task: str):
        self._selection, self._task = selection, task
        self._parts: list[torch.Tensor] = [torch.empty(0, 2 + selection.tasks[task].outputs)]

    def add(self, rows: Counted) -> None:
        """Adds rows."""
        logits = rows.logits.reshape(len(rows), -1)
        self._parts.append(torch.cat([logits, rows.labels.unsqueeze(1), rows.weights.unsqueeze(1)], dim=1))

    def figures(self, device: torch.device) -> tuple[dict[str, float | None], Curves]:
        """The metrics and curves that need all rows; a collective, which gathers them."""
        of_columns = [gather_to_first(values, device) for values in torch.cat(self._parts).unbind(1)]
        key = self._selection.key
        metrics = self._selection.of[self._task]
        if of_columns[0] is None:
            return {key(self._task, m.name): None for m in metrics if issubclass(m, RowMetric)}, {}
        place = place_for(len(of_columns[0]), device)
        *logits, labels, weights = (column.to(place) for column in of_columns)
        joined = logits[0] if len(logits) == 1 else torch.stack(logits, 1)
        rows = Rows(joined, labels, self._selection.tasks[self._task].loss.predict, weights)
        figures, curves = {}, {}
        for metric in metrics:
            named = key(self._task, metric.name)
            if issubclass(metric, RowMetric):
                value = metric.figure(rows)
                figures[named] = None if value is None else float(value)
            if (points := metric.curve(rows)) is not None:
                curves[key(self._task, metric.curve.__name__)] = {**points, "metric": named}
        return figures, curves


class Collected:
    """A rank's rows of one task that count, on their way into host memory: a GPU's is for tables.

    They come from the device a few batches late, so that it never runs dry.

    Args:
        into: who is given the rows.
        columns: of the keys that they need.
    """

    def __init__(self, task: str, into: list[TaskRows | Gathered], columns: list[str]) -> None:
        self._task, self._into, self._columns = task, into, columns
        self._coming: deque[tuple[Fetch, Fetch | None]] = deque()

    def add(self, outputs: Outputs) -> None:
        """Adds a batch."""
        own = outputs[self._task]
        logits = own.logits.unsqueeze(1) if own.logits.dim() == 1 else own.logits
        values = torch.cat([logits, torch.stack([own.labels, own.weights], 1)], dim=1)
        keys = [own.keys[name] for name in self._columns]
        self._coming.append((Fetch(values), Fetch(torch.stack(keys)) if keys else None))
        if len(self._coming) > LATE:
            self._read()

    def finish(self) -> None:
        """Waits for the last batches."""
        while self._coming:
            self._read()

    def _read(self) -> None:
        coming, keys = self._coming.popleft()
        values = coming.wait()
        counted = values[:, -1] > 0
        *logits, labels, weights = (column.contiguous() for column in values[counted].unbind(1))
        joined = logits[0] if len(logits) == 1 else torch.stack(logits, 1)
        of_columns = {} if keys is None else dict(zip(self._columns, keys.wait()[:, counted], strict=True))
        rows = Counted(joined, labels, weights, of_columns)
        for each in self._into:
            each.add(rows)
