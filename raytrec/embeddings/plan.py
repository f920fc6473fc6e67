"""Which rank holds which part of which table."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan

from raytrec.config import PlanSection
from raytrec.errors import ConfigError
from raytrec.schema import Schema

GIB = 1024**3
# Bytes per ms: orders of magnitude of main memory and of gloo. TorchRec's defaults describe GPUs with NVLink,
# where exchanging costs nothing, and would shard every table row-wise.
CPU_BANDWIDTHS = {
    "ddr_mem_bw": 20 * GIB / 1000,
    "intra_host_bw": 1 * GIB / 1000,
    "inter_host_bw": 1 * GIB / 1000,
}


class BagSharder(EmbeddingBagCollectionSharder):
    """Offers the sharding types of the configuration, each with one compute kernel.

    TorchRec's own sharder offers no row-wise sharding on CPU, although it runs there, and lets the planner
    choose dense kernels, whose tables the fused optimizers would not train.

    Args:
        sharding: allowed sharding types.
    """

    def __init__(self, sharding: list[str]):
        super().__init__()
        self._sharding = sharding

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(self._sharding)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["dense" if sharding_type == "data_parallel" else "fused"]


def make_plan(
    model: nn.Module,
    sharder: BagSharder,
    schema: Schema,
    config: PlanSection,
    device: torch.device,
    *,
    batch: int,
    fused: bool,
) -> ShardingPlan:
    """Rank 0 plans, every rank receives the plan; a collective.

    Args:
        batch: rows of one rank's batch, for the planner's cost model.
        fused: whether sharded tables are updated in backward (data-parallel tables never are).

    Raises:
        ConfigError: when the tables do not fit, or no allowed sharding type fits a table.
    """
    from torchrec.distributed.planner.types import PlannerError

    if device.type == "cuda":
        hardware = {"hbm_cap": torch.cuda.get_device_properties(device).total_memory}
    else:
        hardware = {"ddr_cap": _host_memory() // dist.get_world_size(), **CPU_BANDWIDTHS}
    # Column shards narrower than 128 must be allowed by name; FBGEMM needs multiples of 4.
    narrowest = 4 if "column_wise" in config.sharding else None
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type, **hardware),
        batch_size=batch,
        constraints={name: ParameterConstraints(min_partition=narrowest) for name in schema.tables},
        debug=False,
    )
    try:
        plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    except PlannerError as error:
        gib = sum(t.rows * t.dim * 4 for t in schema.tables.values()) / GIB
        raise ConfigError(
            f"no plan for {len(schema.tables)} tables ({gib:.2f} GiB of weights) on {dist.get_world_size()} "
            f"workers: {str(error).splitlines()[0]}",
            where="plan.sharding, scaling.workers",
            expected=f"tables that fit under {', '.join(config.sharding)}",
            do="add workers, allow row_wise, or make tables smaller",
        ) from None
    if not fused:
        # The planner (torchrec 1.8.0) refuses dense kernels for sharded tables, which run all the same.
        for spec in (spec for module in plan.plan.values() for spec in module.values()):
            spec.compute_kernel = "dense"
    return plan


def _host_memory() -> int:
    """Bytes of main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe(plan: ShardingPlan) -> list[dict]:
    """One entry for each table: {table, sharding, kernel, ranks}."""
    return [
        {"table": table, "sharding": spec.sharding_type, "kernel": spec.compute_kernel, "ranks": spec.ranks}
        for module in plan.plan.values()
        for table, spec in sorted(module.items())
    ]
