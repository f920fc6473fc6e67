"""Resolve each table's optimizer and plan constraints, and find the folder for tables in files (fused_mmap).

planning/validation.py checks the constraints against the number of ranks, the device and the memory.
This module does not import torch, because the driver uses it before any worker starts.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import psutil

from raytrec.common.errors import ConfigError, format_suggestion
from raytrec.common.storage import make_relative, quote_for_shell
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import EmbeddingOptim

# Sharding types of TorchRec (1.8.0) for tables that produce one vector per id.
BY_ID_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
# For tables that produce sums of bags: ranks hold parts of each sum, which a reduce-scatter adds up.
REDUCE_SCATTER_TYPES = ("row_wise", "table_row_wise", "grid_shard")
HOST_SHARDING_TYPES = ("table_row_wise", "table_column_wise", "grid_shard")  # assigned host by host
COLUMN_SHARDED_TYPES = ("column_wise", "table_column_wise", "grid_shard")
NO_REDUCTION_TYPES = ("table_wise", "column_wise", "table_column_wise", "data_parallel")
# Reason for rejecting sharding types that are not in BY_ID_TYPES or NO_REDUCTION_TYPES, and the expected settings.
BY_ID_REASON = (
    "cannot be used for a table of candidates, or of a sequence that the model reads id by id",
    f"one of {', '.join(BY_ID_TYPES)}, the only sharding types that TorchRec supports for such a table",
)
INT8_REASON = (
    "cannot be used with plan.qcomms int8: ranks cannot add up integers of different scales in transfer",
    f"fp32, fp16 or bf16 in plan.qcomms, or one of the sharding types {', '.join(NO_REDUCTION_TYPES)}",
)


@dataclass(frozen=True)
class TableConstraint:
    """Constraints on the plan of one table.

    Attributes:
        sharding: Allowed sharding types.
        ranks: Ranks that must hold the table, in the order of its shards, or None if the planner chooses them.
        kernel: Compute kernel (plan.tables.*.compute_kernel), or None if the planner chooses it.
        dtype: Dtype of the weights: fp32 or fp16.
        group: Index of the table's plan.colocate group, or None if it is in no group.
    """

    sharding: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    kernel: str | None = None
    dtype: str = "fp32"
    group: int | None = None


def match_tables(pattern: str, schema: Schema, where: str) -> list[str]:
    """Return the names of the schema's tables that match a name or a pattern such as 'item*'.

    Raises:
        ConfigError: No table matches. The error names `where`, the configuration key that contains the pattern.
    """
    tables = [table for table in schema.tables if fnmatchcase(table, pattern)]
    if not tables:
        raise ConfigError(
            f"no table matches '{pattern}'{format_suggestion(pattern, schema.tables)}",
            where=where,
            expected=f"one of {', '.join(schema.tables)}, or a pattern that matches a table",
        )
    return tables


def resolve_optimizers(config: RunConfig, schema: Schema) -> dict[str, EmbeddingOptim]:
    """Return table → optimizer: optim.embeddings, overridden by the matching keys of optim.tables in order.

    Raises:
        ConfigError: No table matches a key of optim.tables.
    """
    default = config.optim.embeddings.model_dump()
    values = {table: dict(default) for table in schema.tables}
    for pattern, overrides in config.optim.tables.items():
        for table in match_tables(pattern, schema, f"optim.tables.{pattern}"):
            values[table] |= overrides.model_dump(exclude_none=True)
    return {table: EmbeddingOptim(**settings) for table, settings in values.items()}


def resolve_constraints(config: RunConfig, schema: Schema) -> dict[str, TableConstraint]:
    """Return table → constraint from plan.tables, plan.colocate and plan.sharding_types, in the schema's order.

    For tables that return one vector per id, only BY_ID_TYPES are kept. With int8 in plan.qcomms, only
    NO_REDUCTION_TYPES are kept for all other tables.

    Raises:
        ConfigError: No table matches a name in plan.tables or plan.colocate, the settings of a table are incomplete
            or contradictory, or the table supports none of its sharding types.
    """
    constraints: dict[str, dict] = {table: {} for table in schema.tables}
    for pattern, settings in config.plan.tables.items():
        for table in match_tables(pattern, schema, f"plan.tables.{pattern}"):
            constraints[table] |= settings.model_dump(exclude_none=True)
    groups, by_id = _index_groups(config, schema), resolve_features(schema, config.model).tables_by_id
    resolved = {}
    for table, values in constraints.items():
        ranks = tuple(values["ranks"]) if "ranks" in values else None
        sharding = values.get("sharding_type")
        if table in groups or (sharding is None and ranks and len(ranks) == 1):
            sharding = sharding or "table_wise"
        if ranks and sharding is None:
            what = f"ranks {list(ranks)} are set without a sharding_type"
            raise make_plan_error(table, what, f"plan.tables.{table}.sharding_type in addition to ranks")
        allowed: tuple[str, ...] = (sharding,) if sharding else tuple(config.plan.sharding_types)
        if table in by_id:
            allowed = _filter_sharding_types(table, allowed, BY_ID_TYPES, *BY_ID_REASON)
        elif config.plan.qcomms.has_int8:
            allowed = _filter_sharding_types(table, allowed, NO_REDUCTION_TYPES, *INT8_REASON)
        kernel, dtype = values.get("compute_kernel"), values.get("dtype", "fp32")
        resolved[table] = TableConstraint(allowed, ranks, kernel, dtype, groups.get(table))
        if table in groups and sharding != "table_wise":
            raise make_plan_error(
                table, f"plan.colocate does not allow {sharding}", "table_wise, the only type allowed"
            )
    return _copy_group_ranks(resolved)


def _filter_sharding_types(
    table: str, sharding: tuple[str, ...], supported: tuple[str, ...], why: str, expected: str
) -> tuple[str, ...]:
    """Return the sharding types of a table that are in `supported`, or raise ConfigError if there are none."""
    possible = tuple(kind for kind in sharding if kind in supported)
    if not possible:
        raise make_plan_error(table, f"{' or '.join(sharding)} {why}", expected)
    return possible


def _index_groups(config: RunConfig, schema: Schema) -> dict[str, int]:
    groups: dict[str, int] = {}
    for index, names in enumerate(config.plan.colocate):
        for name in names:
            for table in match_tables(name, schema, f"plan.colocate, group {index + 1}"):
                if (first := groups.setdefault(table, index)) != index:
                    what = f"the table is in groups {first + 1} and {index + 1} of plan.colocate"
                    raise make_plan_error(table, what, "each table in at most one group")
    return groups


def _copy_group_ranks(constraints: dict[str, TableConstraint]) -> dict[str, TableConstraint]:
    """Copy the ranks configured for a table to its whole group; raise ConfigError if these differ within a group."""
    ranks_of: dict[int, tuple[int, ...]] = {}
    for table, constraint in constraints.items():
        if constraint.group is None or not constraint.ranks:
            continue
        ranks = ranks_of.setdefault(constraint.group, constraint.ranks)
        if ranks != constraint.ranks:
            raise make_plan_error(
                table,
                f"plan.tables assigns the table to ranks {list(constraint.ranks)}, but another table of its "
                f"plan.colocate group to ranks {list(ranks)}",
                "one rank for all tables of a group",
            )
    return {
        table: replace(constraint, ranks=constraint.ranks or ranks_of.get(constraint.group))
        for table, constraint in constraints.items()
    }


def count_column_shards(
    dim: int, sharding: tuple[str, ...], ranks: tuple[int, ...] | None, world: int, local: int
) -> int:
    """Return the number of column shards of a table, or 1 if no allowed sharding type cuts columns.

    There is one column shard per eligible rank (grid_shard: per host of these ranks), or fewer if the shards
    would otherwise not have equal widths that are multiples of 4, as FBGEMM requires. If several allowed types cut
    columns, grid_shard precedes table_column_wise, and both precede column_wise. `dim` is the number of the table's
    columns, `ranks` are its configured ranks (None: any), and `local` is the number of ranks per host.
    """
    if "grid_shard" in sharding:
        max_parts = max(1, (len(ranks) if ranks else world) // local)
    elif "table_column_wise" in sharding:
        max_parts = len(ranks) if ranks else local
    elif "column_wise" in sharding:
        max_parts = len(ranks) if ranks else world
    else:
        return 1
    return next(parts for parts in range(max_parts, 0, -1) if (dim // 4) % parts == 0)


def make_plan_error(table: str, what: str, expected: str) -> ConfigError:
    """Return the error for a table (or comma-separated tables) whose constraints no plan can satisfy."""
    return ConfigError(f"cannot plan table{'s' * (', ' in table)} {table}: {what}", where="plan", expected=expected)


UVM_KERNELS = ("fused_uvm", "fused_uvm_caching")
CACHING_KERNEL = UVM_KERNELS[1]
MMAP_KERNEL = "fused_mmap"
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


def resolve_kernel(device: str, kernel: str | None) -> str | None:
    """Return the compute kernel if it stores a table outside the device's memory, else None.

    UVM kernels store tables in host memory. On CPU, this is the device's memory, so the result for them is None.

    Args:
        device: cpu or cuda.
        kernel: Configured compute kernel, or None.
    """
    kernels = (*UVM_KERNELS, MMAP_KERNEL) if device == "cuda" else (MMAP_KERNEL,)
    return kernel if kernel in kernels else None


def list_kernel_choices(config: RunConfig, device: str, managed: bool) -> list[str]:
    """Return the compute kernels, except fused_mmap, from which the planner may choose if a table does not set one.

    On CPU, fused is the only choice. On GPUs, the choices are plan.compute_kernels; the result can be empty.

    Args:
        config: Configuration of the run.
        device: cpu or cuda.
        managed: True if the table has managed ids. Caching is then excluded: initial values of new ids are
            written to the rows, and a cached row would keep the previous id's values.
    """
    if device == "cpu":
        return ["fused"]
    excluded = {MMAP_KERNEL, CACHING_KERNEL} if managed else {MMAP_KERNEL}
    return [kernel for kernel in config.plan.compute_kernels if kernel not in excluded]


def find_mmap_folder(config: RunConfig) -> Path:
    """Return the folder in which tables with compute_kernel fused_mmap are stored as unnamed files.

    The folder is plan.mmap_dir, or else run.dir, or else the system's temporary folder. If the folder does not
    exist, the result is its nearest existing parent, which is on the same disk.
    """
    folder = Path(config.plan.mmap_dir or config.run.dir or tempfile.gettempdir()).absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def measure_free_disk(config: RunConfig) -> int:
    """Return the number of free bytes on the disk of `find_mmap_folder`; raise OSError if the disk does not respond."""
    return shutil.disk_usage(find_mmap_folder(config)).free


def advise_disk_space(config: RunConfig, is_full: bool = True) -> str:
    """Return advice for a folder that cannot hold table files: free up space if `is_full`, or set plan.mmap_dir.

    If the run folder already contains a run, the advice includes the command that resumes the run.
    """
    other = "set plan.mmap_dir to a writable folder on a local disk"
    do = "free up space, or set plan.mmap_dir to a folder on another disk" if is_full else other
    run = Path(config.run.dir or "")
    resume = f"; then resume: raytrec train --resume {quote_for_shell(make_relative(run))}, or submit the job again"
    return do + resume * bool(config.run.dir and (run / "config.yaml").is_file())


def find_memory_filesystem(folder: Path) -> str | None:
    """Return the type of a folder's file system, such as tmpfs, if it keeps files in memory, else None."""
    kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    place = folder.resolve()
    kind = next((kinds[str(each)] for each in (place, *place.parents) if str(each) in kinds), None)
    return kind if kind in MEMORY_FILESYSTEMS else None
