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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.errors import DataError
from raytrec.common.output_folder import OutputFolder
from raytrec.common.reading import NotReadable, json_values
from raytrec.config.tasks import TowerName
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


class PredictionFolder(OutputFolder):
    """A folder of predictions.

    Raises:
        OSError: from all of it.
    """

    partial = PARTS_FOLDER

    @contextmanager
    def writing(self, name: str, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
        """A block that writes a Parquet file, which is there after it; after an error it is not."""
        with (
            self.stream(name, f"{PARTS_FOLDER}/{uuid4().hex}") as stream,
            pq.ParquetWriter(stream, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            yield writer

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
