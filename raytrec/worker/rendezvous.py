"""The workers' rendezvous, on their nodes' addresses alone.

torch's TCPStore, through which ranks find each other, listens on all interfaces and asks for no password.
gloo listens where the host's name leads to, which on many hosts is loopback, and out of reach of other hosts.
NCCL, even of a single rank, listens on the first interface that is not loopback (InfiniBand's before others).
Neither Ray Train's TorchConfig nor torch's env:// rendezvous lets one choose the address. So workers hand the
store a socket that is bound already, and name their interface to gloo and NCCL (torch 2.13.0:
torch/distributed/rendezvous.py; ray 2.60.0: ray/train/torch/config.py; NCCL 2.29.7: src/misc/socket.cc). On a
local cluster that is loopback.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from ray.train.backend import Backend, BackendConfig

from raytrec.cluster.session import in_nccl_files, interface_of, socket_interfaces
from raytrec.common.errors import GpuFailed
from raytrec.common.machine import check_gpu

NCCL_LOG = "raytrec-nccl-"  # how names of its files begin


class OwnAddressBackend(Backend):
    """Ray Train's backend for torch, on workers that listen on their node's own address only.

    torch takes the driver a second to import. Only Ray Train's controller makes torch's own backend.
    """

    share_cuda_visible_devices = True  # as torch's

    def on_start(self, worker_group: Any, backend_config: OwnAddressConfig) -> None:
        worker_group.execute(keep_to_own_address)
        if backend_config.backend == "nccl":
            worker_group.execute(prepare_gpu)
        of_torch = backend_config.to_torch()
        of_torch.backend_cls().on_start(worker_group, of_torch)

    def on_training_start(self, worker_group: Any, backend_config: OwnAddressConfig) -> None:
        of_torch = backend_config.to_torch()
        of_torch.backend_cls().on_training_start(worker_group, of_torch)

    def on_shutdown(self, worker_group: Any, backend_config: OwnAddressConfig) -> None:
        of_torch = backend_config.to_torch()
        of_torch.backend_cls().on_shutdown(worker_group, of_torch)


@dataclass
class OwnAddressConfig(BackendConfig):
    """Configuration of an OwnAddressBackend.

    Attributes:
        backend: nccl or gloo.
        timeout_s: Seconds that a collective may take.
    """

    backend: str
    timeout_s: int

    def to_torch(self) -> Any:
        """Return the TorchConfig; imports torch."""
        from ray.train.torch import TorchConfig

        return TorchConfig(backend=self.backend, timeout_s=self.timeout_s)

    @property
    def backend_cls(self) -> type[Backend]:
        return OwnAddressBackend


def keep_to_own_address(address: str = "") -> None:
    """Makes gloo, NCCL and the TCPStore of this process listen on its node's address only.

    Where this machine does not have that address (it is translated on the way), they choose by themselves.
    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of the environment, or of NCCL's own files, override this.

    Args:
        address: Address of the node; default: the address by which Ray knows it.
    """
    import ray

    from raytrec.compat.torch_ import bind_store

    address = address or ray.util.get_node_ip_address()
    if interface := interface_of(address):
        for name, value in socket_interfaces(interface).items():
            os.environ.setdefault(name, value)
        bind_store(address)


def prepare_gpu() -> None:
    """What has to be set or known before torch and NCCL begin on this worker's GPU.

    Raises:
        ConfigError: of `check_gpu`.
    """
    import ray

    grow_segments()
    log_network()
    try:
        check_gpu(ray.util.get_node_ip_address())
    except GpuFailed as failed:
        failed.place = ray.get_runtime_context().get_node_id(), failed.place[1]
        raise


def grow_segments() -> None:
    """Has torch's allocator of GPU memory, which is still to begin, grow its segments instead of adding some.

    Batches have other numbers of ids each time, on several streams: what would be left over between segments
    is memory that plans do not count. A setting of the environment comes first.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def log_network() -> None:
    """Has NCCL, which is still to begin, write what it chooses. Where NCCL_DEBUG is set, its messages are for
    others."""
    if "NCCL_DEBUG" not in os.environ and not in_nccl_files("NCCL_DEBUG"):
        file, path = mkstemp(prefix=NCCL_LOG)
        os.close(file)
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": path}


def chosen_network() -> str:
    """What NCCL sends to other hosts over: IB (InfiniBand, RoCE), Socket (TCP), a plugin's name; "" where
    that is not known. After the first collective on GPUs, and once: what NCCL has written is removed.

    NCCL 2.29.7: src/init.cc.
    """
    file = Path(os.environ.get("NCCL_DEBUG_FILE", ""))
    if not file.name.startswith(NCCL_LOG):
        return ""
    try:
        found = re.findall(r"Using network (.+)", file.read_text(encoding="utf-8", errors="replace"))
        file.unlink()
    except OSError:
        return ""
    return found[-1].strip() if found else ""
