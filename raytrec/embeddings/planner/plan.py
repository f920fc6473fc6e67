"""Which rank holds which part of which table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_sharding import USE_ONE_TBE_PER_TABLE
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.proposers import GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from raytrec.common.errors import ConfigError
from raytrec.compat.torch_ import rank_place
from raytrec.config.features import Features, resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import Sharding
from raytrec.embeddings.codecs import Codecs, make_codecs
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.embeddings.planner.constraints import (
    BY_ID_TYPES,
    TableConstraint,
    column_parts,
    table_optimizers,
)
from raytrec.embeddings.planner.footprint import (
    GIB,
    MMAP_KERNEL,
    UVM_KERNELS,
    disk_refusal,
    kernels_to_choose,
    map_share,
    move_to_files,
)
from raytrec.embeddings.planner.hosts import Hosts, agree_on_hosts, capacity
from raytrec.embeddings.planner.partitioner import ConstrainedPartitioner
from raytrec.embeddings.planner.search import Enumerator, GreedyProposer, narrow
from raytrec.embeddings.planner.validation import host_room, validate_constraints


class BagSharder(EmbeddingBagCollectionSharder):
    """Offers every way of sharding on every device, and the kernels that train under each.

    TorchRec's own sharder offers no row-wise sharding on CPU, although it runs there, and lets the planner
    choose dense kernels, whose tables the fused optimizers would not train. What a table may have of this is
    in its ParameterConstraints.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(get_args(Sharding))

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return _kernels(sharding_type)


class IdSharder(EmbeddingCollectionSharder):
    """The same for tables that give the vector of each id, which TorchRec shards in fewer ways.

    On CPU each of them has its own lookup (compat.fbgemm_lookups.FusedBagsOfOne).
    """

    def __init__(
        self, fused_params: dict[str, Any] | None, codecs: Codecs | None, device: str, distinct: bool
    ):
        super().__init__({**(fused_params or {}), USE_ONE_TBE_PER_TABLE: device == "cpu"}, codecs, distinct)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(BY_ID_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return _kernels(sharding_type)


def _kernels(sharding_type: str) -> list[str]:
    return ["dense"] if sharding_type == "data_parallel" else ["fused", "fused_uvm", "fused_uvm_caching"]


def sharders(
    fused_params: dict[str, Any] | None = None,
    codecs: Codecs | None = None,
    device: str = "cpu",
    distinct: bool = False,
) -> list[ModuleSharder]:
    """Of all collections of tables.

    Args:
        fused_params: FBGEMM's settings of kernels that update in backward.
        codecs: of what travels between ranks; default: as it is.
        device: cpu or cuda.
        distinct: whether ids that are read one by one are sent once, however often a batch has them.
    """
    return [BagSharder(fused_params, codecs), IdSharder(fused_params, codecs, device, distinct)]


def sharders_for_planning(config: RunConfig, schema: Schema, world: int) -> list[ModuleSharder]:
    """The same for the planner, which counts what is sent."""
    return sharders(codecs=make_codecs(config, [table.dim for table in schema.tables.values()], world))


def make_plan(
    model: nn.Module, sharders: list[ModuleSharder], schema: Schema, config: RunConfig, device: torch.device
) -> ShardingPlan:
    """Rank 0 plans, every rank receives the plan; a collective.

    Raises:
        ConfigError: a constraint that cannot be kept, tables that do not fit, or no allowed sharding type
            that fits a table.
    """
    hosts = agree_on_hosts(config, device)
    constraints, topology = validated(hosts, dist.get_world_size(), config, schema, device.type)
    # From the first rank, on every rank alike: TorchRec's collective_plan would leave the others waiting for
    # a plan that there is not.
    outcome: list = [None]
    if dist.get_rank() == 0:
        if device.type == "cpu":
            world, has = topology.world_size, topology.devices[0].storage
            outcome[0] = disk_refusal(constraints, schema, config, world * has.ddr, world * has.ssd)
        outcome[0] = outcome[0] or plan_for(topology, constraints, schema, config, model, sharders)
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], ConfigError):
        raise outcome[0]
    return name_devices(outcome[0], hosts.devices)


def validated(
    hosts: Hosts, world: int, config: RunConfig, schema: Schema, device: str
) -> tuple[dict[str, TableConstraint], Topology]:
    """The constraints of tables, which these hosts can meet, and what each rank there has for tables.

    Args:
        world: number of ranks.
        device: cpu or cuda.

    Raises:
        ConfigError: a constraint that cannot be met.
    """
    memory, local = hosts.memory - map_share(schema, world), hosts.ranks_per_host
    known = {"ranks_per_host": local, "memory": memory, "host_share": hosts.host_share}
    constraints = validate_constraints(config, schema, device, world=world, **known)
    room = host_room(config, schema, constraints, world, hosts.host_share)
    sizes = capacity(hosts, device, memory, room)
    return constraints, Topology(world_size=world, local_world_size=local, compute_device=device, **sizes)


def name_devices(plan: ShardingPlan, devices: Sequence[str]) -> ShardingPlan:
    """The same plan, in which shards are on the devices that the ranks have.

    The planner (torchrec 1.8.0, planner/utils.py) takes rank % ranks_per_host for the number of a rank's GPU,
    which is another one where hosts hold different numbers of ranks or share their GPUs in another order; and
    shards whose tensors are not on their plan's devices are an error.

    Args:
        devices: each rank's, as its own process names it: cpu, or cuda:INDEX.
    """
    for module in plan.plan.values():
        for spec in module.values():
            for shard in spec.sharding_spec.shards if spec.sharding_spec else ():
                rank = shard.placement.rank()
                shard.placement = rank_place(rank, devices[rank])
    return plan


def plan_for(
    topology: Topology,
    constraints: dict[str, TableConstraint],
    schema: Schema,
    config: RunConfig,
    model: nn.Module,
    sharders: list[ModuleSharder],
) -> ShardingPlan | ConfigError:
    """The plan on these devices, or why there is none.

    Args:
        constraints: table → TableConstraint, checked.
    """
    storage = topology.devices[0].storage
    memory = storage.hbm if topology.compute_device == "cuda" else storage.ddr
    world, choices = topology.world_size, iter([constraints])
    if topology.compute_device == "cpu":
        choices = move_to_files(constraints, schema, config, world * memory)
    for chosen in choices:
        narrowed = narrow(chosen, schema, world, memory)
        plan = _search(topology, narrowed, schema, config, model, sharders)
        if isinstance(plan, ConfigError) and narrowed != chosen:
            plan = _search(topology, chosen, schema, config, model, sharders)
        if not isinstance(plan, ConfigError):
            break
    return plan


def _search(
    topology: Topology,
    constraints: dict[str, TableConstraint],
    schema: Schema,
    config: RunConfig,
    model: nn.Module,
    sharders: list[ModuleSharder],
) -> ShardingPlan | ConfigError:
    world, local = topology.world_size, topology.local_world_size
    partitioner, batch = ConstrainedPartitioner(constraints), -(-config.data.global_batch_size // world)
    lengths = lengths_of_tables(schema, resolve_features(schema, config.model))
    of_torchrec = {}
    for table, constraint in constraints.items():
        dim, kernel = schema.tables[table].dim, constraint.kernel
        kernels = kernels_to_choose(config, topology.compute_device, bool(schema.tables[table].ids))
        parts = column_parts(dim, constraint.sharding, constraint.ranks, world, local)
        free = kernel in (None, "dense") or topology.compute_device == "cpu"
        of_torchrec[table] = ParameterConstraints(
            sharding_types=list(constraint.sharding),
            compute_kernels=["dense", *kernels] if free else [kernel],  # data_parallel is dense anyway
            min_partition=dim // parts,
            pooling_factors=lengths[table],
        )
    fused = {
        table: optimizer.name
        for table, optimizer in table_optimizers(config, schema).items()
        if topology.compute_device in optimizer_of(optimizer.name).devices
    }
    on_disk = {table for table, constraint in constraints.items() if constraint.kernel == MMAP_KERNEL}
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch,
        enumerator=Enumerator(topology, batch, of_torchrec, fused, on_disk),
        constraints=of_torchrec,
        partitioner=partitioner,
        # TorchRec's own four, with greedy ones that end.
        proposer=[GridSearchProposer(), GreedyProposer(max), GreedyProposer(sum), UniformProposer()],
        debug=False,
    )
    try:
        plan = planner.plan(model, sharders)
    except PlannerError as error:
        reason = partitioner.refusal or str(error).splitlines()[0].strip()
        gib = sum(t.rows * t.dim * 4 for t in schema.tables.values()) / GIB
        return ConfigError(
            f"no plan for {len(schema.tables)} tables ({gib:.2f} GiB of weights) on {world} workers: "
            f"{reason}",
            where="plan, scaling.num_workers",
            expected=f"tables that fit under {', '.join(config.plan.sharding_types)} and plan.tables"
            + _room(topology, constraints),
            do="add workers, allow row_wise, or make tables smaller",
        )
    # The planner (torchrec 1.8.0) refuses dense kernels for sharded tables, and UVM kernels on CPU, which run
    # all the same.
    for module in plan.plan.values():
        for table, spec in module.items():
            planned = spec.compute_kernel if table in fused else "dense"
            spec.compute_kernel = constraints[table].kernel or planned
    return plan


def _room(topology: Topology, constraints: dict[str, TableConstraint]) -> str:
    """What a worker has for tables, in words."""
    has, kernels = topology.devices[0].storage, {constraint.kernel for constraint in constraints.values()}
    if topology.compute_device != "cuda":
        words = f" in {has.ddr / GIB:.1f} GiB of memory for each worker"
        return words + (f", and {has.ssd / GIB:.1f} GiB of disk" if MMAP_KERNEL in kernels else "")
    words = f" in {has.hbm / GIB:.1f} GiB on each GPU, less 15 %"
    if kernels & {*UVM_KERNELS}:
        words += f", and {has.ddr / GIB:.1f} GiB of host memory for each"
    return words


def ids_of_features(schema: Schema, features: Features) -> dict[str, float]:
    """Sparse feature → how many ids of a row the planner expects: the mean that `raytrec inspect` has found,
    and of a sequence that is read id by id at most as many as the model reads. Where the schema has no
    statistics, as many as such a sequence may have, and of others one."""
    found = {}
    for name in schema.sparse:
        known, most = schema.statistics.get(name), features.sequences.get(name)
        found[name] = float(min(known.mean_length, most or known.mean_length) if known else most or 1)
    return found


def lengths_of_tables(schema: Schema, features: Features) -> dict[str, list[float]]:
    """Table → the same of each feature that looks it up."""
    found: dict[str, list[float]] = {table: [] for table in schema.tables}
    for name, length in ids_of_features(schema, features).items():
        found[schema.sparse[name].table].append(length)
    return found


def describe(plan: ShardingPlan) -> list[dict]:
    """One entry for each table: {table, sharding_type, compute_kernel, ranks}."""
    return [
        {
            "table": table,
            "sharding_type": spec.sharding_type,
            "compute_kernel": spec.compute_kernel,
            "ranks": spec.ranks,
        }
        for module in plan.plan.values()
        for table, spec in sorted(module.items())
    ]
