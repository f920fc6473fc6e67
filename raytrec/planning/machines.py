"""Memory, rates and links of NVIDIA's GPUs and of cloud machines. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from raytrec.common.errors import ConfigError, make_unknown_word_error

DEFAULT_DISK_GIB = 1e6  # assumed disk size if none is given
GIB_PATTERN = r"(\d+(?:\.\d+)?)gib"
HOST_SIZES_PATTERN = re.compile(rf"(\d+)x{GIB_PATTERN}(?::{GIB_PATTERN}(?::{GIB_PATTERN})?)?")


class Gpu(NamedTuple):
    """Data sheet of one GPU.

    Attributes:
        memory_gib: GiB that CUDA leaves to programs (torch's total_memory, rounded down).
        fp32: Rate of matrix products in fp32, in 10¹² operations/s without sparsity.
        tf32: Rate of matrix products in tf32, in 10¹² operations/s without sparsity.
        bf16: Rate of matrix products in bf16, in 10¹² operations/s without sparsity.
        memory: Memory bandwidth in 10⁹ bytes/s.
        intra_host: Bandwidth of the links to other GPUs in the host in one direction, in 10⁹ bytes/s.
        pcie: Bandwidth of the link to the host in one direction, in 10⁹ bytes/s.
        linked: Number of GPUs connected by the links to other GPUs if these links span hosts; otherwise 0.
    """

    memory_gib: float
    fp32: float
    tf32: float
    bf16: float
    memory: float
    intra_host: float
    pcie: float
    linked: int = 0


# Keys are the names used by NVIDIA's driver and torch, without "NVIDIA ". Values are from NVIDIA's data sheets
# (A10G: AWS), halved if the data sheet counts sparsity or both directions of a link. In both directions together,
# NVLink has 600 GB/s (A100), 900 (H100 SXM, H200) or 1,800 (B200), and PCIe x16 has 64 (fourth generation) or 128
# (fifth). If NVLink connects only pairs of GPUs, as on PCIe cards, intra_host is the bandwidth of PCIe. In GB200 NVL72,
# NVLink connects the GPUs of 18 hosts, and also connects GPUs to CPUs.
GPUS = {
    "A10G": Gpu(22.0, 31.5, 35, 70, 600, 32, 32),
    "L4": Gpu(22.0, 30.3, 60, 121, 300, 32, 32),
    "L40S": Gpu(44.3, 91.6, 183, 362, 864, 32, 32),
    "A100-SXM4-40GB": Gpu(39.4, 19.5, 156, 312, 1555, 300, 32),
    "A100-SXM4-80GB": Gpu(79.1, 19.5, 156, 312, 2039, 300, 32),
    "A100-PCIE-40GB": Gpu(39.4, 19.5, 156, 312, 1555, 32, 32),
    "A100 80GB PCIe": Gpu(79.1, 19.5, 156, 312, 1935, 32, 32),
    "H100 80GB HBM3": Gpu(79.1, 67, 494, 989, 3350, 450, 64),
    "H100 PCIe": Gpu(79.1, 51, 378, 756, 2000, 64, 64),
    "H200": Gpu(139.7, 67, 494, 989, 4800, 450, 64),
    "H200 NVL": Gpu(139.7, 60, 418, 835, 4800, 64, 64),
    "B200": Gpu(178.3, 75, 1100, 2250, 7700, 900, 64),
    "GB200": Gpu(184.0, 80, 1250, 2500, 8000, 900, 450, 72),
}
# Unknown GPUs count as a V100, as in TorchRec's defaults.
UNKNOWN_GPU, UNKNOWN_NETWORK = Gpu(15.7, 15.7, 15.7, 15.7, 900, 150, 16), 12.5


class Machine(NamedTuple):
    """Known machine type: its GPUs, processors, memory and network.

    Attributes:
        name: Name of the machine, e.g. 8xh100-sxm.
        gpu: Name of the GPU, a key of GPUS.
        gpus: Number of GPUs.
        cpus: Number of hardware threads (the clouds' vCPUs).
        memory_gib: GiB of main memory.
        network: Network bandwidth in one direction for all GPUs together, in 10⁹ bytes/s.
        disk_gib: GiB of local disks.
    """

    name: str
    gpu: str
    gpus: int
    cpus: int
    memory_gib: float
    network: float
    disk_gib: float

    @property
    def gpu_network(self) -> float:
        """Return the network bandwidth per GPU in one direction, in 10⁹ bytes/s."""
        return self.network / self.gpus


# Kind → (GPU, number of GPUs per host → (vCPUs, GiB of memory, Gb/s of network, TB of local disk)).
# From the clouds' instance lists (November 2025): A10G AWS g5.48xlarge, .12xlarge, .4xlarge; L4 and L40S
# the same sizes of g6 and g6e; A100 Azure ND96asr_v4 and ND96amsr_A100_v4 (one 200 Gb/s port per GPU, as in
# NVIDIA's DGX A100), Google a2-highgpu and a2-ultragpu for 4 and 1; H100 AWS p5.48xlarge (one 400 Gb/s port
# per GPU, as in DGX H100), Google a3-highgpu for 4 and 1; H200 AWS p5en; B200 AWS p6-b200; GB200 AWS
# p6e-gb200.
_HOSTS: dict[str, tuple[str, dict[int, tuple[int, float, float, float]]]] = {
    "a10g": ("A10G", {8: (192, 768, 100, 7.6), 4: (48, 192, 40, 3.8), 1: (16, 64, 25, 0.6)}),
    "l4": ("L4", {8: (192, 768, 100, 7.5), 4: (48, 192, 40, 3.8), 1: (16, 64, 25, 0.6)}),
    "l40s": ("L40S", {8: (192, 1536, 400, 7.6), 4: (48, 384, 100, 3.8), 1: (16, 128, 20, 0.6)}),
    "a100-40": ("A100-SXM4-40GB", {8: (96, 900, 1600, 6.5), 4: (48, 340, 50, 1.5), 1: (12, 85, 24, 0.4)}),
    "a100-80": ("A100-SXM4-80GB", {8: (96, 1900, 1600, 6.4), 4: (48, 680, 50, 1.5), 1: (12, 170, 24, 0.4)}),
    "h100-sxm": ("H100 80GB HBM3", {8: (192, 2048, 3200, 30.7), 4: (104, 936, 100, 3.0), 1: (26, 234, 25, 0.7)}),
    "h200": ("H200", {8: (192, 2048, 3200, 30.7)}),
    "b200": ("B200", {8: (192, 2048, 3200, 30.7)}),
    "gb200": ("GB200", {4: (144, 960, 1600, 22.5)}),
}
_GPU_ALIASES = {"h100": "h100-sxm", "a100": "a100-80"}
MACHINES = {
    f"{gpus}x{kind}": Machine(f"{gpus}x{kind}", gpu, gpus, cpus, memory, gbit / 8, disk * 1e12 / 2**30)
    for kind, (gpu, sizes) in _HOSTS.items()
    for gpus, (cpus, memory, gbit, disk) in sizes.items()
}


def find_machine(name: str, where: str = "--on") -> Machine:
    """Return the machine type with a name such as 8xh100-sxm; 8xh100 and 8xa100 mean 8xh100-sxm and 8xa100-80.

    Case and surrounding blanks are ignored. `where` is the option or file that contains the name, for the error.

    Raises:
        ConfigError: There is no machine type with this name.
    """
    gpus, _, kind = name.strip().lower().partition("x")
    machine = MACHINES.get(f"{gpus}x{_GPU_ALIASES.get(kind, kind)}")
    if machine is None:
        do = "describe other machines by GPUs (on CPU: workers) and GiB of each, as in 2x4x48gib; times require --rates"
        do = do if where == "--on" else "use these names; other machines have no price"
        raise make_unknown_word_error(f"there is no machine '{name}'", name, MACHINES, where, do=do)
    return machine


class Cluster(NamedTuple):
    """Cluster of identical hosts for which a run is planned.

    Attributes:
        hosts: Number of hosts.
        gpus: Number of GPUs per host, or of workers on CPU.
        memory_gib: GiB of memory per GPU or worker.
        host_memory_gib: GiB of main memory per host.
        disk_gib: GiB of disk per host.
        machine: Machine type of the hosts; None if the hosts are described by the other fields alone.
    """

    hosts: int
    gpus: int
    memory_gib: float
    host_memory_gib: float
    disk_gib: float
    machine: Machine | None = None

    @classmethod
    def from_sizes(
        cls, hosts: int, gpus: int, memory_gib: float, host_gib: float | None = None, disk_gib: float | None = None
    ) -> Cluster:
        """Return a cluster of hosts that are described by their sizes alone.

        If `host_gib` is None or 0, a host has twice the memory of its GPUs. If `disk_gib` is None or 0, its disk is
        large enough for any table.
        """
        return cls(hosts, gpus, memory_gib, host_gib or 2 * memory_gib * gpus, disk_gib or DEFAULT_DISK_GIB)

    @classmethod
    def from_machine(cls, hosts: int, machine: Machine) -> Cluster:
        """Return a cluster of machines of a known type."""
        memory = GPUS[machine.gpu].memory_gib
        return cls(hosts, machine.gpus, memory, machine.memory_gib, machine.disk_gib, machine)

    @property
    def name(self) -> str:
        """Return the name of the cluster, e.g. 2x8xh100-sxm, or "2 × 4" for hosts without a machine type."""
        return f"{self.hosts}x{self.machine.name}" if self.machine else f"{self.hosts} × {self.gpus}"

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.hosts * self.gpus

    @property
    def gib_by_tier(self) -> dict[str, float]:
        """Return tier (memory.TIERS) → GiB per rank; ranks share their host's main memory and disk equally."""
        return {"device": self.memory_gib, "host": self.host_memory_gib / self.gpus, "disk": self.disk_gib / self.gpus}

    @property
    def linked(self) -> tuple[int, int]:
        """Return (number of groups, GPUs per group); see `group_linked_ranks`."""
        return group_linked_ranks(self.hosts, self.gpus, [self.machine.gpu] if self.machine else [])


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that a text such as 2x8xh100-sxm describes; 8xh100-sxm is a single machine.

    2x4x48gib:384gib:900gib describes two hosts, each with 4 GPUs of 48 GiB, 384 GiB of memory and 900 GiB of
    disk. The last two sizes are optional.

    Raises:
        ConfigError: The text has another format, the number of machines or GPUs or the memory of a GPU is 0, or no
            known machine has this name.
    """
    count_match = re.fullmatch(r"\s*(\d+)x(\d+x.+)", text)
    count, name = (int(count_match[1]), count_match[2]) if count_match else (1, text)
    sizes_match = HOST_SIZES_PATTERN.fullmatch(name.strip().lower())
    sizes = [float(size) if size else None for size in sizes_match.groups()] if sizes_match else []
    for number, what in zip([count, *sizes], ("machines", "GPUs", "GiB per GPU"), strict=False):
        if not number:
            raise ConfigError(f"the number of {what} is 0", where=f"--on {text}", expected="a number above 0")
    if sizes:
        return Cluster.from_sizes(count, int(sizes[0]), *sizes[1:])
    return Cluster.from_machine(count, find_machine(name))


def group_linked_ranks(hosts: int, gpus: int, names: Collection[str]) -> tuple[int, int]:
    """Return (number of groups, GPUs per group), where fast links connect the GPUs of a group.

    A group is one host, or several hosts if NVLink connects their GPUs. All groups have the same size.

    Args:
        hosts: Number of hosts.
        gpus: Number of GPUs per host.
        names: Names of all GPUs, as their driver reports them.
    """
    data_sheets, world = [find_gpu(name) for name in names], hosts * gpus
    reach = min((gpu.linked if gpu else 0 for gpu in data_sheets), default=0)
    sizes = range(gpus, max(gpus, min(world, reach)) + 1, gpus)
    size = max(size for size in sizes if world % size == 0)
    return world // size, size


def find_gpu(name: str) -> Gpu | None:
    """Return the data sheet of a GPU, given the name that its driver reports; None for unknown GPUs."""
    return GPUS.get(name.removeprefix("NVIDIA "))


def find_network_bandwidth(name: str) -> float:
    """Return the network bandwidth per GPU, in 10⁹ bytes/s, to assume if the GPU's hosts are unknown.

    The result is the highest value of all machines with this GPU, or 0 if there is no such machine.
    """
    return max((m.gpu_network for m in MACHINES.values() if GPUS[m.gpu] is find_gpu(name)), default=0.0)
