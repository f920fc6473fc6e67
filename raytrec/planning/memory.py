"""Memory and disk use of tables with their optimizer state, and the choice of tables to keep in files on CPU.

TorchRec considers GPU memory and host memory but does not support files. This module does not import torch, so that
the driver can use it. Functions that take `config` and `schema` raise a ConfigError if a key of optim.tables matches
no table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import format_bytes
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.config.tables import EmbeddingOptim
from raytrec.embeddings.constraints import (
    CACHING_KERNEL,
    MMAP_KERNEL,
    UVM_KERNELS,
    TableConstraint,
    advise_disk_space,
    find_memory_filesystem,
    find_mmap_folder,
    resolve_constraints,
    resolve_kernel,
    resolve_optimizers,
)
from raytrec.embeddings.optimizers import find_optimizer

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

GIB = 1024**3
DTYPE_BYTES = {"fp32": 4, "fp16": 2}
# Bytes that a map of managed ids (embeddings/managed/key_map.py) takes with 60 % of its slots in use: per id with a row
# (key, sightings, last step, row), and per id that waits for a row.
ID_BYTES, WAITING_ID_BYTES = 41, 35
HOST_RESERVE_SHARE = 0.15  # share of a GPU host's memory reserved for processes
CACHED_ROWS_SHARE = 0.2  # share of a table's rows in the GPU cache of fused_uvm_caching: FBGEMM's default (1.8.0)
TIERS = ("device", "host", "disk")  # memory tiers
WEIGHTS, STATE, CACHE = "weights", "optimizer state", "cache"
Constraints = dict[str, TableConstraint]


class Footprint(NamedTuple):
    """Bytes of a table, or of one of its parts (weights, optimizer state, cache), in each memory tier."""

    device: int
    host: int
    disk: int = 0


def estimate_parts(table: Table, dtype: str, optimizer: str, kernel: str | None = None) -> dict[str, Footprint]:
    """Return part → bytes of a table or shard; parts are weights, optimizer state and, with UVM kernels, cache.

    The parts are on the device, with two exceptions. With a UVM kernel on a GPU, weights and per-value state are in
    host memory. With fused_mmap on CPU, all parts are on disk.

    Args:
        table: Table or shard; only rows and dim are read.
        dtype: Data type of the weights, fp32 or fp16.
        optimizer: Name of the optimizer.
        kernel: Kernel that stores parts elsewhere (result of `resolve_kernel`); None: all parts are on the device.
    """
    values, width, optimizer_ = table.rows * table.dim, DTYPE_BYTES[dtype], find_optimizer(optimizer)
    weights, state = values * width, values * optimizer_.count_state_bytes("value")
    row_state = table.rows * optimizer_.count_state_bytes("row")
    if kernel == MMAP_KERNEL:
        return {WEIGHTS: Footprint(0, 0, weights), STATE: Footprint(0, 0, state + row_state)}
    if kernel not in UVM_KERNELS:
        return {WEIGHTS: Footprint(weights, 0), STATE: Footprint(state + row_state, 0)}
    # FBGEMM (1.8.0, construct_split_state) keeps row-wise state on the GPU. The cache takes 4 bytes per row
    # and 16 bytes per slot in addition to the weights of the slots.
    cache = table.rows * (4 + CACHED_ROWS_SHARE * (16 + table.dim * width)) if kernel == CACHING_KERNEL else 0
    return {WEIGHTS: Footprint(0, weights), STATE: Footprint(row_state, state), CACHE: Footprint(int(cache), 0)}


def add_footprints(sizes: Iterable[Footprint]) -> Footprint:
    """Return the sum of one or more footprints."""
    return Footprint(*map(sum, zip(*sizes, strict=True)))


def estimate_footprints(
    config: RunConfig, schema: Schema, constraints: Constraints, device: str
) -> dict[str, Footprint]:
    """Return table → bytes with optimizer state; tables without a set kernel count as `device` (cpu or cuda) memory."""
    optimizers, sizes = resolve_optimizers(config, schema), {}
    for table, spec in constraints.items():
        kernel = resolve_kernel(device, spec.kernel)
        parts = estimate_parts(schema.tables[table], spec.dtype, optimizers[table].name, kernel)
        sizes[table] = add_footprints(parts.values())
    return sizes


def estimate_id_map_bytes(schema: Schema, world: int) -> int:
    """Return the bytes per rank of the maps of managed ids, which are divided equally among `world` ranks."""
    managed = [table for table in schema.tables.values() if table.ids]
    ids, waiting_ids = sum(t.rows for t in managed), sum(t.rows for t in managed if t.ids.admit_after > 1)
    return -(-(ids * ID_BYTES + waiting_ids * WAITING_ID_BYTES) // world)


@dataclass(frozen=True)
class PlannedTable:
    """Sharding of one table in a plan.

    Attributes:
        table: Name of the table, which has `rows` rows of `dim` columns.
        ranks: Ranks that hold a part of the table, in ascending order.
        shards: (rank, number of rows, number of columns) of each shard.
        dtype: Data type of the weights, fp32 or fp16.
    """

    table: str
    rows: int
    dim: int
    sharding_type: str
    compute_kernel: str
    ranks: list[int]
    shards: list[tuple[int, int, int]]
    dtype: str


@dataclass
class RankPart:
    """Part of a table that one rank holds.

    Attributes:
        rows: Number of rows that the rank holds, whole or in part.
        parts: Weights, optimizer state or cache → bytes.
    """

    rows: int
    parts: dict[str, Footprint]

    @property
    def size(self) -> Footprint:
        """Return the bytes of all parts together, in each memory tier."""
        return add_footprints(self.parts.values())


def list_planned_tables(plan: ShardingPlan, config: RunConfig, schema: Schema, world: int) -> list[PlannedTable]:
    """Return the sharding of each table in a plan for `world` ranks; raise errors as `resolve_constraints`."""
    constraints, out = resolve_constraints(config, schema), []
    for name, spec in (item for module in plan.plan.values() for item in sorted(module.items())):
        rows, dim = schema.tables[name].rows, schema.tables[name].dim
        shards = [(rank, rows, dim) for rank in range(world)]  # replicated: every rank has the whole table
        if spec.sharding_spec:
            shards = [(s.placement.rank(), *s.shard_sizes) for s in spec.sharding_spec.shards]
        sharding, ranks = (spec.sharding_type, spec.compute_kernel), sorted({rank for rank, _, _ in shards})
        out.append(PlannedTable(name, rows, dim, *sharding, ranks, shards, constraints[name].dtype))
    return out


def compute_rank_parts(
    tables: Sequence[PlannedTable], config: RunConfig, schema: Schema, device: str | None = None
) -> dict[tuple[str, int], RankPart]:
    """Return (table, rank) → the part of the table that the rank holds.

    `device` is cpu or cuda; the default follows scaling.device, where auto means GPUs.
    """
    device = device or ("cpu" if config.scaling.device == "cpu" else "cuda")
    optimizers = resolve_optimizers(config, schema)
    out: dict[tuple[str, int], RankPart] = {}
    for table in tables:
        storage_args = table.dtype, optimizers[table.table].name, resolve_kernel(device, table.compute_kernel)
        for rank, rows, dim in table.shards:
            sizes = estimate_parts(Table.model_construct(rows=rows, dim=dim), *storage_args)
            if previous := out.get((table.table, rank)):
                sizes = {part: add_footprints([size, previous.parts[part]]) for part, size in sizes.items()}
            out[table.table, rank] = RankPart(rows, sizes)
    return out


def disable_async_save(config: RunConfig) -> RunConfig:
    """Return the configuration without asynchronous saves, which need memory for copies of the tables."""
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"async_save": False})})


def exclude_training_memory(config: RunConfig) -> RunConfig:
    """Return the configuration with SGD, which has no state, for all tables, and without asynchronous saves."""
    optim = config.optim.model_copy(update={"embeddings": EmbeddingOptim(name="sgd"), "tables": {}})
    return disable_async_save(config).model_copy(update={"optim": optim})


def estimate_host_table_bytes(
    config: RunConfig, schema: Schema, constraints: Constraints, world: int, host_share: int
) -> int:
    """Return the bytes of host memory that each rank with a GPU may use for tables (UVM kernels).

    The result is the rank's `host_share` in bytes, less a reserve and the rows read ahead. With checkpoint.async_save,
    room is also reserved for copies of these tables and of the rank's part of tables on GPUs.
    """
    room = (1 - HOST_RESERVE_SHARE) * host_share - config.data.buffer_gib * GIB
    if config.checkpoint.async_save:
        sizes = estimate_footprints(config, schema, constraints, "cuda")
        room = (room - sum(size.device for size in sizes.values() if not size.host) / world) / 2
    return max(0, int(room))


def estimate_copy_bytes(config: RunConfig, schema: Schema, constraints: Constraints, world: int) -> tuple[float, float]:
    """Return (bytes of checkpoint copies, bytes of rows read ahead) in main memory for each GPU rank.

    With checkpoint.async_save, checkpoints are written from page-locked copies of the tables that are in GPU memory.
    """
    sizes = estimate_footprints(config, schema, constraints, "cuda").values()
    return sum(size.device for size in sizes) / world, config.data.buffer_gib * GIB


def move_to_files(constraints: Constraints, schema: Schema, config: RunConfig, memory: int) -> Iterator[Constraints]:
    """Yield constraints for CPU with an increasing number of tables in files, to be tried in this order.

    `memory` is the number of bytes for tables on all ranks together. A table can move if plan.compute_kernels contains
    fused_mmap, its compute_kernel is not set, it may be sharded other than data_parallel, and its optimizer has a fused
    kernel on CPU. Tables with the fewest lookups per row move first, because lookups in files are slow. At first, only
    as many tables move as needed for the other tables to fit into memory. Each further result moves twice as many. If
    plan.compute_kernels does not contain fused, all movable tables move at once.
    """
    optimizers, features = (resolve_optimizers(config, schema), Counter(f.table for f in schema.sparse.values()))
    movable = [
        table
        for table, constraint in constraints.items()
        if MMAP_KERNEL in config.plan.compute_kernels
        and constraint.kernel is None
        and set(constraint.sharding) - {"data_parallel"}
        and "cpu" in find_optimizer(optimizers[table].name).devices
    ]
    movable.sort(key=lambda table: (features[table] / schema.tables[table].rows, table))
    sizes = {table: size.device for table, size in estimate_footprints(config, schema, constraints, "cpu").items()}
    total_bytes, count = sum(sizes.values()), 0 if "fused" in config.plan.compute_kernels else len(movable)
    while count < len(movable) and total_bytes - sum(sizes[table] for table in movable[:count]) > memory:
        count += 1
    while True:
        in_files = {}
        for table in movable[:count]:
            kinds = tuple(kind for kind in constraints[table].sharding if kind != "data_parallel")
            in_files[table] = replace(constraints[table], kernel=MMAP_KERNEL, sharding=kinds)
        yield constraints | in_files
        if count == len(movable):
            return
        count = min(max(1, 2 * count), len(movable))


def check_disk(constraints: Constraints, schema: Schema, config: RunConfig, memory: int, free: int) -> None:
    """Check that the disk can hold the tables that must be in files on CPU.

    `memory` and `free` are the bytes of memory and disk for tables on all ranks together.

    Raises:
        ConfigError: The disk has too little free space, or the folder is on a file system in memory.
    """
    chosen = next(move_to_files(constraints, schema, config, memory))
    footprints = estimate_footprints(config, schema, chosen, "cpu")
    sizes = {table: size.disk for table, size in footprints.items() if size.disk}
    need, folder = sum(sizes.values()), find_mmap_folder(config)
    kind = find_memory_filesystem(folder) if sizes else None
    if kind is None and need <= free:
        return
    reason = f"the folder is on {kind}, which is in memory" if kind else f"only {format_bytes(free)} are free in total"
    raise ConfigError(
        f"{'tables' if len(sizes) > 1 else 'table'} {', '.join(sizes)} {'need' if len(sizes) > 1 else 'needs'} "
        f"{format_bytes(need)} of disk with optimizer state, but {reason}",
        where=f"{'plan.mmap_dir, ' if config.plan.mmap_dir else ''}{folder}",
        expected="a folder on a disk with enough space for these tables and for all checkpoints on this disk",
        do=advise_disk_space(config, is_full=kind is None),
    )
