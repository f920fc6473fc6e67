"""Files in a folder of predictions. This module does not import torch.

    OUT/_predictions.json          Manifest, which describes the predictions
    OUT/a/part-0.parquet           predictions of the input file with this name; on disk, exists only if complete
    OUT/_parts/PLAN/a/part-0.parquet/000000065536.parquet
                                   part: predictions of one span (inputs.py), which starts at this row, of a file
                                   with several spans; removed at the end

PLAN (PredictionTask.plan) is a hash of the checkpoint, the input, the columns, the out_of_range rules, and the number
of rows in spans and batches. Parts with another hash are ignored. Readers of Parquet folders ignore names that begin
with _.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.documents import to_json_document
from raytrec.common.errors import ConfigError, DataError, convert_os_errors
from raytrec.common.output_folder import OTHER_FOLDER_ADVICE, ClaimedFolder, compute_binding
from raytrec.common.reading import UnreadableError, parse_json
from raytrec.common.storage import extract_path, open_filesystem
from raytrec.config.tasks import TowerName
from raytrec.data.fragments import read_footer
from raytrec.prediction.inputs import CarriedColumns, Span

MANIFEST, PARTS_FOLDER = "_predictions.json", ClaimedFolder.partial
VECTOR = "vector"  # name of the vector column
COUNTS_KEY = b"raytrec"  # metadata key in files of predictions, whose value contains Counts and binding as JSON


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of the predictions in a folder, stored as `_predictions.json`.

    Attributes:
        format: Version of the format of this file.
        run: Name of the run.
        checkpoint: Path or URI of the checkpoint.
        checkpoint_id: SHA-256 of the checkpoint's index.
        scores: Names of the score columns, in order; ["vector"] if the folder contains vectors.
        columns: Names of the carried columns, in order.
        data: Path or URI of the input data.
        input: SHA-256 of the names and (of large files, sampled) contents of the input files, and of the transforms.
        rules: Table → its out_of_range rule (error, clamp or hash).
        vectors: Tower whose vectors the folder contains; None: the folder contains scores.
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
        """Return the SHA-256 of all fields that determine the content of files, except `rules`."""
        tower = [self.vectors] if self.vectors else []
        return compute_binding(self.checkpoint_id, self.scores, self.columns, self.input, *tower)

    def explain_difference(self, earlier_manifest: Manifest) -> tuple[str, str] | None:
        """Return (difference from the folder's earlier manifest, advice for the user), or None if files can be kept.

        Equal data at another path is accepted. If the earlier rule of a table was `error`, complete files
        remain valid, because they contain no id that the new rule would change.
        """
        if earlier_manifest.checkpoint_id != self.checkpoint_id:
            what = f"predictions of checkpoint {earlier_manifest.checkpoint}"
            return f"the folder contains {what}", f"predict with that checkpoint, or {OTHER_FOLDER_ADVICE}"
        towers = earlier_manifest.vectors, self.vectors
        if earlier_manifest.vectors != self.vectors:
            what, new = (f"vectors of the {tower} tower" if tower else "scores" for tower in towers)
            return f"the folder contains {what} instead of {new}", OTHER_FOLDER_ADVICE
        if earlier_manifest.columns != self.columns:
            names = ", ".join(earlier_manifest.columns or ["none"])
            what = f"the folder contains predictions with different carried columns (--columns): {names}"
            return what, f"use the same carried columns in the same order, or {OTHER_FOLDER_ADVICE}"
        if earlier_manifest.input != self.input:
            what = f"the folder contains predictions of other files, or with other transforms: {earlier_manifest.data}"
            if earlier_manifest.data == self.data:
                what = "the input files or data.transforms have changed since the predictions were written"
            return what, f"predict the whole input into a new folder: {OTHER_FOLDER_ADVICE}"
        rules = earlier_manifest.rules
        changed = [name for name, rule in self.rules.items() if rules.get(name, rule) not in (rule, "error")]
        if changed:
            settings = " ".join(f"tables.{name}.out_of_range={rules[name]}" for name in changed)
            return f"the folder contains predictions with {settings}", f"set {settings}, or {OTHER_FOLDER_ADVICE}"
        return None


@dataclass(frozen=True)
class PredictionTask:
    """Input and output of one call of `predict`, passed to all ranks.

    Attributes:
        out: Path or URI of the output folder.
        below: Folder, from `check_output_folder`, to which the names of input and output files are relative.
        files: Path or URI of each readable input file → number of rows, including empty files.
        carried: Columns to carry over from the input.
        manifest: Manifest of the output folder.
        batch_rows: Maximum number of rows in one rank's batch; see inputs.cut_spans.
        span_rows: Minimum number of rows in a span; see inputs.cut_spans.
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
        """Return the name of the folder of parts: 16 hex digits of the hash described in this module."""
        manifest = self.manifest
        return compute_binding(manifest.binding, manifest.rules, self.batch_rows, self.span_rows)[:16]

    def name_of(self, path: str) -> str:
        """Return the path of an input file's predictions, relative to `out`."""
        return extract_path(path).removeprefix(self.below).lstrip("/")

    def part_of(self, span: Span) -> str:
        """Return the path of the part with the predictions of one span, relative to `out`."""
        return f"{self.parts_of(span.path)}/{span.first:012d}.parquet"

    def parts_of(self, path: str) -> str:
        """Return the path of the folder that contains the parts of an input file, relative to `out`."""
        return f"{PARTS_FOLDER}/{self.plan}/{self.name_of(path)}"


@dataclass
class Counts:
    """Numbers of predicted rows and of ids outside of their tables.

    Attributes:
        rows: Number of rows.
        skipped: Number of rows that data.on_error=skip skips, whose scores are null.
        changed: Feature → [number of ids clamped or hashed into range, number of all ids], for every sparse feature
            if any table's out_of_range rule is not error; otherwise {}.
    """

    rows: int = 0
    skipped: int = 0
    changed: dict[str, list[int]] = field(default_factory=dict)

    def __iadd__(self, other: Counts) -> Counts:
        self.rows += other.rows
        self.skipped += other.skipped
        for feature, (changed, ids) in other.changed.items():
            previous = self.changed.get(feature, [0, 0])
            self.changed[feature] = [previous[0] + changed, previous[1] + ids]
        return self

    def metadata(self, binding: str) -> dict[bytes, bytes]:
        """Return {COUNTS_KEY: JSON with the counts and the binding}, the metadata of a file of predictions."""
        values = {"of": binding, "rows": self.rows, "skipped": self.skipped, "changed": self.changed}
        return {COUNTS_KEY: json.dumps(values, sort_keys=True).encode()}

    @classmethod
    def from_footer(cls, footer: pq.FileMetaData, binding: str) -> Counts | None:
        """Return the counts in a file's metadata, or None if they are missing or do not match the file or binding."""
        try:
            values = parse_json((footer.metadata or {})[COUNTS_KEY])
            if values["of"] != binding or values["rows"] != footer.num_rows:
                return None
            return cls(values["rows"], values["skipped"], values["changed"])
        except (KeyError, TypeError, UnreadableError):
            return None


class PredictionFolder(ClaimedFolder):
    """Folder of predictions, local or in an object store.

    Raises:
        DataError: The path is not valid or the store cannot be reached; raised by the constructor.
        OSError: The folder cannot be read or written; raised by the methods.
    """

    def __init__(self, uri: str):
        super().__init__(uri, "raytrec predict")

    @contextmanager
    def open_parquet_writer(self, name: str, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
        """Yield a writer of a Parquet file, which on disk appears or is replaced only if the block succeeds.

        Args:
            name: Path of the file, relative to the folder.
            schema: Schema of the file, including its metadata.
        """
        with (
            self.stream(name, f"{PARTS_FOLDER}/{uuid4().hex}") as stream,
            pq.ParquetWriter(stream, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            yield writer

    def find_finished(self, task: PredictionTask, names: Collection[str]) -> dict[str, Counts]:
        """Return input file → counts of its predictions, for all input files whose predictions are complete.

        Predictions are complete if their footer can be read, and its binding and number of rows are those of the task.

        Args:
            task: Input and output of the predictions.
            names: Paths of the files in the folder, relative to the folder.
        """
        candidates = [path for path in task.files if task.name_of(path) in names]
        with ThreadPoolExecutor(16 if self.is_local else 64) as pool:
            counts = pool.map(lambda path: self._counts(task, path), candidates)
            return {path: each for path, each in zip(candidates, counts, strict=True) if each is not None}

    def _counts(self, task: PredictionTask, path: str) -> Counts | None:
        try:
            counts = Counts.from_footer(read_footer(self.uri_of(task.name_of(path))), task.manifest.binding)
        except DataError:  # the file is incomplete or damaged
            return None
        return counts if counts is not None and counts.rows == task.files[path] else None


def claim_prediction_folder(folder: PredictionFolder, manifest: Manifest) -> set[str]:
    """Claim an empty folder for predictions, or check that a folder contains the same predictions.

    A new or changed manifest is written, and incomplete files of killed writers are removed.

    Returns:
        Paths of the files that the folder contained before, relative to the folder.

    Raises:
        ConfigError: The folder contains other predictions, other files without a manifest, or an invalid manifest.
        RunError: The folder cannot be read or written.
    """
    expected = "a folder that all nodes can write to"
    with convert_os_errors("the folder cannot be read or written", where=f"--out {folder.uri}", expected=expected):
        names, previous = folder.claim(MANIFEST, Manifest)
        if previous is not None and (difference := manifest.explain_difference(previous)):
            raise folder.make_refusal(*difference)
        folder.sweep()
        if previous != manifest:
            folder.write(MANIFEST, to_json_document(manifest))
    return names


def check_output_folder(out: str, data: str) -> str:
    """Check the output folder `out`, and return the folder to which the names of files in `data` are relative.

    The result is a local path, or a path as returned by `extract_path`.

    Raises:
        ConfigError: `out` is the folder of the input file `data`, or the input folder `data` or a folder inside it.
        DataError: A path is not valid, or its store cannot be reached.
    """
    filesystem, source = open_filesystem(data)
    is_file = filesystem.get_file_info(source).is_file
    place = extract_path(data) if "://" in data else source
    below, folder = (each.rpartition("/")[0] if is_file else each for each in (place, source))
    _, target = open_filesystem(out)
    if filesystem.type_name == "local":
        folder, target = os.path.realpath(folder), os.path.realpath(target)
    is_inside = target == folder if is_file else f"{target}/".startswith(f"{folder.rstrip('/')}/")
    if is_inside and ("://" in out) == ("://" in data):
        raise ConfigError(
            f"the predictions would be written into the folder of their input {data}",
            where=f"--out {out}",
            expected="a folder outside the input data",
        )
    return below


def read_verified(uri: str) -> pa.Table:
    """Read a Parquet file, and verify the checksums of its pages.

    Raises:
        DataError: The path is not valid, or the store cannot be reached.
        OSError, pa.ArrowException: The file cannot be read or is damaged, or a checksum does not match.
    """
    filesystem, path = open_filesystem(uri)
    with filesystem.open_input_file(path) as file:
        return pq.ParquetFile(file, page_checksum_verification=True).read()
