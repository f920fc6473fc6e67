"""Scores on their way into files: a thread that writes spans, and how spans become files. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.errors import DataError, RaytrecError, RunError
from raytrec.common.storage import open_filesystem
from raytrec.data.fragments import read_footer
from raytrec.data.spans import Span
from raytrec.worker.prediction_files import Counts, PredictionFolder, PredictionTask

WAITING = 2  # spans that have been predicted and not yet been written


class SpanWriter:
    """Writes spans in a thread, in the order in which they come.

    Args:
        skip: columns of rows that cannot be decoded become null (data.on_error: skip).

    Raises:
        DataError: (put, close) carried columns of rows cannot be read. RunError: files cannot be written.
    """

    def __init__(self, task: PredictionTask, skip: bool):
        self._task, self._skip, self._folder = task, skip, PredictionFolder(task.out)
        self._waiting: Queue = Queue(WAITING)
        self._stop = Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._write, name="predictions", daemon=True)
        self._thread.start()

    def put(self, span: Span, scores: list[np.ndarray], present: np.ndarray, counts: Counts) -> None:
        """Hands over a span; waits while others are to be written first.

        Args:
            scores: of each task, float32 [rows] or [rows, classes].
            present: bool [rows]; where it is not, scores become null.
        """
        while self._thread.is_alive():
            try:
                return self._waiting.put((span, scores, present, counts), timeout=0.1)
            except Full:
                continue
        self._raise()

    def close(self) -> None:
        """Waits until all is written."""
        self._stop.set()
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        """The thread."""
        try:
            while not (self._stop.is_set() and self._waiting.empty()):
                try:
                    span, scores, present, counts = self._waiting.get(timeout=0.1)
                except Empty:
                    continue
                self._write_span(span, scores, present, counts)
        except RaytrecError as error:
            self._error = error
        except OSError as error:
            self._error = not_written(error, self._task.out)
        except BaseException as error:
            self._error = error

    def _write_span(self, span: Span, scores: list[np.ndarray], present: np.ndarray, counts: Counts) -> None:
        columns = [score_column(each, present) for each in scores]
        kinds = self._task.carried.schema(span.path)
        fields = [*kinds, *(pa.field(n, c.type) for n, c in zip(self._task.scores, columns, strict=True))]
        schema = pa.schema(fields, counts.metadata(self._task.binding))
        carried = pa.concat_tables([self._carried(part, kinds) for part in span.parts])
        table = pa.table([*carried.columns, *columns], schema) if kinds.names else pa.table(columns, schema)
        with self._folder.writing(self._task.output_of(span), schema) as writer:
            writer.write_table(table, row_group_size=len(table))

    def _carried(self, part, kinds: pa.Schema) -> pa.Table:
        try:
            return self._task.carried.read(part)
        except DataError:
            if not self._skip:
                raise
            return pa.table([pa.nulls(part.rows, field.type) for field in kinds], kinds)


def score_column(scores: np.ndarray, present: np.ndarray) -> pa.Array:
    """A task's scores as a column: float, or list<float> of the classes; null where a row is not present."""
    absent = ~present
    if scores.ndim == 1:
        return pa.array(scores, pa.float32(), mask=absent if absent.any() else None)
    rows, classes = scores.shape
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * classes, mask=np.append(absent, False))
    return pa.ListArray.from_arrays(offsets, pa.array(scores.reshape(-1), pa.float32()))


def assemble(task: PredictionTask, spans: list[Span], tick: Callable[[], None] = lambda: None) -> None:
    """Puts the parts of a file together, in order, a part at a time; each becomes a row group.

    Args:
        spans: of one file, in order; all have been written.
        tick: called after each.
    """
    folder, counts = PredictionFolder(task.out), Counts()
    try:
        names = [folder.uri_of(task.part_of(span)) for span in spans]
        for name, span in zip(names, spans, strict=True):
            found = Counts.of(read_footer(name), task.binding)
            if found is None or found.rows != span.rows:
                raise RunError("a part of the predictions is not as it was written", where=name, do=AGAIN)
            counts += found
        schema = read_footer(names[0]).schema.to_arrow_schema().with_metadata(counts.metadata(task.binding))
        with folder.writing(task.name_of(spans[0].path), schema) as writer:
            for table in map(_read_part, names):
                writer.write_table(table.replace_schema_metadata(schema.metadata), row_group_size=len(table))
                tick()
    except OSError as error:
        raise not_written(error, task.out) from None


AGAIN = "remove the folder _parts there, and give the same command again: complete files stay"


def _read_part(uri: str) -> pa.Table:
    filesystem, path = open_filesystem(uri)
    with filesystem.open_input_file(path) as file:
        return pq.ParquetFile(file, page_checksum_verification=True).read()


def write_empty(task: PredictionTask, path: str, scores: list[pa.DataType]) -> None:
    """The predictions of an input file without rows."""
    kinds = task.carried.schema(path)
    fields = [*kinds, *(pa.field(name, kind) for name, kind in zip(task.scores, scores, strict=True))]
    schema = pa.schema(fields, Counts().metadata(task.binding))
    with PredictionFolder(task.out).writing(task.name_of(path), schema) as writer:
        writer.write_table(schema.empty_table())


def of_files(spans: Iterator[Span] | list[Span]) -> dict[str, list[Span]]:
    """The spans of each file of several, in order."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        if not span.is_whole:
            found.setdefault(span.path, []).append(span)
    return found


def not_written(error: OSError, out: str) -> RunError:
    """The error for people."""
    return RunError(
        f"the predictions cannot be written: {error.strerror or error}",
        where=out,
        expected="a folder that all nodes can write to, with room for them",
        do="make room, or correct its permissions, and give the same command again: complete files stay",
    )
