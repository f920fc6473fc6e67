"""Worker function of `raytrec predict`, which predicts the spans of one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from raytrec.common import messages
from raytrec.common.messages import Command, Restart
from raytrec.prediction.folder import Counts, PredictionFolder, PredictionTask
from raytrec.prediction.spans import Span, SpanOrder, assign_spans, cut_spans, select_remaining
from raytrec.prediction.writer import SpanWriter, group_by_file, join_parts
from raytrec.worker.context import WorkerContext, WorkerTask

if TYPE_CHECKING:
    from raytrec.data.batch import Batch
    from raytrec.tasks.outputs import StepOutputs

MAX_STEPS_IN_FLIGHT = 2  # maximum number of batches whose scores are still being computed or copied from a GPU
PROGRESS_INTERVAL_S = 2.0  # minimum interval between progress messages


def predict_worker(prediction_task: PredictionTask, task: WorkerTask) -> None:
    """Predict and write this rank's spans, then join the parts of files with several spans.

    Raises:
        Restart: The worker group must be restarted; raised on all ranks. Spans that have been written are kept.
    """
    import torch.distributed as dist

    context = WorkerContext.enter(task)
    folder = PredictionFolder(prediction_task.out)
    context.enter_phase("listing finished files", "restore")
    spans = cut_spans(task.datasets["predict"], prediction_task.batch_rows, prediction_task.span_rows)
    names = [_list_finished(folder, spans, prediction_task) if context.index == 0 else None]
    dist.broadcast_object_list(names)
    done, complete = names[0]
    dealt = select_remaining(assign_spans(spans, context.world, prediction_task.batch_rows), done)
    order = SpanOrder(dealt, prediction_task.batch_rows)
    try:
        rows, seconds = _predict_spans(context, prediction_task, order) if order.steps() else (0, 0.0)
    except Restart:
        context.close()
        raise
    dist.barrier()
    context.enter_phase("joining files", "evaluate")
    split = sorted(group_by_file(span for span in spans if span.path not in complete).items())
    for path, parts in split[context.index :: context.world]:
        join_parts(prediction_task, parts, context.heartbeat.tick)
        folder.remove(prediction_task.parts_of(path))
    figures = {"world_size": context.world, "predicted": rows, "predict_s": seconds}
    context.report(messages.Result(step=order.steps(), figures=figures))
    context.close()


def _list_finished(folder: PredictionFolder, spans: list[Span], task: PredictionTask) -> tuple[set[Span], set[str]]:
    """Return the spans whose predictions exist, and the input files whose predictions are complete."""
    names = folder.list_names()
    complete = set(folder.find_finished(task, names))
    done = {s for s in spans if s.path in complete or (not s.is_whole and task.part_of(s) in names)}
    return done, complete


def _predict_spans(context: WorkerContext, task: PredictionTask, order: SpanOrder) -> tuple[int, float]:
    """Predict and write this rank's spans. Return the number of rows of all ranks, and the duration in seconds."""
    from raytrec.tasks.objective import ScoringObjective
    from raytrec.worker.build import load_step
    from raytrec.worker.consensus import StepConsensus
    from raytrec.worker.nonfinite import LossStatus

    step = load_step(context, objective=ScoringObjective)
    stream, total = context.stream("predict", order), order.steps()
    context.enter_phase("predicting", "evaluate")
    context.report(messages.Start(total=total, step=0, workers=context.world))
    writer = SpanWriter(task, context.task.config.data.on_error == "skip")
    spans = _SpanCollector(order.rank_spans[context.index], writer, list(stream.dataset.form.schema.sparse))
    tower, consensus = task.manifest.vectors, StepConsensus()
    rows, began, reported = 0, monotonic(), monotonic()
    try:
        batches = spans.watch(stream.batches())
        for number, outputs in enumerate(step.evaluate(batches, tower), 1):
            spans.take(outputs, order.local_rows(context.index, number - 1))
            rows += order.global_rows(None, number - 1)
            if monotonic() - reported > PROGRESS_INTERVAL_S or number == total:
                reported = monotonic()
                speed = {"rows_per_s": rows / max(1e-9, reported - began)}
                context.report(messages.Train(step=number, figures=speed))
            agreed = consensus.exchange(context.heartbeat.command, LossStatus(number, None), False)
            if agreed is not None and agreed.command == Command.RESTART and number < total:
                raise Restart(f"after {number} of {total} batches")
        consensus.finish()
        spans.finish()
    finally:
        writer.close()
    return rows, monotonic() - began


class _SpanCollector:
    """Collector that assembles the outputs of batches into spans.

    Args:
        spans: Spans of this rank, in the order in which they are read.
        writer: Writer that receives complete spans.
        features: Names of the sparse features read.
    """

    def __init__(self, spans: list[Span], writer: SpanWriter, features: list[str]):
        self._remaining, self._writer, self._features = deque(spans), writer, features
        self._changed: deque[np.ndarray | None] = deque()  # counts of batches whose outputs have not been taken
        self._pending: deque[tuple[Any, int, np.ndarray | None]] = deque()
        self._parts: list[tuple[list[np.ndarray], np.ndarray]] = []  # parts of the current span
        self._rows, self._counts = 0, Counts()

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches unchanged, and record their numbers of clamped or hashed ids (Batch.changed)."""
        for batch in batches:
            self._changed.append(None if batch.changed is None else batch.changed.numpy())
            yield batch

    def take(self, outputs: StepOutputs, rows: int) -> None:
        """Add the outputs of the next batch, of which all but the first `rows` rows are padding."""
        from raytrec.worker.nonfinite import AsyncHostCopy

        changed = self._changed.popleft()
        if rows:
            values = [each.predictions for each in outputs.tasks.values()]
            values = values if outputs.vectors is None else [outputs.vectors]
            scores = [AsyncHostCopy(each[:rows]) for each in values]
            self._pending.append(((scores, AsyncHostCopy(outputs.rows[:rows])), rows, changed))
        if len(self._pending) > MAX_STEPS_IN_FLIGHT:
            self._read_pending()

    def finish(self) -> None:
        """Wait for the pending outputs, and pass the remaining spans to the writer."""
        while self._pending:
            self._read_pending()

    def _read_pending(self) -> None:
        (score_copies, present_copy), rows, changed = self._pending.popleft()
        scores = [each.wait().float().numpy().copy() for each in score_copies]
        present = present_copy.wait().numpy() > 0
        self._parts.append((scores, present))
        self._rows += rows
        feature_counts = {} if changed is None else dict(zip(self._features, changed.T.tolist(), strict=True))
        self._counts += Counts(rows, int((~present).sum()), feature_counts)
        if self._rows == self._remaining[0].rows:  # the span is complete
            parts, presences = zip(*self._parts, strict=True)
            span_scores = [np.concatenate(task_scores) for task_scores in zip(*parts, strict=True)]
            self._writer.put(self._remaining.popleft(), span_scores, np.concatenate(presences), self._counts)
            self._parts, self._rows, self._counts = [], 0, Counts()
