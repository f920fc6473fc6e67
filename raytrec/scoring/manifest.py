"""Content of an export and of its manifest.json. This module does not import torch.

DIR/manifest.json              Manifest; written last, so its presence means that the export is complete
DIR/predict.pt2                rows → predictions (torch.export); query.pt2, item.pt2: vectors of towers
DIR/model.onnx                 ONNX version of predict.pt2, if requested
DIR/tables/dim64-00000.safetensors
                               blocks of rows of tables with one dim (stored_tables.py), mapped into memory
DIR/ids/TABLE.parquet          managed ids: id and row, in the order of keys (embeddings/hashing.py)
DIR/vocabularies/0.parquet     vocabularies that transforms read
DIR/golden.arrow               golden rows: rows of the data with the model's scores; defines the columns' types
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from raytrec.common.documents import read_document
from raytrec.config.base import NonNegativeInt, PositiveInt, Section
from raytrec.config.features import Features
from raytrec.config.schema import Schema
from raytrec.config.tasks import TowerName
from raytrec.config.transforms import Transform

EXPORT_FORMAT: Literal[1] = 1
MANIFEST_FILE, GOLDEN, ONNX_FILE = "manifest.json", "golden.arrow", "model.onnx"
PrecisionName = Literal["fp32", "fp16", "int8", "int4"]
EXPORT_ADVICE = (
    "run `raytrec export RUN --out URI` (again if interrupted); use `raytrec serve --follow` for a folder of deltas"
)
ProgramName = Literal["predict", "query", "item"]
InputKind = Literal["dense", "bag", "vectors", "present", "side_features"]
Metrics = dict[str, dict[PrecisionName, float | None]]


class Input(Section):
    """One input tensor of a program, with B rows.

    Attributes:
        kind: dense: the dense columns in the schema's order, float32 [B, width]. bag: the pooled embedding of a
            feature, float32 [B, width]. vectors, present and side_features: a sequence feature, most recent id
            first, as float32 [B, length, width], bool [B, length] (True at positions with an id) and float64
            [B, length, width].
        feature: Sparse feature; empty for kind dense.
        length: Maximum number of ids of a sequence; 0 for kinds dense and bag.
        width: Size of the last dimension; 0 for kind present.
    """

    kind: InputKind
    feature: str = ""
    length: int = 0
    width: int = 0


def list_inputs(features: Features) -> list[Input]:
    """Return all inputs of a model: the dense columns (width 0 if none), then each feature in the schema's order."""
    schema = features.schema
    inputs = [Input(kind="dense", width=len(schema.dense))]
    for name, spec in schema.sparse.items():
        width, length = schema.tables[spec.table].dim, features.sequences.get(name)
        if length is None:
            inputs.append(Input(kind="bag", feature=name, width=width))
            continue
        inputs.append(Input(kind="vectors", feature=name, length=length, width=width))
        inputs.append(Input(kind="present", feature=name, length=length))
        if sides := features.side_features.get(name):
            inputs.append(Input(kind="side_features", feature=name, length=length, width=sides))
    return inputs


class FileEntry(Section):
    """Size in bytes and SHA-256 of a file of the export."""

    bytes: NonNegativeInt
    sha256: str


class ProgramEntry(Section):
    """File of a program, and its input tensors in order. The programs of towers return vectors."""

    file: str
    inputs: list[Input]


class StackEntry(Section):
    """Concatenated rows of tables of one dim and precision (a stack), in files of `block_rows` rows each.

    A table's first row in the stack is the total number of rows of the preceding tables. The last file contains the
    remaining rows.
    """

    tables: list[str] = Field(min_length=1)
    precision: PrecisionName
    block_rows: PositiveInt
    files: list[str]


class TaskEntry(Section):
    """Task of the model, with the name of its prediction column and the kind of its predictions."""

    name: str
    label: str
    column: str
    classes: PositiveInt = 1
    """Number of values per row; more than one if the task has classes."""
    predicts: Literal["probability", "number", "classes", "score"] | None = None
    """Probability of label 1, number in the label's units, probability of each class, or score, of which only the
    order is meaningful. None: the loss does not state the kind."""


class ExportSource(Section):
    """Origin of an exported model."""

    run: str
    step: NonNegativeInt
    checkpoint: str
    """Name of the checkpoint's folder, without its path."""
    checkpoint_id: str
    """Checksum of the checkpoint's content."""
    raytrec: str
    """Version of raytrec that wrote the export."""
    torch: str
    """Version of torch that wrote the export."""


def _check_time(text: str) -> str:
    """Return an ISO time, or raise ValueError if it is invalid or has no time zone."""
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"the time {text} has no time zone")
    return text


class Manifest(Section):
    """Content of an export, as written to manifest.json.

    Attributes:
        format: Version of the export's format.
        source: Run, checkpoint and packages from which the export was made.
        data_schema: Schema of the features that the model reads; key: schema.
        sequences: Feature of which the model reads the vector of each id → maximum number of ids.
        lists: Features whose columns contain lists after the transforms.
        transforms: Transforms needed for these features; files that they name are in the export's folder.
        tasks: Tasks of the model, in the order of the outputs of the program predict.
        towers: Tower (query or item) → features and dense columns from which its vectors are computed.
        programs: Program → its file and inputs; query and item exist for models with two towers.
        stacks: Stacks of the model's tables; each table is in one stack.
        ids: Table with managed ids → name of the file with its ids.
        golden_rows: Number of golden rows; 0: the scores cannot be checked.
        files: Name → entry, for all files except manifest.json.
    """

    format: Literal[1] = EXPORT_FORMAT
    made: Annotated[str, AfterValidator(_check_time)]
    """Time of the export: UTC, ISO 8601."""
    source: ExportSource
    data_schema: Schema = Field(alias="schema")
    sequences: dict[str, PositiveInt] = Field(default_factory=dict)
    lists: list[str] = Field(default_factory=list)
    transforms: list[Transform] = Field(default_factory=list)
    tasks: list[TaskEntry]
    towers: dict[TowerName, list[str]] = Field(default_factory=dict)
    programs: dict[ProgramName, ProgramEntry]
    stacks: list[StackEntry]
    ids: dict[str, str] = Field(default_factory=dict)
    golden_rows: NonNegativeInt = 0
    metrics: Metrics = Field(default_factory=dict)
    """Metric → precision (fp32 and that of quantized tables) → value, None if undefined; empty if not compared."""
    files: dict[str, FileEntry]
    binding: str
    """Hash of the inputs that determine the export, such as the checkpoint and the options of the command."""

    @model_validator(mode="after")
    def _check_files(self) -> Manifest:
        referenced = [each.file for each in self.programs.values()] + list(self.ids.values()) + [GOLDEN]
        referenced += [file for each in self.stacks for file in each.files]
        referenced += [name for each in self.transforms if (name := getattr(each, "vocabulary", None))]
        for name in referenced:
            if name not in self.files:
                raise ValueError(f"files: there is no entry for {name}")
        for name in self.files:
            if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
                fault = "outside the folder" if name.isprintable() else "not a valid file name"
                raise ValueError(f"files: {name!r} is {fault}")
        if sorted(name for each in self.stacks for name in each.tables) != sorted(self.data_schema.tables):
            raise ValueError(f"stacks: each table must be listed once: {', '.join(self.data_schema.tables)}")
        for stack in self.stacks:
            rows, dims = self.count_rows(stack), {self.data_schema.tables[name].dim for name in stack.tables}
            tables = ", ".join(stack.tables)
            if len(dims) > 1:
                raise ValueError(f"stacks: {tables} have different dims")
            if len(stack.files) != -(-rows // stack.block_rows):
                raise ValueError(f"stacks: the number of files does not match the {rows:,} rows of {tables}")
        if set(self.ids) != set(self.data_schema.managed):
            raise ValueError(f"ids: expected tables with managed ids: {', '.join(self.data_schema.managed) or 'none'}")
        return self

    def count_rows(self, stack: StackEntry) -> int:
        """Return the number of rows of a stack."""
        return sum(self.data_schema.tables[name].rows for name in stack.tables)

    @property
    def stack_shapes(self) -> list[tuple[int, int]]:
        """Return (number of rows, dim) of each stack."""
        return [(self.count_rows(each), self.data_schema.tables[each.tables[0]].dim) for each in self.stacks]

    @property
    def precisions(self) -> dict[str, PrecisionName]:
        """Return table → precision of its rows."""
        return {name: stack.precision for stack in self.stacks for name in stack.tables}

    @property
    def stack_precisions(self) -> str:
        """Return the precisions of the stacks in their order, separated by commas."""
        return ",".join(each.precision for each in self.stacks)

    @property
    def features(self) -> Features:
        """Return the features that the model reads."""
        return Features(self.data_schema, self.sequences)

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of the checksums of all files and the binding, as hexadecimal digits."""
        sums = {name: entry.sha256 for name, entry in self.files.items()}
        return hashlib.sha256(json.dumps([self.binding, sums], sort_keys=True).encode()).hexdigest()

    @property
    def version(self) -> str:
        """Return the name of this export in responses; see `format_version`."""
        return format_version(self.source.run, self.source.step, self.checksum)


def format_version(run: str, step: int, checksum: str) -> str:
    """Return the name of an export in responses, RUN-STEP-CHECKSUM (8 digits); RUN is reduced to [A-Za-z0-9_.-]."""
    return f"{to_plain_name(run)}-{step}-{checksum[:8]}"


def to_plain_name(text: str) -> str:
    """Return a text with each character other than [A-Za-z0-9_.-] replaced by _."""
    return re.sub(r"[^\w.-]", "_", text, flags=re.ASCII)


def read_manifest(uri: str) -> Manifest:
    """Read the manifest of an export.

    Raises:
        RunError: There is no export, or its manifest cannot be read.
        DataError: The URI is not valid, or the store cannot be reached.
    """
    return read_document(uri, MANIFEST_FILE, Manifest, "export", "raytrec export", do=EXPORT_ADVICE)
