"""Bandwidths of GPUs, by which the planner weighs kernels and ways of sharding; no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

GB_PER_S = 1e9 / 1000  # in bytes per ms


class Bandwidths(NamedTuple):
    """Of one GPU, in 10⁹ bytes a second and one direction: of its memory, to a GPU of the same host, and to
    one of another host (None: its hosts have networks of many kinds)."""

    memory: float
    intra_host: float
    inter_host: float | None = None


# By the names that NVIDIA's driver and torch have, without "NVIDIA ". Memory and links are from NVIDIA's data
# sheets, halved where these add both directions: NVLink has 600 GB/s (A100), 900 (H100 SXM, H200) or 1,800
# (B200), PCIe x16 64 (fourth generation) or 128 (fifth), also for GPUs whose NVLink joins pairs. Networks are
# those of NVIDIA's DGX and of GB200 NVL72 (200 Gb/s for each A100, else 400), and of AWS's hosts of 8 GPUs
# (g5.48xlarge and g6.48xlarge: 100 Gb/s for all 8; g6e.48xlarge: 400).
GPUS = {
    "A10G": Bandwidths(600, 32, 1.5625),
    "L4": Bandwidths(300, 32, 1.5625),
    "L40S": Bandwidths(864, 32, 6.25),
    "A100-SXM4-40GB": Bandwidths(1555, 300, 25),
    "A100-SXM4-80GB": Bandwidths(2039, 300, 25),
    "A100-PCIE-40GB": Bandwidths(1555, 32),
    "A100 80GB PCIe": Bandwidths(1935, 32),
    "H100 80GB HBM3": Bandwidths(3350, 450, 50),
    "H100 PCIe": Bandwidths(2000, 64),
    "H200": Bandwidths(4800, 450, 50),
    "B200": Bandwidths(7700, 900, 50),
    "GB200": Bandwidths(8000, 900, 50),
}


def known_gpu(name: str) -> Bandwidths | None:
    """Of a GPU by the name that its driver has."""
    return GPUS.get(name.removeprefix("NVIDIA "))


def bandwidths(names: Collection[str]) -> dict[str, float]:
    """What TorchRec's Topology takes, in bytes per ms: the least of these GPUs. What is not known of one of
    them is left to TorchRec, whose defaults are those of a V100."""
    gpus = [known_gpu(name) or Bandwidths(0, 0) for name in names]
    least = {
        "hbm_mem_bw": min((gpu.memory for gpu in gpus), default=0),
        "intra_host_bw": min((gpu.intra_host for gpu in gpus), default=0),
        "inter_host_bw": min((gpu.inter_host or 0 for gpu in gpus), default=0),
    }
    return {name: value * GB_PER_S for name, value in least.items() if value}
