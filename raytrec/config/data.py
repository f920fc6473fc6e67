"""The sections `run`, `warm_start`, `data`, `tasks` (one entry per label to learn) and `eval`.

tasks:
  - {label: clicked}                                   # binary cross-entropy
  - {label: watched_s, loss: mse, weight: 0.1, metrics: [mae], mask: clicked}
  - {label: bought, loss: "mine.losses:Focal", options: {gamma: 2}}
  - {label: category, loss: cross_entropy, options: {classes: 12}}
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue

from raytrec.common.errors import shorten_repr
from raytrec.common.storage import get_sibling
from raytrec.config.base import Mark, Number, PositiveFloat, PositiveInt, Section, SmallCount
from raytrec.config.transforms import BUILT_IN, Transform

FREE = Mark.FREE  # a resumed run may change paths, because it compares the contents of the data
RUN_NAME_PATTERN = re.compile(r"\w[\w .,:+=@()-]{0,149}")


def to_run_name(text: str) -> str:
    """Return a valid run name derived from a text."""
    name = re.sub(r"[^\w .,:+=@()-]", "_", text)[:100]
    return name if RUN_NAME_PATTERN.fullmatch(name) else f"_{name}"


def _check_run_name(name: str) -> str:
    """Check a run name, which becomes the name of a folder and appears in logs and on terminals."""
    if not RUN_NAME_PATTERN.fullmatch(name) or name != name.strip() or len(name.encode()) > 200:
        raise ValueError(
            "run.name: expected at most 150 letters, digits, spaces and . , : + = @ ( ) - _, beginning with "
            f"a letter, digit or _ (got {name[:60]!r}); the folder of the run is set by run.dir"
        )
    return name


class RunSection(Section):
    """Name, folder and seed of a run."""

    name: Annotated[Annotated[str, AfterValidator(_check_run_name)] | None, FREE, Mark.COMMON] = None
    """Name of the run: letters, digits, spaces and . , : + = @ ( ) - _; default: the name of the config file
    and the start time."""
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
    """Treatment of changed tables, by table or pattern such as 'item*'. exact: raise an error. resize: keep
    the rows that both tables have and initialize additional rows. new: initialize all rows. drop: ignore the
    checkpoint's table."""
    dense: Literal["exact", "matching"] = "exact"
    """exact: raise an error if a key of `model` except dropout, or the schema's labels, dense columns or sparse
    features, differ from the checkpoint's. matching: load the dense parameters whose name and shape are unchanged,
    and initialize the others."""


Folders = str | Annotated[list[str], Field(min_length=1)]


def to_folder_list(value: Folders) -> list[str]:
    """Return a folder, or a list of folders, as a list."""
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
    """Folder of Parquet files to train on (local, s3:// or gs://), or a list of folders."""
    partitions: PartitionRange = Field(default_factory=PartitionRange)
    """Partitions of data.train to train on, for folders such as date=2026-11-01/hour=07."""
    valid: Annotated[Folders | None, FREE, Mark.COMMON] = None
    """Data on which the model is evaluated every train.eval_every_steps steps."""
    test: Annotated[Folders | None, FREE, Mark.COMMON] = None
    """Data on which the model is evaluated at the end; default: data.valid."""
    schema_path: Annotated[str | None, FREE] = Field(None, alias="schema")
    """Path of schema.yaml; default: schema.yaml in the parent folder of data.train."""
    transforms: list[Transform] = Field(
        default_factory=list,
        description=f"Column transforms, applied before the schema: {', '.join(BUILT_IN)}, or module:function.",
    )
    holdout: Annotated[Number, Field(gt=0, le=0.5)] | Literal["auto"] | None = None
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
    readers; the remaining readers run on the workers' nodes. gpu_nodes or cpu_nodes: all readers run on nodes
    of this kind."""
    buffer_gib: Annotated[PositiveFloat, FREE] = 0.5
    """Memory for rows read ahead per worker, in GiB of Ray's object store."""

    @property
    def schema_uri(self) -> str:
        """Return the path of the schema: data.schema, or schema.yaml next to the first folder of data.train."""
        return self.schema_path or get_sibling(to_folder_list(self.train)[0], "schema.yaml")


TowerName = Literal["query", "item"]  # towers of a retrieval model
Column = Annotated[str, Field(min_length=1)]


def _built_in_losses() -> list[str]:
    """Return the names of raytrec's losses as registered in their files, without importing the files."""
    files = (Path(__file__).parents[1] / "tasks" / "losses").glob("*.py")
    texts = (file.read_text(encoding="utf-8") for file in files)
    return sorted(name for text in texts for name in re.findall(r'(?m)^@loss\("(\w+)"\)$', text))


class TaskSection(Section):
    """A label and its loss, metrics and weights."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$", max_length=100)] | None = None
    """Name in results and charts; default: the label."""
    label: str | None = None
    """Label of the schema; default: the first label."""
    loss: str = Field(
        "bce",
        description=f"Loss to minimize: {', '.join(_built_in_losses())}, or a user-defined class as module:Class.",
    )
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the loss."""
    weight: PositiveFloat = 1.0
    """Factor of this task's loss in the sum over all tasks."""
    metrics: list[str] | None = None
    """Names of metrics, or module:name; default: the metrics of the loss."""
    mask: Column | None = None
    """Column that selects the rows of this task: only rows with value 1 count. The label of another task, or a
    column of zeros and ones or bools; default: all rows."""
    nulls: Literal["error", "skip"] | None = None
    """Meaning of a null label: an error, or a row without a label of this task; default: error with one task,
    skip with several."""
    sample_weight: Column | None = None
    """Column of finite numbers ≥ 0 that weight each row in the loss and metrics."""
    positive_weight: PositiveFloat = 1.0
    """Factor of a row's loss if the label is 1; metrics ignore this factor."""
    negatives_kept: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Share of negatives that down-sampling of the data has kept. Predictions p become p ÷ (p + (1 - p) ÷
    share) before metrics are computed (bce and focal)."""
    group: Column | None = None
    """Column of data.reserve_columns: rows with equal values are ranked against each other (bpr,
    listwise_softmax, group metrics). If rows are requests, the losses ignore it."""
    item: Column | None = None
    """Column of data.reserve_columns that identifies the item of a row (in_batch_softmax, coverage)."""
    item_frequency: Column | None = None
    """Column of data.reserve_columns with the number of occurrences of the row's item in the training data.
    in_batch_softmax then corrects scores, because frequent items appear in more batches."""


class RetrievalSection(Section):
    """Ranking of each evaluated row's right items among all items, for models with query and item vectors."""

    items: str
    """Folder or file of Parquet with one row per item: its key and the features of the item tower."""
    item: Column = "item"
    """Column of `items` that contains the item's key."""
    right_items: Column | None = None
    """Column of the evaluated rows with the key of the right (relevant) item, or with a list of the keys of all right
    items. null: the column `item`."""
    seen: list[Column] = Field(default_factory=list, max_length=20)
    """List columns of the evaluated rows, such as history, with the keys of items to exclude from the row's ranking.
    Right items are never excluded."""
    at: list[SmallCount] = Field([10], min_length=1, max_length=20)
    """Cutoffs k of hit rate, recall, NDCG and MAP."""

    @property
    def right_column(self) -> str:
        """Return the column of evaluated rows that contains the right items."""
        return self.right_items or self.item


class EvalSection(Section):
    """Slices, memory limit and item ranking of evaluations."""

    slices: list[str] = Field(default_factory=list, max_length=20)
    """Columns of data.reserve_columns with few values, such as country. Rows, AUC and calibration of each
    task are reported for the 10 largest and the 10 worst values."""
    max_exact_rows: PositiveInt = 2_000_000
    """Maximum number of rows of an evaluation that a worker keeps in memory for rank-based and grouped metrics. Beyond
    this number, areas under curves are computed from bins, with a bound on their error, and grouped rows are
    written to temporary files."""
    retrieval: RetrievalSection | None = None
    """Rank each evaluated row's right items among all items (items, item, right_items, seen, at); null: no
    ranking."""
