"""What tables take of memory and disk, with their optimizer state. No torch here, for the driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.embeddings.constraints import (
    CACHING_KERNEL,
    MMAP_KERNEL,
    UVM_KERNELS,
    TableConstraint,
    kernel_on,
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
    """What a table takes, or a part of it: weights, optimizer state and cache.

    Of a device; with a UVM kernel on a GPU also of its host's memory, with fused_mmap on CPU of its disk.

    Args:
        kernel: of `kernel_on`.
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
    """The sum of at least one."""
    return Footprint(*map(sum, zip(*sizes, strict=True)))


def footprint(table: Table, dtype: str, optimizer: str, kernel: str | None = None) -> Footprint:
    """The sum of `parts_of`."""
    return added(parts_of(table, dtype, optimizer, kernel).values())


def footprints(
    config: RunConfig, schema: Schema, constraints: Constraints, device: str
) -> dict[str, Footprint]:
    """Table → the bytes that it takes with its optimizer state, of each table with a constraint.

    Args:
        device: that ranks train on, cpu or cuda.
    """
    optimizers = table_optimizers(config, schema)
    return {
        table: footprint(
            schema.tables[table],
            constraint.dtype,
            optimizers[table].name,
            kernel_on(device, constraint.kernel),
        )
        for table, constraint in constraints.items()
    }


def map_share(schema: Schema, world: int) -> int:
    """Bytes of each rank's device, in addition to its tables, for the maps of managed ids: of every map each
    rank has an equal part, wherever the table's rows are.

    Args:
        world: number of ranks.
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
