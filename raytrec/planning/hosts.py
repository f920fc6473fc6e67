"""Ranks' hosts and GPUs, and the memory for tables."""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytrec.compat.ray_core import system_memory
from raytrec.config.run_config import RunConfig
from raytrec.config.tables import PlanSection
from raytrec.embeddings.kernels import free_disk
from raytrec.planning.footprint import GIB
from raytrec.planning.machines import bandwidths, known_gpu, network_of
from raytrec.planning.rates import Rates

if TYPE_CHECKING:  # the driver reads host_memory without torch
    import torch

# Bytes per ms: orders of magnitude of main memory and of gloo. TorchRec's defaults describe GPUs with NVLink,
# where exchanging costs nothing, and would shard every table row-wise.
CPU_BANDWIDTHS = {
    "ddr_mem_bw": 20 * GIB / 1000,
    "intra_host_bw": 1 * GIB / 1000,
    "inter_host_bw": 1 * GIB / 1000,
}


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
    import torch.distributed as dist

    places = [_place(config, device)] * dist.get_world_size()
    dist.all_gather_object(places, places[0])
    hosts = hosts_of(places, config.plan)
    os.environ["LOCAL_WORLD_SIZE"] = str(hosts.ranks_per_host)
    return hosts


def _place(config: RunConfig, device: torch.device) -> Place:
    import torch
    import torch.distributed as dist

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
        host_memory(),
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


def host_memory() -> int:
    """Bytes of main memory of this machine, or of the container that this process is in."""
    return system_memory()


def capacity(hosts: Hosts, device: str, memory: int, room: int) -> dict:
    """What TorchRec's Topology takes: capacity of a rank in bytes, and bandwidths in bytes per ms.

    Args:
        device: cpu or cuda.
        memory: of each rank's device. room: for tables in host memory, of each rank on a GPU.
    """
    if device == "cuda":
        return {"hbm_cap": memory, "ddr_cap": room, **bandwidths(hosts.gpus, hosts.network)}
    return {"ddr_cap": memory, "ssd_cap": hosts.disk_share, **CPU_BANDWIDTHS}


def rates_of(hosts: Hosts, device: str, world: int) -> Rates | None:
    """What ranks reach by the data sheet of their slowest GPU; None: there are GPUs without one.

    Args:
        device: cpu or cuda.
        world: number of ranks.
    """
    if device == "cpu":
        return Rates.of_cpu(world)
    known = {name: gpu.memory for name in hosts.gpus if (gpu := known_gpu(name))}
    if not known or len(known) < len(hosts.gpus):
        return None
    slowest = min(known, key=lambda name: known[name])
    network = hosts.network or network_of(slowest)
    return Rates.of_gpu(slowest.removeprefix("NVIDIA "), network) if network else None
