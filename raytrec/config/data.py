"""The sections `run`, `warm_start` and `data`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from raytrec.common.errors import some
from raytrec.common.storage import sibling
from raytrec.config.base import Few, Mark, Number, PositiveFloat, PositiveInt, Section
from raytrec.config.transforms import BUILT_IN, Transform

FREE = Mark.FREE  # of places: the contents of the data are compared instead
NAME = re.compile(r"\w[\w .,:+=@()-]{0,149}")


def name_like(text: str) -> str:
    """The name nearest to a text that a run can have."""
    name = re.sub(r"[^\w .,:+=@()-]", "_", text)[:100]
    return name if NAME.fullmatch(name) else f"_{name}"


def _a_name(name: str) -> str:
    """It becomes the name of a folder, and stands in logs and on terminals."""
    if not NAME.fullmatch(name) or name != name.strip() or len(name.encode()) > 200:
        raise ValueError(
            "run.name: a name is at most 150 letters, digits, spaces and . , : + = @ ( ) - _, beginning with "
            f"a letter, digit or _ (got {name[:60]!r}); run.dir sets where its folder is"
        )
    return name


class RunSection(Section):
    name: Annotated[Annotated[str, AfterValidator(_a_name)] | None, FREE, Mark.COMMON] = None
    """Name of the run: letters, digits, spaces and . , : + = @ ( ) - _; default: the config's name and the
    time."""
    dir: Annotated[str | None, FREE, Mark.COMMON] = None
    """The run folder: result, checkpoints, config; default: runs/NAME."""
    root: Annotated[str | None, FREE, Mark.COMMON] = None
    """Folder that relative paths of data and runs start at; default: RAYTREC_ROOT of the environment, which
    cluster nodes set, else the working directory."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    """Seeds initial weights, epoch order and dropout."""


class WarmStartSection(Section):
    """A new run that starts from an earlier run's weights."""

    from_: str | None = Field(None, alias="from")
    """A run or checkpoint folder whose weights training starts from."""
    optimizer: bool = False
    """Also take over the optimizers' state."""
    tables: dict[str, Literal["exact", "resize", "new", "drop"]] = Field(default_factory=dict)
    """What happens to changed tables (or patterns such as 'item*'). exact: an error. resize: keep the rows
    that both have, initialize further ones. new: initialize all. drop: ignore the checkpoint's table."""
    dense: Literal["exact", "matching"] = "exact"
    """matching: initialize dense parameters whose shape changed, instead of an error."""


Folders = str | Annotated[list[str], Field(min_length=1)]


def folders(value: Folders) -> list[str]:
    """One folder or several, as a list."""
    return [value] if isinstance(value, str) else value


def _each_once(names: list[str]) -> list[str]:
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"data.reserve_columns: column {some(min(twice))} is named twice")
    return names


ReservedColumns = Annotated[list[Annotated[str, Field(min_length=1)]], AfterValidator(_each_once)]


class PartitionRange(Section):
    from_: str | None = Field(None, alias="from")
    """First partition, such as date=2026-11-01; null: no bound."""
    to: str | None = None
    """Last partition, included, such as date=2026-11-07/hour=11; null: no bound."""


class DataSection(Section):
    train: Annotated[Folders, FREE]
    """Folder of Parquet files to train on (local, s3:// or gs://), or a list of folders."""
    partitions: PartitionRange = Field(default_factory=PartitionRange)
    """Partitions of data.train to train on, of folders such as date=2026-11-01/hour=07."""
    valid: Annotated[Folders | None, FREE, Mark.COMMON] = None
    """Evaluated every train.eval_every_steps."""
    test: Annotated[Folders | None, FREE, Mark.COMMON] = None
    """Evaluated at the end; default: data.valid."""
    schema_path: Annotated[str | None, FREE] = Field(None, alias="schema")
    """The schema.yaml; default: the one in the folder above data.train."""
    transforms: list[Transform] = Field(
        default_factory=list,
        description="What is applied to columns before the schema sees them: "
        f"{', '.join(BUILT_IN)}, or module:function.",
    )
    holdout: Annotated[Number, Field(gt=0, le=0.5)] | Literal["auto"] | None = None
    """Share of the rows of data.train that is held out of training and used as data.valid; ignored where
    data.valid is set. auto: a tenth, at most about 100,000 rows. null: none."""
    reserve_columns: ReservedColumns = Field(default_factory=list)
    """Columns that go along with rows untouched: groups and items of tasks, slices of evaluations, keys of
    predictions. Any type with one value a row; also those of folders key=value."""
    global_batch_size: Annotated[PositiveInt, Field(lt=2**31)] = 2048
    """Rows per step over all workers together."""
    shuffle: Literal["none", "groups", "window"] = "window"
    """none: file order. groups: row groups in a new seeded order each epoch. window: also rows within a
    window of row groups."""
    window: Few = 2
    """Row groups of each lane whose rows are mixed by shuffle=window; large ones are split into pieces of
    20,000 rows."""
    lanes: Few = 24
    """Places of the data that each global batch is read from; also the maximum number of workers."""
    on_error: Literal["fail", "skip"] = "fail"
    """Rows that cannot be read or violate the schema: fail, or skip them. Skipped rows have no loss; they are
    counted (train.skipped_rows) and listed in skipped.jsonl."""
    drop_last: bool = False
    """Skip an epoch's last, smaller batch."""
    readers: Annotated[Few, FREE] = 1
    """Concurrent Ray Data read tasks for each worker."""
    read_on: Annotated[Literal["auto", "gpu_nodes", "cpu_nodes"], FREE] = "auto"
    """Where workers on GPUs have their rows read: auto: as many of the readers as they have CPUs for on nodes
    without GPUs, the others on the workers' nodes; or all on nodes of one kind."""
    buffer_gib: Annotated[PositiveFloat, FREE] = 0.5
    """GiB of rows read ahead for each worker, in Ray's object store."""

    @property
    def schema_uri(self) -> str:
        """Where the schema is: data.schema, or schema.yaml in the folder above (the first of) data.train."""
        return self.schema_path or sibling(folders(self.train)[0], "schema.yaml")
