"""What ranks hold of a plan's tables, and how much memory that leaves for rows of tables in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.types import ShardingPlan

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.embeddings.hot_rows import PLACE_BYTES, ROW_BYTES
from raytrec.embeddings.planner.constraints import resolve_constraints, table_optimizers
from raytrec.embeddings.planner.footprint import GIB, Footprint, footprint, kernel_on, map_share

# Table → its kernel, and (rank, rows, columns) of each of its shards.
Shards = Mapping[str, tuple[str, Sequence[tuple[int, int, int]]]]
# Table → rank → rows that it holds a part of, and what that part takes.
Held = dict[str, dict[int, tuple[int, Footprint]]]


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


def shards_of(plan: ShardingPlan, schema: Schema, world: int) -> Shards:
    """The shards of a plan for `world` ranks."""
    out = {}
    for module in plan.plan.values():
        for name, spec in module.items():
            if spec.sharding_spec:
                parts = [(s.placement.rank(), *s.shard_sizes) for s in spec.sharding_spec.shards]
            else:  # every rank has all of it
                parts = [(rank, schema.tables[name].rows, schema.tables[name].dim) for rank in range(world)]
            out[name] = spec.compute_kernel, parts
    return out


def held(shards: Shards, config: RunConfig, schema: Schema, device: str) -> Held:
    """What each rank holds of each table.

    Args:
        device: cpu or cuda.
    """
    constraints, optimizers = resolve_constraints(config, schema), table_optimizers(config, schema)
    out: Held = {}
    for name, (kernel, parts) in shards.items():
        of_ranks = out[name] = {}
        for rank, rows, dim in parts:
            part = Table.model_construct(rows=rows, dim=dim)
            its = constraints[name].dtype, optimizers[name].name, kernel_on(device, kernel)
            _, before = of_ranks.get(rank, (0, Footprint(0, 0)))
            size = footprint(part, *its)
            of_ranks[rank] = rows, Footprint(*(a + b for a, b in zip(before, size, strict=True)))
    return out


def hot_shares(found: Held, config: RunConfig, schema: Schema, world: int) -> list[float]:
    """Of each rank, the share of rows of its tables in files that are in memory, too: as many as what
    plan.memory_gib leaves has room for. Without plan.memory_gib, which is to be more than a guess then, none.
    """
    if not config.plan.memory_gib:
        return [0.0] * world
    left = [config.plan.memory_gib * GIB - map_share(schema, world)] * world
    takes = [0] * world
    for of_ranks in found.values():
        for rank, (rows, size) in of_ranks.items():
            left[rank] -= size.device + (rows * ROW_BYTES if size.disk else 0)
            takes[rank] += size.disk + rows * PLACE_BYTES if size.disk else 0
    return [min(1.0, max(0.0, room / size)) if size else 0.0 for room, size in zip(left, takes, strict=True)]


def hot_bytes(found: Held, shares: list[float]) -> list[float]:
    """What rows of tables in files take of each rank's memory.

    Args:
        shares: of `hot_shares`.
    """
    out = [0.0] * len(shares)
    for of_ranks in found.values():
        for rank, (rows, size) in of_ranks.items():
            if size.disk and shares[rank]:
                out[rank] += shares[rank] * (size.disk + rows * PLACE_BYTES) + rows * ROW_BYTES
    return out
