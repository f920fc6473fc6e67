"""What ranks hold of a plan's tables, and how much memory that leaves for rows of tables in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.types import ShardingPlan

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
<<<<<<< HEAD:raytrec/planning/held.py
from raytrec.embeddings.constraints import resolve_constraints, table_optimizers
from raytrec.embeddings.hot_rows import PLACE_BYTES, ROW_BYTES
from raytrec.embeddings.kernels import kernel_on
from raytrec.planning.footprint import GIB, Footprint, added, map_share, parts_of
=======
from raytrec.embeddings.mapped import PLACE_BYTES, ROW_BYTES
from raytrec.embeddings.planner.constraints import resolve_constraints, table_optimizers
from raytrec.embeddings.planner.footprint import GIB, Footprint, added, kernel_on, map_share, parts_of
>>>>>>> house-step:raytrec/embeddings/planner/held.py


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


def hot_shares(
    found: Mapping[tuple[str, int], Held], config: RunConfig, schema: Schema, world: int
) -> list[float]:
    """Of each rank, the share of rows of its tables in files that are in memory, too: as many as what
    plan.memory_gib leaves has room for. Without plan.memory_gib, which is to be more than a guess then, none.
    """
    if not config.plan.memory_gib:
        return [0.0] * world
    left = [config.plan.memory_gib * GIB - map_share(schema, world)] * world
    takes = [0] * world
    for (_, rank), each in found.items():
        left[rank] -= each.size.device + (each.rows * ROW_BYTES if each.size.disk else 0)
        takes[rank] += each.size.disk + each.rows * PLACE_BYTES if each.size.disk else 0
    return [min(1.0, max(0.0, room / size)) if size else 0.0 for room, size in zip(left, takes, strict=True)]


def hot_bytes(found: Mapping[tuple[str, int], Held], shares: list[float]) -> list[float]:
    """What rows of tables in files take of each rank's memory.

    Args:
        shares: of `hot_shares`.
    """
    out = [0.0] * len(shares)
    for (_, rank), each in found.items():
        if each.size.disk and shares[rank]:
            out[rank] += shares[rank] * (each.size.disk + each.rows * PLACE_BYTES) + each.rows * ROW_BYTES
    return out
