"""What ranks hold of a plan's tables, and how much memory that leaves for rows of tables in files."""

from __future__ import annotations

from torchrec.distributed.types import ShardingPlan

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.embeddings.hot_rows import PLACE_BYTES, ROW_BYTES
from raytrec.embeddings.planner.constraints import resolve_constraints, table_optimizers
from raytrec.embeddings.planner.footprint import GIB, Footprint, footprint, kernel_on, map_share

# Table → rank → rows that it holds a part of, and what that part takes.
Held = dict[str, dict[int, tuple[int, Footprint]]]


def held(plan: ShardingPlan, config: RunConfig, schema: Schema, device: str, world: int) -> Held:
    """What each rank holds of each table.

    Args:
        device: cpu or cuda. world: number of ranks.
    """
    constraints, optimizers = resolve_constraints(config, schema), table_optimizers(config, schema)
    out: Held = {}
    for module in plan.plan.values():
        for name, spec in module.items():
            table, kernel, of_ranks = schema.tables[name], kernel_on(device, spec.compute_kernel), {}
            shards = spec.sharding_spec.shards if spec.sharding_spec else None
            parts = (
                [(rank, table.rows, table.dim) for rank in range(world)]  # every rank has all of it
                if shards is None
                else [(shard.placement.rank(), *shard.shard_sizes) for shard in shards]
            )
            for rank, rows, dim in parts:
                part = Table.model_construct(rows=rows, dim=dim)
                size = footprint(part, constraints[name].dtype, optimizers[name].name, kernel)
                _, before = of_ranks.get(rank, (0, Footprint(0, 0)))
                of_ranks[rank] = rows, Footprint(*(a + b for a, b in zip(before, size, strict=True)))
            out[name] = of_ranks
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


def with_hot_rows(found: Held, shares: list[float]) -> Held:
    """The same, with what rows of tables in files take of memory.

    Args:
        shares: of `hot_shares`.
    """
    return {
        table: {
            rank: (rows, size._replace(device=size.device + _in_memory(rows, size, shares[rank])))
            for rank, (rows, size) in of_ranks.items()
        }
        for table, of_ranks in found.items()
    }


def _in_memory(rows: int, size: Footprint, share: float) -> int:
    return int(share * (size.disk + rows * PLACE_BYTES) + rows * ROW_BYTES) if size.disk and share else 0
