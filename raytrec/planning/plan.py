"""Make the sharding plan of a run, which assigns parts of tables to ranks."""

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
from raytrec.compat.ray_core import measure_system_memory
from raytrec.compat.torch_ import make_rank_placement
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import PlanSection
from raytrec.embeddings.constraints import measure_free_disk
from raytrec.planning.dense_work import estimate_dense_work
from raytrec.planning.machines import UNKNOWN_GPU, UNKNOWN_NETWORK, find_gpu, find_network_bandwidth, group_linked_ranks
from raytrec.planning.memory import GIB, Constraints, check_disk, estimate_host_table_bytes, estimate_id_map_bytes
from raytrec.planning.rates import Rates
from raytrec.planning.search import Search
from raytrec.planning.validation import validate_constraints


@dataclass(frozen=True)
class RankLocation:
    """Location and resources of one rank.

    Attributes:
        host: Unique name of the host.
        ranks_per_host: Number of ranks on the host, as set by the launcher.
        device: Device, as numbered by processes on this host: cpu or cuda:INDEX.
        device_memory: Bytes of GPU memory; None on CPU.
        host_memory: Bytes of main memory of the host.
        disk: Free bytes on the host's disk for tables with compute_kernel fused_mmap.
        gpu: Name of the GPU; empty on CPU.
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
    """Properties of the hosts, as agreed between the ranks; identical on every rank.

    Attributes:
        ranks_per_host: Number of consecutive ranks that TorchRec treats as one host.
        devices: Device of each rank, as numbered by processes on its host; () in dry runs.
        memory: Bytes for tables per rank: plan.memory_gib, or else the memory of the smallest GPU (on CPU: the
            smallest share of a host's memory).
        host_share: Bytes of main memory per rank if the ranks on a host share its memory evenly.
        disk_share: Bytes of disk per rank for tables with compute_kernel fused_mmap, shared in the same way.
        gpus: Names of all GPUs; empty on CPU.
        network: Network bandwidth between hosts in 10⁹ bytes/s per GPU; None if unknown.
    """

    ranks_per_host: int
    devices: tuple[str, ...]
    memory: int
    host_share: int
    disk_share: int = 0
    gpus: frozenset[str] = frozenset()
    network: float | None = None


def agree_on_hosts(config: RunConfig, device: torch.device) -> Hosts:
    """Return the properties of all ranks' hosts, identical on every rank.

    This is a collective operation: every rank must call it. TorchRec reads LOCAL_WORLD_SIZE wherever it needs the
    number of ranks per host. If hosts have different numbers of ranks, this variable differs between ranks. The ranks
    therefore agree on one number and set the variable to this number.

    Raises:
        OSError: The free space of the disk for tables in files cannot be read.
    """
    places = [_locate_rank(config, device)] * dist.get_world_size()
    dist.all_gather_object(places, places[0])
    hosts = merge_resources(places, config.plan)
    os.environ["LOCAL_WORLD_SIZE"] = str(hosts.ranks_per_host)
    return hosts


def _locate_rank(config: RunConfig, device: torch.device) -> RankLocation:
    memory, gpu = None, ""
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        memory, gpu = properties.total_memory, properties.name
    return RankLocation(
        # Cloned machines may share a hostname, so Ray's node rank is part of the name.
        f"{socket.gethostname()}/{os.environ.get('NODE_RANK', '')}",
        int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        str(device),
        memory,
        measure_system_memory(),
        measure_free_disk(config),
        gpu,
    )


def merge_resources(places: list[RankLocation], config: PlanSection) -> Hosts:
    """Return the hosts' common properties, given the locations and resources of all ranks.

    If hosts have different numbers of ranks, or their number does not divide the number of all ranks, each rank is
    treated as a separate host. Memory is plan.memory_gib, or the minimum over all ranks. Tables that fit on one rank
    thus fit on every rank, and all ranks reject the same tables.

    Args:
        places: Location of each rank, in rank order.
        config: Section `plan` of the configuration.
    """
    on_host, counts = Counter(place.host for place in places), {place.ranks_per_host for place in places}
    share = min(place.host_memory // on_host[place.host] for place in places)
    disk = min(place.disk // on_host[place.host] for place in places)
    per_host = counts.pop() if len(counts) == 1 else 1
    device_bytes = [place.device_memory for place in places if place.device_memory is not None]
    memory = int(config.memory_gib * GIB) if config.memory_gib else min(device_bytes, default=share)
    devices = tuple(place.device for place in places)
    gpus = frozenset(place.gpu for place in places if place.gpu)
    return Hosts(per_host if len(places) % per_host == 0 else 1, devices, memory, share, disk, gpus)


def select_rates(hosts: Hosts, device: str, world: int) -> Rates:
    """Return the rates of CPU ranks, or of the GPU with the lowest memory bandwidth; unknown GPUs count as a V100.

    Args:
        hosts: Hosts of all ranks.
        device: Device type, cpu or cuda.
        world: Number of ranks.
    """
    if device == "cpu":
        return Rates.for_cpu(world)
    slowest = min(sorted(hosts.gpus), key=lambda name: (find_gpu(name) or UNKNOWN_GPU).memory, default="")
    return Rates.for_gpu(slowest, hosts.network or find_network_bandwidth(slowest) or UNKNOWN_NETWORK)


def make_plan(
    model: nn.Module, sharders: list[ModuleSharder], schema: Schema, config: RunConfig, device: torch.device
) -> ShardingPlan:
    """Make the plan on rank 0 and return it on every rank.

    This is a collective operation: every rank must call it. It sets LOCAL_WORLD_SIZE (`agree_on_hosts`). The model must
    store its dense layers in the attribute `head`.

    Raises:
        ConfigError: A constraint cannot be met, or tables do not fit into memory or on disk. Every rank raises the
            error.
    """
    hosts = agree_on_hosts(config, device)
    constraints, topology = validate_for_hosts(hosts, dist.get_world_size(), config, schema, device.type)
    # A plan or an error. With TorchRec's collective_plan, other ranks would wait forever after an error on rank 0.
    outcome: list = [None]
    if dist.get_rank() == 0:
        try:
            if device.type == "cpu":
                world, storage = topology.world_size, topology.devices[0].storage
                check_disk(constraints, schema, config, world * storage.ddr, world * storage.ssd)
            dense = model.head.parameters()
            outcome[0] = search_plan(hosts, topology, constraints, schema, config, model, sharders, dense)
        except ConfigError as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], ConfigError):
        raise outcome[0]
    return name_devices(outcome[0], hosts.devices)


def validate_for_hosts(
    hosts: Hosts, world: int, config: RunConfig, schema: Schema, device: str
) -> tuple[Constraints, Topology]:
    """Return the tables' validated constraints, and the topology with each rank's memory for tables.

    Args:
        hosts: Hosts of all ranks.
        world: Number of ranks.
        config: Configuration of the run.
        schema: Schema of the data.
        device: Device type, cpu or cuda.

    Raises:
        ConfigError: A constraint cannot be met, or memory is too small (see `validate_constraints`).
    """
    memory, per_host = hosts.memory - estimate_id_map_bytes(schema, world), hosts.ranks_per_host
    resources = {"ranks_per_host": per_host, "memory": memory, "host_share": hosts.host_share}
    constraints = validate_constraints(config, schema, device, world=world, **resources)
    room = estimate_host_table_bytes(config, schema, constraints, world, hosts.host_share)
    caps = {"ddr_cap": memory, "ssd_cap": hosts.disk_share}
    if device == "cuda":
        caps = {"hbm_cap": memory, "ddr_cap": room}
    return constraints, Topology(world_size=world, local_world_size=per_host, compute_device=device, **caps)


def name_devices(plan: ShardingPlan, devices: Sequence[str]) -> ShardingPlan:
    """Set the device of each of a plan's shards, in place, to its rank's device, and return the plan.

    The planner (torchrec 1.8.0, planner/utils.py) uses rank % ranks_per_host as a rank's GPU index. This
    index is wrong if hosts hold different numbers of ranks or order their GPUs differently. TorchRec raises
    an error if a shard's tensor is not on the device in the plan.

    Args:
        plan: Plan to change.
        devices: Device of each rank, as named by its own process: cpu or cuda:INDEX.
    """
    for module in plan.plan.values():
        for spec in module.values():
            for shard in spec.sharding_spec.shards if spec.sharding_spec else ():
                rank = shard.placement.rank()
                shard.placement = make_rank_placement(rank, devices[rank])
    return plan


def search_plan(
    hosts: Hosts,
    topology: Topology,
    constraints: Constraints,
    schema: Schema,
    config: RunConfig,
    model: nn.Module,
    sharders: list[ModuleSharder],
    dense: Iterable[nn.Parameter] = (),
) -> ShardingPlan:
    """Search for the plan of a model on a topology, and return the plan.

    `constraints` and `topology` are the results of `validate_for_hosts`. The shapes of the `dense` weights
    determine the estimated work of the dense layers.

    Raises:
        ConfigError: No plan that fits was found.
    """
    rates = select_rates(hosts, topology.compute_device, topology.world_size)
    shape = group_linked_ranks(topology.world_size // topology.local_world_size, topology.local_world_size, hosts.gpus)
    work = estimate_dense_work(dense, -(-config.data.global_batch_size // topology.world_size))
    return Search(topology, schema, config, model, sharders, work, rates, shape).find(constraints)
