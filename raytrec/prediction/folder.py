"""The files of a folder of predictions. No torch.

    OUT/_predictions.json          what these are predictions of (prediction/manifest.py)
    OUT/a/part-0.parquet           for each input file one of the same name; there when it is complete
    OUT/_parts/PLAN/a/part-0.parquet/000000065536.parquet
                                   a span of a file of several, from this row on; gone at the end

PLAN stands for how files are cut into spans and spans into batches: parts of another plan are not used.
Readers of folders of Parquet pass over names that begin with _.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from raytrec.common.errors import DataError
from raytrec.common.processes import owner, remove_leftovers
from raytrec.common.reading import NotReadable, json_values
from raytrec.common.storage import open_filesystem, read_bytes, sync
from raytrec.config.evaluation import TowerName
from raytrec.data.fragments import read_footer
from raytrec.prediction.columns import CarriedColumns
from raytrec.prediction.spans import Span

MANIFEST, PARTS_FOLDER = "_predictions.json", "_parts"
VECTOR = "vector"  # the column of vectors
KEY = b"raytrec"  # of the metadata of a file of predictions: Counts as JSON, and of what they are
Changed = dict[str, list[int]]  # feature → [ids that were brought into range, all ids]


@dataclass(frozen=True)
class PredictionTask:
    """What ranks are to predict, and where it goes.

    Attributes:
        out: the folder of predictions.
        below: the folder that names of input files are taken from.
        files: input file → its rows, with those that have none.
        scores: the names of the columns of scores, in the order of the tasks.
        carried: columns of the input that go along.
        binding: stands for run, checkpoint, columns and input.
        batch_rows, span_rows: of spans.cut_spans.
        plan: names the folder of parts.
        tower: whose vectors are in the place of scores, query or item; None: scores.
    """

    out: str
    below: str
    files: dict[str, int]
    scores: tuple[str, ...]
    carried: CarriedColumns
    binding: str
    batch_rows: int
    span_rows: int
    plan: str
    tower: TowerName | None = None

    def name_of(self, path: str) -> str:
        """The name of an input file's predictions, below `out`."""
        return path.removeprefix(self.below).lstrip("/")

    def part_of(self, span: Span) -> str:
        """Where a span of a file of several goes, below `out`."""
        return f"{self.parts_of(span.path)}/{span.first:012d}.parquet"

    def parts_of(self, path: str) -> str:
        """The folder of a file's parts, below `out`."""
        return f"{PARTS_FOLDER}/{self.plan}/{self.name_of(path)}"

    def output_of(self, span: Span) -> str:
        """Where a span goes, below `out`."""
        return self.name_of(span.path) if span.is_whole else self.part_of(span)


@dataclass
class Counts:
    """What was counted of rows on their way.

    Attributes:
        skipped: rows that could not be read (data.on_error: skip); they have no score.
        changed: of ids that were brought into range; only features of tables that take such ids.
    """

    rows: int = 0
    skipped: int = 0
    changed: Changed = field(default_factory=dict)

    def __iadd__(self, other: Counts) -> Counts:
        self.rows += other.rows
        self.skipped += other.skipped
        for feature, (changed, ids) in other.changed.items():
            before = self.changed.get(feature, [0, 0])
            self.changed[feature] = [before[0] + changed, before[1] + ids]
        return self

    def metadata(self, binding: str) -> dict[bytes, bytes]:
        """For a file of predictions."""
        values = {"of": binding, "rows": self.rows, "skipped": self.skipped, "changed": self.changed}
        return {KEY: json.dumps(values, sort_keys=True).encode()}

    @classmethod
    def of(cls, footer: pq.FileMetaData, binding: str) -> Counts | None:
        """Those of a file; None where it holds something else than these predictions."""
        try:
            values = json_values((footer.metadata or {})[KEY])
            if values["of"] != binding or values["rows"] != footer.num_rows:
                return None
            return cls(values["rows"], values["skipped"], values["changed"])
        except (KeyError, TypeError, NotReadable):
            return None


class PredictionFolder:
    """A folder of predictions, on disk or in an object store, where files appear when they are complete.

    Raises:
        OSError: from all of it.
    """

    def __init__(self, uri: str):
        self.uri = uri.rstrip("/") or uri
        self._filesystem, self._path = open_filesystem(uri)
        self.is_local = self._filesystem.type_name == "local"

    def uri_of(self, name: str) -> str:
        """The address of a file."""
        return f"{self.uri}/{name}"

    def names(self) -> set[str]:
        """Of all files, at all depths."""
        found = self._filesystem.get_file_info(
            fs.FileSelector(self._path, recursive=True, allow_not_found=True)
        )
        files = (info.path for info in found if info.type == fs.FileType.File)
        return {path.removeprefix(self._path).lstrip("/") for path in files}

    @contextmanager
    def writing(self, name: str, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
        """A block that writes a Parquet file, which is there after it; after an error it is not."""
        with (
            self._stream(name, f"{PARTS_FOLDER}/{uuid4().hex}") as stream,
            pq.ParquetWriter(stream, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            yield writer

    def write(self, name: str, data: bytes) -> None:
        """Writes a file that is there when it is whole."""
        self.sweep()
        with self._stream(name, name) as stream:
            stream.write(data)

    @contextmanager
    def _stream(self, name: str, partial: str) -> Iterator[pa.NativeFile]:
        """A stream to a file that appears after the block; after an error it does not.

        A file on disk is written under another name. An object appears when its stream is closed, which after
        an error only the interpreter may do: then the footer has fewer rows than its metadata states.
        """
        target = f"{self._path}/{name}"
        if not self.is_local:
            stream = self._filesystem.open_output_stream(target)
            yield stream
            stream.close()
            return
        written = f"{self._path}/{partial}.{owner()}.tmp"
        os.makedirs(os.path.dirname(written), exist_ok=True)
        try:
            with self._filesystem.open_output_stream(written) as stream:
                yield stream
            sync(written)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(written, target)
        except BaseException:
            Path(written).unlink(missing_ok=True)
            raise

    def sweep(self) -> None:
        """Removes what writers that were killed have left, of a folder on disk."""
        for place in (self._path, f"{self._path}/{PARTS_FOLDER}") if self.is_local else ():
            remove_leftovers(place, "*.{owner}.tmp")

    def read(self, name: str) -> bytes | None:
        """A small file; None where there is none."""
        try:
            return read_bytes(self.uri_of(name))
        except FileNotFoundError:
            return None

    def remove(self, folder: str) -> None:
        """Removes a folder with all that is in it, if it is there."""
        found = self._filesystem.get_file_info(f"{self._path}/{folder}")
        if found.type == fs.FileType.Directory:
            self._filesystem.delete_dir(found.path)

    def finished(self, task: PredictionTask, names: Iterable[str]) -> dict[str, Counts]:
        """Input files whose predictions are complete → what was counted of them.

        Args:
            names: of the files that are there.
        """
        there = set(names)
        candidates = [path for path in task.files if task.name_of(path) in there]
        with ThreadPoolExecutor(16 if self.is_local else 64) as pool:
            counts = pool.map(lambda path: self._counts(task, path), candidates)
            return {path: each for path, each in zip(candidates, counts, strict=True) if each is not None}

    def _counts(self, task: PredictionTask, path: str) -> Counts | None:
        try:
            found = Counts.of(read_footer(self.uri_of(task.name_of(path))), task.binding)
        except DataError:  # it is not whole
            return None
        return found if found is not None and found.rows == task.files[path] else None
