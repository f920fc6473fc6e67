"""Write the predictions of spans, and join them to files. This module does not import torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.errors import DataError, RunError, convert_os_errors
from raytrec.common.storage import open_filesystem
from raytrec.data.fragments import read_footer
from raytrec.prediction.folder import Counts, PredictionFolder, PredictionTask
from raytrec.prediction.spans import Span

MAX_QUEUED_SPANS = 2  # maximum number of predicted spans waiting to be written


class SpanWriter:
    """Writer of predicted spans that uses a background thread and keeps the order of the spans.

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
        """Add a span to the queue. The call blocks while the queue is full.

        Args:
            span: Span that has been predicted.
            scores: Scores of each task, float32 [rows] or [rows, classes].
            present: True for rows that were read, bool [rows]. The scores of all other rows are written as nulls.
            counts: Counts of the span's rows.
        """
        while len(self._waiting) > MAX_QUEUED_SPANS:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._write, span, scores, present, counts))

    def close(self) -> None:
        """Wait until all spans have been written, and stop the thread."""
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
            with self._folder.open_parquet_writer(self._task.output_of(span), schema) as writer:
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
    """Return a task's scores as a column of type float or, for classes, list<float>; null for absent rows."""
    absent = ~present
    if scores.ndim == 1:
        return pa.array(scores, pa.float32(), mask=absent if absent.any() else None)
    rows, classes = scores.shape
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * classes, mask=np.append(absent, False))
    return pa.ListArray.from_arrays(offsets, pa.array(scores.reshape(-1), pa.float32()))


def join_parts(task: PredictionTask, spans: list[Span], tick: Callable[[], None] = lambda: None) -> None:
    """Join the parts of a file in order. Every part becomes one row group.

    Args:
        task: Input and output of the predictions.
        spans: All spans of one file, in order, whose parts have been written.
        tick: Function called after each part, to report progress.

    Raises:
        RunError: A part is damaged or has changed, or the file cannot be written.
    """
    folder, counts, binding = PredictionFolder(task.out), Counts(), task.manifest.binding
    with _report_write_errors(task):
        names = [folder.uri_of(task.part_of(span)) for span in spans]
        for name, span in zip(names, spans, strict=True):
            part_counts = Counts.from_footer(read_footer(name), binding)
            if part_counts is None or part_counts.rows != span.rows:
                raise RunError("a part of the predictions is damaged or has changed", where=name, do=REPEAT_ADVICE)
            counts += part_counts
        schema = read_footer(names[0]).schema.to_arrow_schema().with_metadata(counts.metadata(binding))
        with folder.open_parquet_writer(task.name_of(spans[0].path), schema) as writer:
            for table in map(read_verified, names):
                writer.write_table(table.replace_schema_metadata(schema.metadata), row_group_size=len(table))
                tick()


REPEAT_ADVICE = "remove the folder _parts in the output folder and repeat the command; complete files are kept"


def read_verified(uri: str) -> pa.Table:
    """Read a Parquet file and verify the checksums of its pages."""
    filesystem, path = open_filesystem(uri)
    with filesystem.open_input_file(path) as file:
        return pq.ParquetFile(file, page_checksum_verification=True).read()


def write_empty(task: PredictionTask, path: str, scores: list[pa.DataType]) -> None:
    """Write an empty file of predictions for an input file without rows."""
    schema = _make_schema(task, task.carried.schema(path), scores, Counts())
    with PredictionFolder(task.out).open_parquet_writer(task.name_of(path), schema) as writer:
        writer.write_table(schema.empty_table())


def group_by_file(spans: Iterator[Span] | list[Span]) -> dict[str, list[Span]]:
    """Return file → its spans in order, for files with several spans."""
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
        do="free space or correct the permissions, then repeat the command; complete files are kept",
    )
