"""Memory and disk of tables with their optimizer state, and the tables that go to files on CPU.

TorchRec, which weighs a GPU's memory against its host's, has no files. No torch here, for the driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import bytes_text
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.config.tables import EmbeddingOptim
from raytrec.embeddings.constraints import (
    CACHING_KERNEL,
    MMAP_KERNEL,
    UVM_KERNELS,
    TableConstraint,
    kernel_on,
    make_room,
    memory_filesystem,
    mmap_folder,
    resolve_constraints,
    table_optimizers,
)
from raytrec.embeddings.optimizers import optimizer_of

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

GIB = 1024**3
DTYPE_BYTES = {"fp32": 4, "fp16": 2}
# Bytes in a map of managed ids (embeddings/managed/key_map.py), six in ten slots of which are used: of a row
# (key, sightings, last step, row), and of an id that waits for one.
ID_BYTES, WAITING_BYTES = 41, 35
HOST_RESERVE = 0.15  # of the host memory of GPUs, for processes; TorchRec keeps as much of a GPU
CACHED = 0.2  # of a table's rows, in the GPU's cache of fused_uvm_caching: FBGEMM's default (1.8.0)
TIERS = ("device", "host", "disk")  # of memory
WEIGHTS, STATE, CACHE = "weights", "optimizer state", "cache"
Constraints = dict[str, TableConstraint]


class Footprint(NamedTuple):
    """Bytes of a table, or of a part of it: weights, optimizer state, cache."""

    device: int
    host: int
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


def parts_of(table: Table, dtype: str, optimizer: str, kernel: str | None = None) -> dict[str, Footprint]:
    """Return the bytes of a table, or of a part of it: weights, optimizer state and cache.

    They are on the device; with a UVM kernel on a GPU also in host memory, with fused_mmap on CPU on disk.

    Args:
        kernel: Kernel as the device has it (`kernel_on`).
    """
    values, width, optimizer_ = table.rows * table.dim, DTYPE_BYTES[dtype], optimizer_of(optimizer)
    weights, state = values * width, values * optimizer_.bytes_per("value")
    row_state = table.rows * optimizer_.bytes_per("row")
    if kernel == MMAP_KERNEL:
        return {WEIGHTS: Footprint(0, 0, weights), STATE: Footprint(0, 0, state + row_state)}
    if kernel not in UVM_KERNELS:
        return {WEIGHTS: Footprint(weights, 0), STATE: Footprint(state + row_state, 0)}
    # FBGEMM (1.8.0, construct_split_state) keeps state of one value a row on the GPU, and for the cache 4
    # bytes a row and 16 a slot in addition to the slots' weights.
    cache = table.rows * (4 + CACHED * (16 + table.dim * width)) if kernel == CACHING_KERNEL else 0
    return {
        WEIGHTS: Footprint(0, weights),
        STATE: Footprint(row_state, state),
        CACHE: Footprint(int(cache), 0),
    }


def added(sizes: Iterable[Footprint]) -> Footprint:
    """Return the sum of at least one footprint."""
    return Footprint(*map(sum, zip(*sizes, strict=True)))


def footprints(
    config: RunConfig, schema: Schema, constraints: Constraints, device: str
) -> dict[str, Footprint]:
    """Return the bytes of each table with a constraint, with its optimizer state.

    Args:
        device: Device that ranks train on, cpu or cuda.
    """
    optimizers = table_optimizers(config, schema)
    return {
        table: added(
            parts_of(
                schema.tables[table], each.dtype, optimizers[table].name, kernel_on(device, each.kernel)
            ).values()
        )
        for table, each in constraints.items()
    }


def map_share(schema: Schema, world: int) -> int:
    """Return the bytes of each rank's device for its equal part of the maps of managed ids.

    Args:
        world: Number of ranks.
    """
    of_tables = (
        table.rows * (ID_BYTES + (WAITING_BYTES if table.ids.admit_after > 1 else 0))
        for table in schema.tables.values()
        if table.ids
    )
    return -(-sum(of_tables) // world)


@dataclass(frozen=True)
class PlannedTable:
    """The plan of one table.

    Attributes:
        ranks: that hold a part of it.
        shards: (rank, rows, columns) of each.
        dtype: fp32 or fp16.
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
class Held:
    """What a rank holds of a table.

    Attributes:
        rows: that it has a part of.
        parts: weights, optimizer state, cache → bytes.
    """

    rows: int
    parts: dict[str, Footprint]

    @property
    def size(self) -> Footprint:
        """All parts together."""
        return added(self.parts.values())


def planned(plan: ShardingPlan, config: RunConfig, schema: Schema, world: int) -> list[PlannedTable]:
    """The tables of a plan for `world` ranks."""
    constraints, out = resolve_constraints(config, schema), []
    for name, spec in (item for module in plan.plan.values() for item in sorted(module.items())):
        rows, dim = schema.tables[name].rows, schema.tables[name].dim
        shards = [(rank, rows, dim) for rank in range(world)]  # every rank has all of it
        if spec.sharding_spec:
            shards = [(s.placement.rank(), *s.shard_sizes) for s in spec.sharding_spec.shards]
        kinds, ranks = (spec.sharding_type, spec.compute_kernel), sorted({rank for rank, _, _ in shards})
        out.append(PlannedTable(name, rows, dim, *kinds, ranks, shards, constraints[name].dtype))
    return out


def held(
    tables: Sequence[PlannedTable], config: RunConfig, schema: Schema, device: str | None = None
) -> dict[tuple[str, int], Held]:
    """(table, rank) → what the rank holds of it.

    Args:
        device: cpu or cuda; default: of scaling.device, GPUs where that is auto.
    """
    device = device or ("cpu" if config.scaling.device == "cpu" else "cuda")
    optimizers = table_optimizers(config, schema)
    out: dict[tuple[str, int], Held] = {}
    for table in tables:
        its = table.dtype, optimizers[table.table].name, kernel_on(device, table.compute_kernel)
        for rank, rows, dim in table.shards:
            sizes = parts_of(Table.model_construct(rows=rows, dim=dim), *its)
            if before := out.get((table.table, rank)):
                sizes = {part: added([size, before.parts[part]]) for part, size in sizes.items()}
            out[table.table, rank] = Held(rows, sizes)
    return out


def without_saves(config: RunConfig) -> RunConfig:
    """Return the configuration without room for the copies from which checkpoints are written."""
    return config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"async_save": False})}
    )


def without_training(config: RunConfig) -> RunConfig:
    """Return the configuration without these copies and without optimizer state of tables."""
    optim = config.optim.model_copy(update={"embeddings": EmbeddingOptim(name="sgd"), "tables": {}})
    return without_saves(config).model_copy(update={"optim": optim})


def host_room(
    config: RunConfig, schema: Schema, constraints: Constraints, world: int, host_share: int
) -> int:
    """Return the bytes of host memory that each rank on a GPU may fill with tables (UVM kernels).

    It is the rank's share less a reserve, rows read ahead and, with checkpoint.async_save, the copies from
    which checkpoints are written: of these tables, and of its part of the tables on GPUs.

    Args:
        host_share: Bytes of main memory of each rank.
    """
    room = (1 - HOST_RESERVE) * host_share - config.data.buffer_gib * GIB
    if config.checkpoint.async_save:
        sizes = footprints(config, schema, constraints, "cuda")
        room = (room - sum(size.device for size in sizes.values() if not size.host) / world) / 2
    return max(0, int(room))


def memory_for_copies(
    config: RunConfig, schema: Schema, constraints: Constraints, world: int
) -> tuple[float, float]:
    """Return the bytes of main memory of each rank on a GPU: of page-locked copies of its tables, from which
    checkpoints are written, and of rows read ahead."""
    sizes = footprints(config, schema, constraints, "cuda").values()
    return sum(size.device for size in sizes) / world, config.data.buffer_gib * GIB


def move_to_files(
    constraints: Constraints, schema: Schema, config: RunConfig, memory: int
) -> Iterator[Constraints]:
    """Yield constraints for CPU with more and more tables in files; the first with a plan is to be used.

    Only tables without settings that forbid it move, if plan.compute_kernels allows files. Tables with the
    fewest lookups for their bytes go first: a file is slow at lookups. The first constraints have as few in
    files as memory holds the rest of; if ranks cannot share that, twice as many are tried.

    Args:
        memory: Bytes for tables of all ranks together.
    """
    optimizers, features = table_optimizers(config, schema), Counter(f.table for f in schema.sparse.values())
    movable = [
        table
        for table, constraint in constraints.items()
        if MMAP_KERNEL in config.plan.compute_kernels
        and constraint.kernel is None
        and set(constraint.sharding) - {"data_parallel"}
        and "cpu" in optimizer_of(optimizers[table].name).devices
    ]
    movable.sort(key=lambda table: (features[table] / schema.tables[table].rows, table))
    sizes = {table: size.device for table, size in footprints(config, schema, constraints, "cpu").items()}
    left, count = sum(sizes.values()), 0 if "fused" in config.plan.compute_kernels else len(movable)
    while count < len(movable) and left - sum(sizes[table] for table in movable[:count]) > memory:
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
    """Check that the disk holds the tables that have to be in files on CPU.

    Args:
        memory: Bytes of memory for tables of all ranks together.
        free: Bytes of disk for tables of all ranks together.

    Raises:
        ConfigError: The disk is too small, or the folder is itself in memory.
    """
    chosen = next(move_to_files(constraints, schema, config, memory))
    found = footprints(config, schema, chosen, "cpu")
    sizes = {table: size.disk for table, size in found.items() if size.disk}
    need, folder = sum(sizes.values()), mmap_folder(config)
    kind = memory_filesystem(folder) if sizes else None
    if kind is None and need <= free:
        return
    why = f"it is on {kind}, in memory itself" if kind else f"{bytes_text(free)} are free there"
    raise ConfigError(
        f"tables {', '.join(sizes)} take {bytes_text(need)} of disk, with optimizer state, and {why}",
        where=f"plan.mmap_dir, {folder}",
        expected="a folder on a disk with room for them, and for checkpoints if those go there, too",
        do=make_room(config),
    )
