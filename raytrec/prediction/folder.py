"""The files of a folder of predictions. No torch.

    OUT/_predictions.json          what these are predictions of: Manifest
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
from typing import Literal
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.documents import document
from raytrec.common.errors import ConfigError, DataError, os_errors
from raytrec.common.output_folder import OTHER, ClaimedFolder, binding_of
from raytrec.common.reading import NotReadable, json_values
from raytrec.common.storage import open_filesystem
from raytrec.config.tasks import TowerName
from raytrec.data.fragments import read_footer
from raytrec.prediction.columns import CarriedColumns
from raytrec.prediction.spans import Span

MANIFEST, PARTS_FOLDER = "_predictions.json", "_parts"
VECTOR = "vector"  # the column of vectors
KEY = b"raytrec"  # of the metadata of a file of predictions: Counts as JSON, and of what they are
Changed = dict[str, list[int]]  # feature → [ids that were brought into range, all ids]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder holds predictions of; `_predictions.json`.

    Attributes:
        run: its name. checkpoint: its folder. checkpoint_id: hash of its index.
        scores: names of the columns of scores. columns: of those that are carried.
        data: where the input is. input: stands for what its files hold.
        rules: table → out_of_range.
        vectors: Tower whose vectors these are; None: they are scores.
    """

    format: Literal[1] = 1
    run: str
    checkpoint: str
    checkpoint_id: str
    scores: list[str]
    columns: list[str]
    data: str
    input: str
    rules: dict[str, str]
    vectors: TowerName | None = None

    @property
    def binding(self) -> str:
        """Stands for all that a file's content depends on."""
        tower = [self.vectors] if self.vectors else []
        return binding_of(self.checkpoint_id, self.scores, self.columns, self.input, *tower)

    def difference(self, before: Manifest) -> tuple[str, str] | None:
        """Return how a folder with another manifest differs, and what to do; None for the same predictions.

        A table's rule may have been `error`: what is complete held no id that it would have changed.
        """
        if before.checkpoint_id != self.checkpoint_id:
            of = f"of {before.checkpoint}"
            return f"this folder holds predictions {of}", f"predict with that checkpoint, or {OTHER}"
        if before.vectors != self.vectors:
            what = f"vectors of the {before.vectors} tower" if before.vectors else "scores"
            return f"this folder holds {what}", OTHER
        for key, what in {"columns": "--columns", "scores": "tasks"}.items():
            if (names := getattr(before, key)) != getattr(self, key):
                return (
                    f"this folder holds predictions with other {what}: {', '.join(names or ['none'])}",
                    f"give the same, or {OTHER}",
                )
        if before.input != self.input:
            what = f"this folder holds predictions of other rows, from {before.data}"
            if before.data == self.data:
                what = "the input's files have changed since predictions were written here"
            return what, f"predict all of it again, into a new folder: {OTHER}"
        rules = before.rules
        changed = [name for name, rule in self.rules.items() if rules.get(name, rule) not in (rule, "error")]
        if changed:
            rule = f"tables.{changed[0]}.out_of_range={rules[changed[0]]}"
            return f"this folder holds predictions with {rule}", f"give the same, or {OTHER}"
        return None


@dataclass(frozen=True)
class PredictionTask:
    """Input and output of the ranks that predict.

    Attributes:
        out: Folder of predictions.
        below: Folder that names of input files are relative to.
        files: Input file → number of its rows, including empty files.
        carried: Columns of the input that are copied to the output.
        manifest: Manifest of the folder.
        batch_rows, span_rows: See spans.cut_spans.
    """

    out: str
    below: str
    files: dict[str, int]
    carried: CarriedColumns
    manifest: Manifest
    batch_rows: int
    span_rows: int

    @property
    def plan(self) -> str:
        """Hash of everything that determines the content of a part."""
        of = self.manifest
        return binding_of(of.binding, of.rules, self.batch_rows, self.span_rows)[:16]

    def name_of(self, path: str) -> str:
        """The name of an input file's predictions, below `out`."""
        return path.removeprefix(self.below).lstrip("/")

    def part_of(self, span: Span) -> str:
        """Where a span of a file of several goes, below `out`."""
        return f"{self.parts_of(span.path)}/{span.first:012d}.parquet"

    def parts_of(self, path: str) -> str:
        """Return the folder of a file's parts, below `out`."""
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


class PredictionFolder(ClaimedFolder):
    """A folder of predictions.

    Raises:
        OSError: from all of it.
    """

    partial = PARTS_FOLDER

    def __init__(self, uri: str):
        super().__init__(uri, "raytrec predict")

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
            found = Counts.of(read_footer(self.uri_of(task.name_of(path))), task.manifest.binding)
        except DataError:  # it is not whole
            return None
        return found if found is not None and found.rows == task.files[path] else None


def claim(folder: PredictionFolder, manifest: Manifest) -> set[str]:
    """Claim a folder for these predictions, or check that it holds them; return the names of its files.

    Raises:
        ConfigError: The folder holds something else. RunError: It cannot be read or written.
    """
    share = "a folder that all nodes can write to"
    with os_errors("the folder cannot be read or written", where=f"--out {folder.uri}", expected=share):
        names, before = folder.claim(MANIFEST, Manifest)
        if before is not None and (difference := manifest.difference(before)):
            raise folder.refused(*difference)
        folder.sweep()
        if before != manifest:
            folder.write(MANIFEST, document(manifest))
    return names


def check_place(out: str, data: str) -> str:
    """Whether predictions can go where they shall; gives the folder that names of input files are taken from.

    Raises:
        ConfigError: what is written would be, or become, input.
    """
    filesystem, source = open_filesystem(data)
    is_file = filesystem.get_file_info(source).is_file
    below = source.rpartition("/")[0] if is_file else source
    prefix = data.partition("://")[0] + "://" if "://" in data else ""
    _, target = open_filesystem(out)
    if ("://" in out) != ("://" in data):
        return prefix + below
    if filesystem.type_name == "local":
        inside = Path(os.path.realpath(target)).is_relative_to(os.path.realpath(below))
        inside &= not is_file or os.path.realpath(target) == os.path.realpath(below)
    else:
        inside = f"{target}/".startswith(f"{below}/") and (not is_file or target == below)
    if inside:
        raise ConfigError(
            "the predictions would be written among their input",
            where=f"--out {out}, --data {data}",
            expected="a folder outside of the data",
            do="choose another --out",
        )
    return prefix + below
