"""The plan of a run: which rank holds which part of which table."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from raytrec.common.errors import ConfigError
from raytrec.compat.ray_core import system_memory
from raytrec.compat.torch_ import rank_place
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import PlanSection
from raytrec.embeddings.constraints import TableConstraint, free_disk
from raytrec.planning.dense_work import guess_dense_work
from raytrec.planning.machines import UNKNOWN_GPU, UNKNOWN_NETWORK, known_gpu, linked, network_of
from raytrec.planning.memory import GIB, check_disk, host_room, map_share
from raytrec.planning.rates import Rates
from raytrec.planning.search import Search
from raytrec.planning.validation import validate_constraints


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        host: a name that no other host has.
        ranks_per_host: how many ranks share its host, by its launcher.
        device: as processes of this host number it: cpu, or cuda:INDEX.
        device_memory: bytes of its GPU; None on CPU.
        host_memory: bytes of its host.
        disk: bytes that are free where its host has tables with compute_kernel fused_mmap.
        gpu: name of its GPU; empty on CPU.
    """

    host: str
    ranks_per_host: int
    device: str
    device_memory: int | None
    host_memory: int
    disk: int = 0
    gpu: str = ""


@dataclass(frozen=True)
class Hosts:
    """What all ranks agree on, the same on each.

    Attributes:
        ranks_per_host: how many consecutive ranks TorchRec takes for one host.
        devices: each rank's device, as processes of its host number them.
        memory: bytes of the smallest rank's device: of its GPU, on CPU of its share of its host.
        host_share: bytes of main memory that each rank has, where the ranks of a host share it evenly.
        disk_share: the same of the disk for tables with compute_kernel fused_mmap.
        gpus: the names of all GPUs.
        network: 10⁹ bytes a second between hosts, for each GPU; None: not known.
    """

    ranks_per_host: int
    devices: tuple[str, ...]
    memory: int
    host_share: int
    disk_share: int = 0
    gpus: frozenset[str] = frozenset()
    network: float | None = None


def agree_on_hosts(config: RunConfig, device: torch.device) -> Hosts:
    """Where the ranks are, the same on every rank; a collective.

    TorchRec reads LOCAL_WORLD_SIZE wherever it needs the number of ranks of a host. Where hosts hold
    different numbers of ranks, each rank would have another one; so ranks agree on it, and write it there.
    """
    places = [_place(config, device)] * dist.get_world_size()
    dist.all_gather_object(places, places[0])
    hosts = hosts_of(places, config.plan)
    os.environ["LOCAL_WORLD_SIZE"] = str(hosts.ranks_per_host)
    return hosts


def _place(config: RunConfig, device: torch.device) -> Place:
    memory, gpu = None, ""
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        memory, gpu = properties.total_memory, properties.name
    return Place(
        # Ray's number of the node, too: machines that were copied may have one name.
        f"{socket.gethostname()}/{os.environ.get('NODE_RANK', '')}",
        int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        str(device),
        memory,
        system_memory(),
        free_disk(config),
        gpu,
    )


def hosts_of(places: list[Place], config: PlanSection) -> Hosts:
    """What follows from the places of all ranks.

    Ranks count as one host each where hosts hold different numbers of them. Memory is the least of any
    rank's, so that what fits one rank fits all, and all ranks refuse alike what does not.

    Args:
        places: of each rank, in order.
    """
    on_host, counts = Counter(place.host for place in places), {place.ranks_per_host for place in places}
    share = min(place.host_memory // on_host[place.host] for place in places)
    disk = min(place.disk // on_host[place.host] for place in places)
    local = counts.pop() if len(counts) == 1 else 1
    on_devices = [place.device_memory for place in places if place.device_memory is not None]
    memory = int(config.memory_gib * GIB) if config.memory_gib else min(on_devices, default=share)
    devices = tuple(place.device for place in places)
    gpus = frozenset(place.gpu for place in places if place.gpu)
    return Hosts(local if len(places) % local == 0 else 1, devices, memory, share, disk, gpus)


def rates_of(hosts: Hosts, device: str, world: int) -> Rates:
    """Return the rates by the data sheet of the ranks' slowest GPU; unknown GPUs count as V100.

    Args:
        device: cpu or cuda.
        world: Number of ranks.
    """
    if device == "cpu":
        return Rates.of_cpu(world)
    slowest = min(sorted(hosts.gpus), key=lambda name: (known_gpu(name) or UNKNOWN_GPU).memory, default="")
    return Rates.of_gpu(slowest, hosts.network or network_of(slowest) or UNKNOWN_NETWORK)


def make_plan(
    model: nn.Module, sharders: list[ModuleSharder], schema: Schema, config: RunConfig, device: torch.device
) -> ShardingPlan:
    """Plan on rank 0 and return the plan on every rank; a collective.

    Args:
        model: Model with the dense layers as `head`.

    Raises:
        ConfigError: A constraint that cannot be met, tables that do not fit, or no allowed sharding type that
            fits a table; on every rank.
    """
    hosts = agree_on_hosts(config, device)
    constraints, topology = validated(hosts, dist.get_world_size(), config, schema, device.type)
    outcome: list = [None]  # or an error: with TorchRec's collective_plan, other ranks would wait for ever
    if dist.get_rank() == 0:
        try:
            if device.type == "cpu":
                world, has = topology.world_size, topology.devices[0].storage
                check_disk(constraints, schema, config, world * has.ddr, world * has.ssd)
            dense = model.head.parameters()
            outcome[0] = plan_for(hosts, topology, constraints, schema, config, model, sharders, dense)
        except ConfigError as error:
            outcome[0] = error
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
    sizes = {"ddr_cap": memory, "ssd_cap": hosts.disk_share}
    if device == "cuda":
        sizes = {"hbm_cap": memory, "ddr_cap": room}
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
) -> ShardingPlan:
    """Return the plan for these devices.

    Args:
        constraints, topology: Result of `validated`.
        dense: Weights of the dense layers.

    Raises:
        ConfigError: No plan fits.
    """
    rates = rates_of(hosts, topology.compute_device, topology.world_size)
    shape = linked(topology.world_size // topology.local_world_size, topology.local_world_size, hosts.gpus)
    work = guess_dense_work(dense, -(-config.data.global_batch_size // topology.world_size))
    return Search(topology, schema, config, model, sharders, work, rates, shape).find(constraints)
