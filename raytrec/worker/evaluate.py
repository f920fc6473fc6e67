"""Evaluate a model on all rows of a dataset, optionally with its deep part scaled down, and stop training early."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from raytrec.common import messages
from raytrec.common.collectives import Peers
from raytrec.common.errors import RunError
from raytrec.common.formatting import format_count, parse_number
from raytrec.config.training import EarlyStoppingSection
from raytrec.data.stream import Stream
from raytrec.embeddings.optim import find_dense_average
from raytrec.metrics.evaluation import SliceNames, TaskRows, choose_ranking_device
from raytrec.metrics.full_ranking import FullRanking
from raytrec.metrics.selection import MetricDisplay, Selection
from raytrec.metrics.sums import ROWS, MetricSums
from raytrec.tasks.outputs import StepOutputs
from raytrec.tasks.task import key_columns
from raytrec.worker.context import WorkerContext
from raytrec.worker.nonfinite import MAX_STEPS_IN_FLIGHT, AsyncHostCopy
from raytrec.worker.progress import Progress
from raytrec.worker.step import Step

Curves = dict[str, dict[str, Any]]  # key of a curve → its points by axis, and the key of its metric under "metric"
SLICES = "slices"  # key of the slice metrics
SHRINK_FACTORS = (1.0, 0.75, 0.5, 0.25, 0.0)  # candidate factors for the deep part


def evaluate(
    step: Any, stream: Stream, device: torch.device, selection: Selection, items: Stream | None = None
) -> tuple[dict[str, Any], Curves | None]:
    """Return metrics and curves for all rows of the stream's dataset.

    This is a collective operation: every rank must call it. If the metrics of a task cannot be computed from sums, its
    rows are kept in host memory, at most eval.max_exact_rows on each rank. All ranks sort or group these rows together
    (metrics/evaluation.py).

    Args:
        step: Step of the model to evaluate, or an object with the same method `evaluate`.
        stream: Stream of the dataset.
        device: Device of the rank.
        selection: Metrics of the run.
        items: Stream of the items (eval.retrieval) among which each row's item is ranked; None: no ranking.

    Returns:
        Metrics and curves. The metrics are the same on every rank: rows, skipped_rows (data.on_error), and
        each metric (None or NaN if undefined) with its counts. With `items`, they include retrieval.METRIC
        and its counts; with eval.slices, they include slices: task → column → Slices.figures. The curves (see
        Curves) are None on ranks other than 0, or if there are no curves.

    Raises:
        RunError: The ranks together have read more rows than the dataset contains, or fewer although
            data.on_error does not allow rows to be skipped.
    """
    sums, rows_by_task = (MetricSums(selection, device), {task: TaskRows(selection, task) for task in selection.of})
    collectors = [HostRowCollector(task, rows) for task, rows in rows_by_task.items() if rows.needed]
    slices = selection.settings.slices
    names = SliceNames(slices, key_columns(list(selection.tasks.values()), slices))
    ranking = None if items is None else FullRanking(selection, device)
    if ranking:
        ranking.compute_item_vectors(step, items)
    batches = names.note(stream.batches())
    for outputs in step.evaluate(ranking.store_queries(batches) if ranking else batches):
        if ranking:
            ranking.add(outputs.vectors)
        sums.add(outputs)
        for collector in collectors:
            collector.add(outputs)
    for collector in collectors:
        collector.finish()
    figures = sums.reduce()
    skipped = stream.dataset.rows - figures[ROWS]
    if skipped < 0 or (skipped and not stream.may_skip):
        raise RunError(
            f"the evaluation read {format_count(int(figures[ROWS]), 'row')} instead of {stream.dataset.rows:,}",
            where=stream.dataset.uri,
            expected="each row of the dataset exactly once",
            do="check that no process changes the files, and try again; if the error remains, report a bug",
        )
    peers, extra, curves = Peers(device), {}, {}
    place = choose_ranking_device(stream.dataset.rows, device)
    for rows in rows_by_task.values():
        figures_of_task, curves_of_task = rows.figures(peers, place)
        extra, curves = extra | figures_of_task, curves | curves_of_task
    if ranking:
        extra |= ranking.figures()
    if slices:
        extra[SLICES] = {task: rows.slices(peers, place, names.of) for task, rows in rows_by_task.items()}
    return {**extra, **figures, "skipped_rows": skipped}, (peers.rank == 0 and curves) or None


class HostRowCollector:
    """Collector that moves the rows of one task to host memory, because GPU memory is needed for tables.

    Rows with weight 0 are skipped. The copy of a batch is read after two further batches, so that the device has work
    while the host waits.

    Args:
        task: Name of the task.
        into: Collection that receives the rows.
    """

    def __init__(self, task: str, into: TaskRows) -> None:
        self._task, self._into, self._columns = task, into, into.columns
        self._pending: deque[tuple[AsyncHostCopy, AsyncHostCopy | None]] = deque()

    def add(self, outputs: StepOutputs) -> None:
        """Start copying the rows of a batch."""
        output = outputs[self._task]
        logits = output.logits.unsqueeze(1) if output.logits.dim() == 1 else output.logits
        values = torch.cat([logits, torch.stack([output.labels, output.weights], 1)], dim=1)
        keys = [output.keys[name] for name in self._columns]
        self._pending.append((AsyncHostCopy(values), AsyncHostCopy(torch.stack(keys)) if keys else None))
        if len(self._pending) > MAX_STEPS_IN_FLIGHT:
            self._read_pending()

    def finish(self) -> None:
        """Wait until the rows of all batches have been collected."""
        while self._pending:
            self._read_pending()

    def _read_pending(self) -> None:
        pending, keys = self._pending.popleft()
        values = pending.wait()
        weighted = values[:, -1] > 0
        *logits, labels, weights = (column.contiguous() for column in values[weighted].unbind(1))
        joined = logits[0] if len(logits) == 1 else torch.stack(logits, 1)
        column_keys = {} if keys is None else dict(zip(self._columns, keys.wait()[:, weighted], strict=True))
        self._into.add(joined, labels, weights, column_keys)


def can_shrink(step: Step) -> bool:
    """Return True if the deep part of the model can be scaled (`shrunk`), and train.ema is not set."""
    return getattr(step.head.model, "shrunk", None) is not None and find_dense_average(step.optimizer) is None


def evaluate_shrunk(
    step: Step, held_out_stream: Stream, device: torch.device, selection: Selection, items: Stream | None = None
) -> tuple[dict[str, Any], Curves | None, float]:
    """Evaluate the model with its deep part scaled by the factor that predicts held-out rows best.

    This is a collective operation: every rank must call it. The deep part is the MLP of a model that also sums a weight
    per id (models/first_order.py). The MLP's last weights, `shrunk`, are multiplied by each of SHRINK_FACTORS and then
    restored. Factors are compared by the default metric of early stopping (ne with binary cross-entropy). Ties are
    resolved in favor of the largest factor. If the metric is undefined for factor 1, the factor is 1.

    Args:
        step: Step with the trained model, for which `can_shrink` is True.
        held_out_stream: Stream of rows that are not used for training.
        device: Device of the rank.
        selection: Metrics of the run.
        items: Stream of the items (eval.retrieval); see `evaluate`.

    Returns:
        Metrics and curves as returned by `evaluate`, and the best factor.

    Raises:
        RunError: As for `evaluate`.
    """
    weight: Any = step.head.model.shrunk
    figure, original, results = selection.best(None), weight.detach().clone(), []
    for factor in SHRINK_FACTORS:
        shrink(step, factor)
        figures, curves = evaluate(step, held_out_stream, device, selection, items)
        results.append((figure.loss(broadcast_figure(figure, figures, device)), figures, curves, factor))
        with torch.no_grad():
            weight.copy_(original)
    # Comparisons with NaN are false, so an undefined metric keeps the whole deep part.
    return min(results, key=itemgetter(0))[1:]


def shrink(step: Step, factor: float) -> None:
    """Multiply the model's `shrunk` weights by a factor."""
    with torch.no_grad():
        step.head.model.shrunk.mul_(factor)


def broadcast_figure(figure: MetricDisplay, figures: Mapping[str, Any], device: torch.device) -> float:
    """Return rank 0's value of a metric on every rank, NaN if undefined.

    This is a collective operation: every rank must call it. `figures` are metrics as returned by `evaluate`.
    """
    shared = torch.tensor(parse_number(figures.get(figure.key)), dtype=torch.float64, device=device)
    dist.broadcast(shared, src=0)
    return float(shared)


class EarlyStopping:
    """Rule that ends training on all ranks when a metric reaches a target or no longer improves.

    An undefined value does not count as an improvement. The history is stored in `progress` and thus in
    every checkpoint, so a resumed run ends at the same step as an uninterrupted one.

    Args:
        section: Section train.early_stopping; None: training never ends early.
        progress: Counts of the run.
        device: Device for this rank's collectives.

    Attributes:
        restores: True if the weights of the best evaluation are restored at the end.

    Raises:
        ConfigError: The metric in `section` does not exist, or its values cannot be ranked.
    """

    def __init__(self, section: EarlyStoppingSection | None, progress: Progress, device: torch.device):
        self._progress, self._device = progress, device
        self._figure: MetricDisplay | None = None
        self.restores = section is not None and section.restore_best
        if section:
            self._patience, self._target = section.patience or float("inf"), section.target
            self._figure = progress.window.selection.best(section.metric, "train.early_stopping.metric")

    def best_step(self) -> int | None:
        """Return the step whose weights are the result of the run; None for the last step."""
        return self._progress.early_stopping.get("step") if self.restores else None

    @property
    def over(self) -> bool:
        """Return True if training must end now."""
        history = self._progress.early_stopping
        return self._figure is not None and (self._is_reached or history.get("since", 0) >= self._patience)

    @property
    def _is_reached(self) -> bool:
        best = self._progress.early_stopping.get("best")
        if best is None or self._target is None:
            return False
        return self._figure.loss(best) <= self._figure.loss(self._target)

    def after_evaluation(self) -> None:
        """Update the history with the evaluation of this step.

        This is a collective operation: every rank must call it. All ranks use the value of rank 0, so that they make
        the same decision.
        """
        if self._figure is None:
            return
        value = broadcast_figure(self._figure, self._progress.evaluation, self._device)
        history = self._progress.early_stopping
        best = history.get("best")
        # Comparisons with NaN are false, so an undefined value is never an improvement.
        if self._figure.loss(value) < (float("inf") if best is None else self._figure.loss(best)):
            history |= {"best": value, "step": self._progress.step, "since": 0}
        else:
            history["since"] = history.get("since", 0) + 1

    def report(self, context: WorkerContext) -> None:
        """Report that training has ended early, after the training metrics since the last report.

        Nothing is reported if training has not ended early. This is a collective operation: every rank must call it.
        """
        if self._figure is None or not self.over:
            return
        step = self._progress.step
        if step % context.task.config.train.log_every_steps:
            self._progress.end_window()
            self._progress.report(context, wait=True)
        details = {"step": step, "reason": self._describe_end()}
        context.report(messages.Event(event=messages.ENDED_EARLY, details=details))

    def result(self, total: int) -> dict[str, Any]:
        """Return train.ended, the reason why training ended, for result.json; empty without early stopping.

        Args:
            total: Number of steps of the whole run.
        """
        if self._figure is None:
            return {}
        return {"train.ended": self._describe_end() if self._progress.step < total else "after all steps"}

    def _describe_end(self) -> str:
        figure, history = self._figure, self._progress.early_stopping
        if self._is_reached:
            return f"{figure.key} reached {figure.text(history['best'])} at step {history['step']}"
        count = f"{history['since']} evaluation{'s' * (history['since'] > 1)}"
        if history.get("best") is None:
            return f"{figure.key} had no finite value in {count}"
        return (
            f"{figure.key} has not improved in {count}; it was best at step {history['step']} "
            f"({figure.text(history['best'])})"
        )
