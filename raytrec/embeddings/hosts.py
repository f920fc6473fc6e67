"""Which ranks share a host, and how much memory each has for tables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from raytrec.sections import PlanSection

if TYPE_CHECKING:  # the driver asks for host_memory without torch
    import torch

GIB = 1024**3
# Bytes per ms: orders of magnitude of main memory and of gloo. TorchRec's defaults describe GPUs with NVLink,
# where exchanging costs nothing, and would shard every table row-wise.
CPU_BANDWIDTHS = {
    "ddr_mem_bw": 20 * GIB / 1000,
    "intra_host_bw": 1 * GIB / 1000,
    "inter_host_bw": 1 * GIB / 1000,
}


def settle_hosts(config: PlanSection) -> int:
    """How many consecutive ranks share a host, the same on every rank; a collective.

    TorchRec reads LOCAL_WORLD_SIZE wherever it needs that number, and each rank would go its own way where
    hosts hold different numbers of ranks; so it is agreed on, and written there. Such ranks count as one host
    each.
    """
    import torch.distributed as dist

    world = dist.get_world_size()
    mine = config.ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    counts: list[int] = [0] * world
    dist.all_gather_object(counts, mine)
    local = mine if len(set(counts)) == 1 and world % mine == 0 else 1
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    return local


def memory_bytes(config: PlanSection, device: torch.device) -> int:
    """Bytes that a rank on this device may fill with tables."""
    if config.memory_gib:
        return int(config.memory_gib * GIB)
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    return host_memory() // int(os.environ["LOCAL_WORLD_SIZE"])


def host_memory() -> int:
    """Bytes of main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def hardware(config: PlanSection, device: torch.device) -> dict:
    """What TorchRec's Topology takes: capacity in bytes and, on CPU, bandwidths in bytes per ms."""
    memory = memory_bytes(config, device)
    return {"hbm_cap": memory} if device.type == "cuda" else {"ddr_cap": memory, **CPU_BANDWIDTHS}
