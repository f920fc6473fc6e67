"""Worker function of `raytrec predict`: predict the spans of one rank, write them, and join them to files.

The module imports torch only inside functions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raytrec.common import messages
from raytrec.common.errors import DataError, RunError, convert_os_errors, get_first_line
from raytrec.common.formatting import format_count
from raytrec.common.messages import Command, Restart
from raytrec.data.fragments import read_footer
from raytrec.prediction.folder import Counts, PredictionFolder, PredictionTask, read_verified
from raytrec.prediction.inputs import Span, SpanOrder, assign_spans, cut_spans, select_remaining
from raytrec.worker.context import WorkerContext, WorkerTask

if TYPE_CHECKING:
    from raytrec.data.batch import Batch
    from raytrec.tasks.outputs import StepOutputs

MAX_STEPS_IN_FLIGHT = 2  # maximum number of batches whose scores are still being computed or copied from a GPU
MAX_QUEUED_SPANS = 2  # maximum number of predicted spans waiting to be written
PROGRESS_INTERVAL_S = 2.0  # minimum interval between progress messages
REPEAT_ADVICE = "repeat the command; if the error persists, remove the folder _parts in the output folder first"


def predict_worker(prediction_task: PredictionTask, task: WorkerTask) -> None:
    """Predict and write this rank's spans, then join the parts of files that have several spans.

    All ranks must call this function. Every rank joins the parts of some files; rank 0 reports the result.

    Args:
        prediction_task: Input and output of the predictions.
        task: Task of the worker group; its dataset "predict" contains the input.

    Raises:
        Restart: The worker group must be restarted; raised on all ranks. Spans that have been written are kept.
        DataError: The input cannot be read, or does not match the schema.
        RunError: The output cannot be written, an intermediate file is damaged, or the model cannot be loaded.
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
    """Return the spans whose predictions exist, and the input files whose predictions are complete.

    Parts are only checked when they are joined.
    """
    names = folder.list_names()
    complete = set(folder.find_finished(task, names))
    done = {s for s in spans if s.path in complete or (not s.is_whole and task.part_of(s) in names)}
    return done, complete


def _predict_spans(context: WorkerContext, task: PredictionTask, order: SpanOrder) -> tuple[int, float]:
    """Predict and write this rank's spans. Return the number of rows of all ranks, and the duration in seconds.

    Raises:
        Restart: As in `predict_worker`.
    """
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
                context.report(messages.Train(step=number, figures={"rows_per_s": rows / max(1e-9, reported - began)}))
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
        features: Names of the schema's sparse features, in the order of Batch.changed.
    """

    def __init__(self, spans: list[Span], writer: SpanWriter, features: list[str]):
        self._remaining, self._writer, self._features = deque(spans), writer, features
        self._changed: deque[np.ndarray | None] = deque()  # counts of batches whose outputs have not been taken
        self._pending: deque[tuple[Any, int, np.ndarray | None]] = deque()
        self._parts: list[tuple[list[np.ndarray], np.ndarray]] = []  # parts of the current span
        self._rows, self._counts = 0, Counts()

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches unchanged, and record their Batch.changed until `take` receives the batch's outputs."""
        for batch in batches:
            self._changed.append(None if batch.changed is None else batch.changed.numpy())
            yield batch

    def take(self, outputs: StepOutputs, rows: int) -> None:
        """Add the outputs of the next batch, of which all but the first `rows` rows are padding.

        Spans that are complete are passed to the writer, which can block and raise errors (SpanWriter.put).
        """
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
        """Wait for the pending outputs, and pass the remaining spans to the writer, as in `take`."""
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


class SpanWriter:
    """Writer of predicted spans that uses a background thread and keeps the order of the spans.

    A span that is a whole file becomes a file of predictions; any other span becomes a part (folder.py).

    Args:
        task: Input and output of the predictions.
        skip: True if carried columns that cannot be decoded are written as nulls (data.on_error: skip).

    Raises:
        DataError: Carried columns cannot be read; raised by `put` and `close`.
        RunError: Files cannot be written; raised by `put` and `close`.
    """

    def __init__(self, task: PredictionTask, skip: bool):
        self._task, self._skip, self._folder = task, skip, PredictionFolder(task.out)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="predictions")
        self._waiting: deque[Future[None]] = deque()

    def put(self, span: Span, scores: list[np.ndarray], present: np.ndarray, counts: Counts) -> None:
        """Add a span to the queue. The call blocks while the queue is full, and raises the error of an earlier span.

        Args:
            span: Span that has been predicted.
            scores: Scores of each task, float32 [rows] or [rows, classes]; or one array of vectors, [rows, width].
            present: True for rows that were read, bool [rows]. The scores of all other rows are written as nulls.
            counts: Counts of the span's rows.
        """
        while len(self._waiting) > MAX_QUEUED_SPANS:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._write, span, scores, present, counts))

    def close(self) -> None:
        """Wait until all spans have been written, and stop the thread; after an error, drop the spans in the queue."""
        try:
            while self._waiting:
                self._waiting.popleft().result()
        finally:
            self._thread.shutdown(cancel_futures=True)

    def _write(self, span: Span, scores: list[np.ndarray], present: np.ndarray, counts: Counts) -> None:
        with _report_write_errors(self._task):
            columns = [to_score_column(each, present) for each in scores]
            kinds = self._task.carried.schema(span.path)
            schema = _make_schema(self._task, kinds, [column.type for column in columns], counts)
            carried = pa.concat_tables([self._read_carried(part, kinds) for part in span.parts])
            table = pa.table([*carried.columns, *columns], schema) if kinds.names else pa.table(columns, schema)
            name = self._task.name_of(span.path) if span.is_whole else self._task.part_of(span)
            with self._folder.open_parquet_writer(name, schema) as writer:
                writer.write_table(table, row_group_size=len(table))

    def _read_carried(self, part, kinds: pa.Schema) -> pa.Table:
        try:
            return self._task.carried.read(part)
        except DataError:
            if not self._skip:
                raise
            return pa.table([pa.nulls(part.rows, field.type) for field in kinds], kinds)


def _make_schema(task: PredictionTask, carried: pa.Schema, scores: list[pa.DataType], counts: Counts) -> pa.Schema:
    """Return the schema of a file of predictions, with carried columns, score columns, and counts as metadata."""
    fields = [*carried, *(pa.field(*column) for column in zip(task.manifest.scores, scores, strict=True))]
    return pa.schema(fields, counts.metadata(task.manifest.binding))


def to_score_column(scores: np.ndarray, present: np.ndarray) -> pa.Array:
    """Return scores as a column of float or list<float>.

    Args:
        scores: float32 [rows] for one score per row; [rows, classes] or [rows, width] for classes and vectors.
        present: bool [rows]; the column is null where the value is False.
    """
    absent = ~present
    if scores.ndim == 1:
        return pa.array(scores, pa.float32(), mask=absent if absent.any() else None)
    rows, classes = scores.shape
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * classes, mask=np.append(absent, False))
    return pa.ListArray.from_arrays(offsets, pa.array(scores.reshape(-1), pa.float32()))


def join_parts(task: PredictionTask, spans: list[Span], tick: Callable[[], None] = lambda: None) -> None:
    """Join the parts of a file in order; the parts are kept. Every part becomes one row group.

    Args:
        task: Input and output of the predictions.
        spans: All spans of one file (at least one), in order, whose parts have been written.
        tick: Function called after each part, to report progress.

    Raises:
        RunError: A part cannot be read or has changed, or the file cannot be written.
    """
    folder, counts, binding = PredictionFolder(task.out), Counts(), task.manifest.binding
    names = [folder.uri_of(task.part_of(span)) for span in spans]
    for name, span in zip(names, spans, strict=True):
        footer = _read_part(read_footer, name)
        part_counts = Counts.from_footer(footer, binding)
        if part_counts is None or part_counts.rows != span.rows:
            what = "an intermediate file of predictions is damaged or has changed"
            expected = f"{format_count(span.rows, 'row')} of the same predictions"
            raise RunError(what, where=name, expected=expected, do=REPEAT_ADVICE)
        counts += part_counts
    schema = footer.schema.to_arrow_schema().with_metadata(counts.metadata(binding))
    with _report_write_errors(task), folder.open_parquet_writer(task.name_of(spans[0].path), schema) as writer:
        for name in names:
            table = _read_part(read_verified, name)
            writer.write_table(table.replace_schema_metadata(schema.metadata), row_group_size=len(table))
            tick()


def _read_part(read: Callable[[str], Any], name: str) -> Any:
    """Return the result of `read` for the path or URI of a part; raise RunError if the part cannot be read."""
    try:
        return read(name)
    except (DataError, OSError, pa.ArrowException) as error:
        what = f"an intermediate file of predictions cannot be read: {get_first_line(error)}"
        raise RunError(what, where=name, expected="a complete Parquet file", do=REPEAT_ADVICE) from None


def write_empty(task: PredictionTask, path: str, scores: list[pa.DataType]) -> None:
    """Write an empty file of predictions for an input file without rows.

    Args:
        task: Input and output of the predictions.
        path: Path or URI of the input file.
        scores: Types of the score columns.

    Raises:
        DataError: As in `CarriedColumns.schema`.
        RunError: The file cannot be written.
    """
    schema = _make_schema(task, task.carried.schema(path), scores, Counts())
    folder = PredictionFolder(task.out)
    with _report_write_errors(task), folder.open_parquet_writer(task.name_of(path), schema) as writer:
        writer.write_table(schema.empty_table())


def group_by_file(spans: Iterator[Span] | list[Span]) -> dict[str, list[Span]]:
    """Return path of a file → its spans in order, for files with several spans; other files are omitted."""
    groups: dict[str, list[Span]] = {}
    for span in spans:
        if not span.is_whole:
            groups.setdefault(span.path, []).append(span)
    return groups


def _report_write_errors(task: PredictionTask) -> AbstractContextManager[None]:
    """Return a context manager that converts OSError to RunError while predictions are written."""
    return convert_os_errors(
        "the predictions cannot be written",
        where=task.out,
        expected="a folder with free space that all nodes can write to",
        do="correct the error, then repeat the command; complete files are kept",
    )
