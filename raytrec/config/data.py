"""The sections `run`, `warm_start` and `data`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from raytrec.common.errors import shorten_repr
from raytrec.common.storage import get_sibling
from raytrec.config.base import Mark, Number, PositiveFloat, PositiveInt, Section, SmallCount
from raytrec.config.transforms import BUILT_IN, Transform

FREE = Mark.FREE  # a resumed run may change paths, because it compares the contents of the data
RUN_NAME_PATTERN = re.compile(r"\w[\w .,:+=@()-]{0,149}")


def to_run_name(text: str) -> str:
    """Return a valid run name of at most 101 characters, made from a text by replacing invalid characters with _."""
    name = re.sub(r"[^\w .,:+=@()-]", "_", text)[:100].encode()[:150].decode(errors="ignore").rstrip()
    return name if RUN_NAME_PATTERN.fullmatch(name) else f"_{name}"


def _check_run_name(name: str) -> str:
    """Return a run name, or raise ValueError if it cannot be the name of a folder or appear on terminals."""
    if not RUN_NAME_PATTERN.fullmatch(name) or name != name.strip() or len(name.encode()) > 200:
        raise ValueError(
            "run.name: expected at most 150 letters, digits, spaces and . , : + = @ ( ) - _ (200 bytes of UTF-8), "
            f"beginning with a letter, digit or _, and not ending with a space (got {shorten_repr(name)}); "
            "run.dir sets the run folder"
        )
    return name


class RunSection(Section):
    """Name, folder and seed of a run."""

    name: Annotated[Annotated[str, AfterValidator(_check_run_name)] | None, FREE, Mark.COMMON] = None
    """Name of the run: at most 150 letters, digits, spaces and . , : + = @ ( ) - _; default: the name of the config
    file and the start time."""
    dir: Annotated[str | None, FREE, Mark.COMMON] = None
    """Run folder, which stores the result, checkpoints and config; default: runs/NAME."""
    root: Annotated[str | None, FREE, Mark.COMMON] = None
    """Folder to which paths of data and runs are relative; default: the environment variable RAYTREC_ROOT,
    which is set on cluster nodes, else the working directory."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    """Seed for initial weights, the order of rows, ids drawn by transforms, and dropout."""


class WarmStartSection(Section):
    """Start of a new run from the weights of an earlier run."""

    from_: str | None = Field(None, alias="from")
    """Run folder or checkpoint folder whose weights initialize the model."""
    optimizer: bool = False
    """Also load the optimizer state."""
    tables: dict[str, Literal["exact", "resize", "new", "drop"]] = Field(default_factory=dict)
    """Treatment of tables that differ from the checkpoint's, by table or pattern such as 'item*'. exact (default):
    raise an error. resize: load the rows that both tables have and initialize additional rows; not for managed ids.
    new: initialize all rows. drop: ignore a table that the schema no longer contains."""
    dense: Literal["exact", "matching"] = "exact"
    """exact: raise an error if a key of `model` except dropout, or the schema's labels, dense columns or sparse
    features, differ from the checkpoint's. matching: load the dense parameters whose name and shape are unchanged,
    and initialize the others."""


Folders = str | Annotated[list[str], Field(min_length=1)]


def to_folder_list(value: Folders) -> list[str]:
    """Return a list of folders, given a single folder or a list of folders."""
    return [value] if isinstance(value, str) else value


def _check_unique(names: list[str]) -> list[str]:
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"data.reserve_columns: column {shorten_repr(min(duplicates))} is listed twice")
    return names


ReservedColumns = Annotated[list[Annotated[str, Field(min_length=1)]], AfterValidator(_check_unique)]


class PartitionRange(Section):
    """Range of partitions of data.train; both ends are included."""

    from_: str | None = Field(None, alias="from")
    """First partition, such as date=2026-11-01; null: no lower bound."""
    to: str | None = None
    """Last partition (included), such as date=2026-11-07/hour=11; null: no upper bound."""


class DataSection(Section):
    """Data of a run: files, transforms, row order and readers."""

    train: Annotated[Folders, FREE]
    """Parquet file or folder of Parquet files to train on (local, s3:// or gs://), or a list of them."""
    partitions: PartitionRange = Field(default_factory=PartitionRange)
    """Partitions of data.train to train on, for folders such as date=2026-11-01/hour=07."""
    valid: Annotated[Folders | None, FREE, Mark.COMMON] = None
    """Files or folders (see data.train) on which the model is evaluated every train.eval_every_steps steps."""
    test: Annotated[Folders | None, FREE, Mark.COMMON] = None
    """Files or folders on which the model is evaluated at the end; default: data.valid, else data.holdout's rows."""
    schema_path: Annotated[str | None, FREE] = Field(None, alias="schema")
    """Path of schema.yaml; default: schema.yaml in the parent folder of data.train (of its first entry)."""
    transforms: list[Transform] = Field(
        default_factory=list,
        description=f"Column transforms, applied before the schema: {', '.join(BUILT_IN)}, or module:function.",
    )
    holdout: Annotated[Annotated[Number, Field(gt=0, le=0.5)] | Literal["auto"] | None, Mark.COMMON] = None
    """Share of the rows of data.train, rounded to 1/n for an integer n, that is held out of training and used as
    data.valid; ignored if data.valid is set. auto: a tenth, at most about 100,000 rows. null: no rows are held out."""
    reserve_columns: ReservedColumns = Field(default_factory=list)
    """Columns that are passed through unchanged, for task groups and items, evaluation slices, and keys of
    predictions. Any type with one value per row is allowed, including columns from key=value folders."""
    global_batch_size: Annotated[PositiveInt, Field(lt=2**31)] = 2048
    """Rows per step, summed over all workers."""
    shuffle: Literal["none", "groups", "window"] = "window"
    """none: file order. groups: row groups in a new seeded order each epoch. window: also shuffle rows within
    a window of row groups."""
    window: SmallCount = 2
    """Number of consecutive row groups per lane whose rows are shuffled together by shuffle: window. Large row groups
    are split into pieces of window × 20,000 rows (at least 40,000), and each piece is shuffled separately."""
    lanes: SmallCount = 24
    """Number of contiguous spans of the row order from which each global batch is composed; also the maximum number
    of workers. shuffle: none reads each batch from a single position."""
    on_error: Literal["fail", "skip"] = "fail"
    """Treatment of rows that cannot be read or violate the schema: fail, or skip the rows. Skipped rows
    contribute no loss, are counted (train.skipped_rows), and are listed in skipped.jsonl."""
    balance: Annotated[Literal["none", "length", "squared_length"], FREE] = "none"
    """Assignment of a global batch's rows to workers. none: each worker trains on the rows that it reads. length:
    workers exchange rows so that the sums of their row lengths are nearly equal; a row's length is the number of ids
    in its lists, up to the model's max_length. squared_length: nearly equal sums of squared lengths, for attention."""
    drop_last: bool = False
    """Skip the last, smaller batch of each epoch."""
    readers: Annotated[SmallCount, FREE] = 1
    """Number of concurrent Ray Data read tasks per worker."""
    read_on: Annotated[Literal["auto", "gpu_nodes", "cpu_nodes"], FREE] = "auto"
    """Nodes that read rows for GPU workers. auto: nodes without GPUs, as long as they have CPUs for the
    readers; the remaining readers run where Ray places them, preferably on the workers' nodes. cpu_nodes: all
    readers run on nodes without GPUs. gpu_nodes: Ray places all readers, preferably on the workers' nodes."""
    buffer_gib: Annotated[PositiveFloat, FREE] = 0.5
    """Memory for rows read ahead per worker, in GiB of Ray's object store."""

    @property
    def schema_uri(self) -> str:
        """Return the path or URI of the schema: data.schema, or schema.yaml next to the first entry of data.train."""
        return self.schema_path or get_sibling(to_folder_list(self.train)[0], "schema.yaml")
