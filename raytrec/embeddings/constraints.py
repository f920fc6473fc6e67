"""Each table's optimizer and constraints of its plan, as configured. Checked in validation.py.

No torch here: the driver asks before any worker starts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from raytrec.common.errors import ConfigError, hint
from raytrec.common.storage import in_shell, relative
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import EmbeddingOptim

# What TorchRec (1.8.0) has for tables that give the vector of each id.
BY_ID_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
# Of tables that give sums of bags: ranks hold parts of each sum, which a reduce-scatter adds up.
SUMMED_TYPES = ("row_wise", "table_row_wise", "grid_shard")
COLUMN_TYPES = ("column_wise", "table_column_wise", "grid_shard")
WHOLE_TYPES = ("table_wise", "column_wise", "table_column_wise", "data_parallel")
# Why other ways are refused, and what is expected.
OF_SEQUENCES = (
    "of a table with a sequence that the model reads id by id",
    f"one of {', '.join(BY_ID_TYPES)}: TorchRec shards such a table in no other way",
)
WITH_INT8 = (
    "with plan.qcomms int8: integers of different scales cannot be added up on their way between ranks",
    "fp16 or bf16; or table_wise, column_wise, table_column_wise or data_parallel",
)


@dataclass(frozen=True)
class TableConstraint:
    """What the plan of one table must keep to.

    Attributes:
        sharding: the ways of sharding that are allowed.
        ranks: the ranks that must hold it, in the order of its shards; None: as planned.
        kernel: the compute kernel; None: as planned.
        dtype: fp32 or fp16.
        group: index of the plan.colocate group that it belongs to, or None.
    """

    sharding: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    kernel: str | None = None
    dtype: str = "fp32"
    group: int | None = None


def matching_tables(pattern: str, schema: Schema, where: str) -> list[str]:
    """The tables that a name or a pattern such as 'item*' means.

    Raises:
        ConfigError: there are none; its place is `where`.
    """
    tables = [table for table in schema.tables if fnmatchcase(table, pattern)]
    if not tables:
        raise ConfigError(
            f"no table is named, or matches, '{pattern}'{hint(pattern, schema.tables)}",
            where=where,
            expected=f"one of {', '.join(schema.tables)}",
        )
    return tables


def table_optimizers(config: RunConfig, schema: Schema) -> dict[str, EmbeddingOptim]:
    """Table → its optimizer: optim.embeddings, with what the lines of optim.tables that match it override.

    Raises:
        ConfigError: a line that no table matches.
    """
    default = config.optim.embeddings.model_dump()
    values = {table: dict(default) for table in schema.tables}
    for pattern, given in config.optim.tables.items():
        for table in matching_tables(pattern, schema, f"optim.tables.{pattern}"):
            values[table] |= given.model_dump(exclude_none=True)
    return {table: EmbeddingOptim(**of_table) for table, of_table in values.items()}


def resolve_constraints(config: RunConfig, schema: Schema) -> dict[str, TableConstraint]:
    """The constraint of every table of the schema, in its order.

    Raises:
        ConfigError: names that no table has, and settings that contradict each other.
    """
    constraints: dict[str, dict] = {table: {} for table in schema.tables}
    for pattern, given in config.plan.tables.items():
        for table in matching_tables(pattern, schema, f"plan.tables.{pattern}"):
            constraints[table] |= given.model_dump(exclude_none=True)
    groups, by_id = _groups(config, schema), resolve_features(schema, config.model).tables_by_id
    out = {}
    for table, values in constraints.items():
        ranks = tuple(values["ranks"]) if "ranks" in values else None
        sharding = values.get("sharding_type")
        if table in groups or (sharding is None and ranks and len(ranks) == 1):
            sharding = sharding or "table_wise"
        if ranks and sharding is None:
            what = f"ranks {list(ranks)} without a sharding_type"
            raise refused(table, what, "plan.tables.….sharding_type in addition to ranks")
        allowed: tuple[str, ...] = (sharding,) if sharding else tuple(config.plan.sharding_types)
        if table in by_id:
            allowed = _possible(table, allowed, BY_ID_TYPES, *OF_SEQUENCES)
        elif config.plan.qcomms.has_int8:
            allowed = _possible(table, allowed, WHOLE_TYPES, *WITH_INT8)
        kernel, dtype = values.get("compute_kernel"), values.get("dtype", "fp32")
        out[table] = TableConstraint(allowed, ranks, kernel, dtype, groups.get(table))
        if table in groups and sharding != "table_wise":
            raise refused(table, f"in plan.colocate and {sharding}", "a group is on one rank: table_wise")
    return _with_group_ranks(out)


def _possible(
    table: str, sharding: tuple[str, ...], kinds: tuple[str, ...], why: str, expected: str
) -> tuple[str, ...]:
    """Those ways of sharding that are among `kinds`.

    Raises:
        ConfigError: none.
    """
    possible = tuple(kind for kind in sharding if kind in kinds)
    if not possible:
        raise refused(table, f"{' or '.join(sharding)} {why}", expected)
    return possible


def _groups(config: RunConfig, schema: Schema) -> dict[str, int]:
    groups: dict[str, int] = {}
    for index, names in enumerate(config.plan.colocate):
        for name in names:
            for table in matching_tables(name, schema, f"plan.colocate, group {index + 1}"):
                if groups.setdefault(table, index) != index:
                    raise refused(table, "in two groups of plan.colocate", "join the groups")
    return groups


def _with_group_ranks(constraints: dict[str, TableConstraint]) -> dict[str, TableConstraint]:
    """Where one table of a group has its rank given, the others follow."""
    ranks_of: dict[int, tuple[int, ...]] = {}
    for table, each in constraints.items():
        if each.group is None or not each.ranks:
            continue
        ranks = ranks_of.setdefault(each.group, each.ranks)
        if ranks != each.ranks:
            raise refused(
                table,
                f"on rank {each.ranks[0]}, and another of its plan.colocate group on {ranks[0]}",
                "a group is on one rank",
            )
    return {
        table: replace(each, ranks=each.ranks or ranks_of.get(each.group))
        for table, each in constraints.items()
    }


def column_parts(dim: int, sharding: tuple[str, ...], ranks: tuple[int, ...] | None, world: int, local: int):
    """Into how many column shards a table is cut under these ways of sharding (1: it is not).

    As many as there are ranks that can take one, as far as widths stay equal and multiples of 4 (FBGEMM).
    """
    if "grid_shard" in sharding:
        most = (len(ranks) if ranks else world) // local
    elif "table_column_wise" in sharding:
        most = len(ranks) if ranks else local
    elif "column_wise" in sharding:
        most = len(ranks) if ranks else world
    else:
        return 1
    return next(parts for parts in range(most, 0, -1) if (dim // 4) % parts == 0)


def refused(table: str, what: str, expected: str) -> ConfigError:
    """A constraint that no plan can keep to."""
    return ConfigError(f"no plan for table {table}: {what}", where="plan", expected=expected)


UVM_KERNELS = ("fused_uvm", "fused_uvm_caching")
CACHING_KERNEL = UVM_KERNELS[1]
MMAP_KERNEL = "fused_mmap"
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


def kernel_on(device: str, kernel: str | None) -> str | None:
    """A table's kernel as this device has it; None: the one that keeps all on the device, which on CPU, where
    there is no other memory, UVM kernels are, too.

    Args:
        device: cpu or cuda.
    """
    places = (*UVM_KERNELS, MMAP_KERNEL) if device == "cuda" else (MMAP_KERNEL,)
    return kernel if kernel in places else None


def kernels_to_choose(config: RunConfig, device: str, managed: bool) -> list[str]:
    """TorchRec's compute kernels that the planner may choose from on a device, where a table's is not set.

    Args:
        device: cpu or cuda.
        managed: of a table with managed ids, which has no cache: initial values of new ids are written to its
            rows, and a cached row would keep those of the id before.
    """
    if device == "cpu":
        return ["fused"]
    not_offered = {MMAP_KERNEL, CACHING_KERNEL} if managed else {MMAP_KERNEL}
    return [kernel for kernel in config.plan.compute_kernels if kernel not in not_offered]


def mmap_folder(config: RunConfig) -> Path:
    """Where this machine has these tables' files, which have no names: plan.mmap_dir, else the run folder.
    Where there is none of that name, the nearest folder above it, which is on the same disk."""
    folder = Path(config.plan.mmap_dir or config.run.dir or tempfile.gettempdir()).absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def free_disk(config: RunConfig) -> int:
    """Bytes that are free there."""
    return shutil.disk_usage(mmap_folder(config)).free


def make_room(config: RunConfig) -> str:
    """What to do about a disk without room for these tables; in a run that has begun, with --resume."""
    do, run = "make room, or set plan.mmap_dir to a folder on another disk", Path(config.run.dir or "")
    begun = config.run.dir and (run / "config.yaml").is_file()
    return f"{do}; then resume the run: raytrec train --resume {in_shell(relative(run))}" if begun else do


def memory_filesystem(folder: Path) -> str | None:
    """The type of the file system that a folder is on, if that keeps its files in memory; Linux only."""
    device = os.stat(folder).st_dev
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    of_device = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:  # ID PARENT MAJOR:MINOR ROOT PLACE OPTIONS … - TYPE SOURCE OPTIONS
        if line.split()[2] == of_device and (kind := line.partition(" - ")[2].split()[0]) in IN_MEMORY:
            return kind
    return None
