"""Which rank holds which part of which table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from raytrec.common.errors import ConfigError
from raytrec.compat.torch_ import rank_place
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import TableConstraint
from raytrec.planning.dense_work import guess_dense_work
from raytrec.planning.find import Finder
from raytrec.planning.footprint import disk_refusal, map_share
from raytrec.planning.hosts import Hosts, agree_on_hosts, capacity, rates_of
from raytrec.planning.machines import linked
from raytrec.planning.validation import host_room, validate_constraints


def make_plan(
    model: nn.Module, sharders: list[ModuleSharder], schema: Schema, config: RunConfig, device: torch.device
) -> ShardingPlan:
    """Rank 0 plans, every rank receives the plan; a collective.

    Args:
        model: whose `head` are the dense layers.

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
        outcome[0] = outcome[0] or plan_for(
            hosts, topology, constraints, schema, config, model, sharders, model.head.parameters()
        )
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
    hosts: Hosts,
    topology: Topology,
    constraints: dict[str, TableConstraint],
    schema: Schema,
    config: RunConfig,
    model: nn.Module,
    sharders: list[ModuleSharder],
    dense: Iterable[nn.Parameter] = (),
) -> ShardingPlan | ConfigError:
    """The plan on these devices, or why there is none.

    Args:
        dense: weights of the dense layers.
        constraints, topology: of `validated`.
    """
    rates = rates_of(hosts, topology.compute_device, topology.world_size)
    shape = linked(topology.world_size // topology.local_world_size, topology.local_world_size, hosts.gpus)
    work = guess_dense_work(dense, -(-config.data.global_batch_size // topology.world_size))
    return Finder(topology, schema, config, model, sharders, work, rates, shape).find(constraints)
