"""Rendezvous in which each worker listens only on the address of its node.

torch's TCPStore, through which ranks find each other, listens on all interfaces and requires no password.
gloo listens on the address of the host name, which on many hosts is loopback and thus unreachable from other
hosts. NCCL, even with a single rank, listens on the first interface that is not loopback (InfiniBand first).
Neither Ray Train's TorchConfig nor torch's env:// rendezvous allows choosing the address. Workers therefore
pass an already bound socket to the store and the name of their interface to gloo and NCCL (torch 2.13.0:
torch/distributed/rendezvous.py; ray 2.60.0: ray/train/torch/config.py; NCCL 2.29.7: src/misc/socket.cc). On a
local cluster, the interface is loopback.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from ray.train.backend import Backend, BackendConfig

from raytrec.cluster.session import find_interface, get_interface_variables, is_set_in_nccl_files
from raytrec.common.errors import GpuFailedError
from raytrec.common.machine import check_gpu

NCCL_LOG_PREFIX = "raytrec-nccl-"  # prefix of NCCL's log file names


class OwnAddressBackend(Backend):
    """Ray Train's torch backend, with workers that each listen only on the address of their node.

    Importing torch would delay the driver by a second; therefore only Ray Train's controller creates the
    original torch backend.
    """

    share_cuda_visible_devices = True  # as in the original torch backend

    def on_start(self, worker_group: Any, backend_config: OwnAddressConfig) -> None:
        """Prepare the addresses and GPUs of all workers, then start the original torch backend.

        Errors of `prepare_gpu` are raised in Ray's wrapper of task errors.
        """
        worker_group.execute(listen_on_own_address)
        if backend_config.backend == "nccl":
            worker_group.execute(prepare_gpu)
        torch_config = backend_config.to_torch()
        torch_config.backend_cls().on_start(worker_group, torch_config)

    def on_training_start(self, worker_group: Any, backend_config: OwnAddressConfig) -> None:
        """Call the same hook of the original torch backend."""
        torch_config = backend_config.to_torch()
        torch_config.backend_cls().on_training_start(worker_group, torch_config)

    def on_shutdown(self, worker_group: Any, backend_config: OwnAddressConfig) -> None:
        """Shut down the original torch backend."""
        torch_config = backend_config.to_torch()
        torch_config.backend_cls().on_shutdown(worker_group, torch_config)


@dataclass
class OwnAddressConfig(BackendConfig):
    """Configuration of OwnAddressBackend.

    Attributes:
        backend: Name of the collective backend, nccl or gloo.
        timeout_s: Timeout of a collective in seconds.
    """

    backend: str
    timeout_s: int

    def to_torch(self) -> Any:
        """Return the equivalent TorchConfig; this imports torch."""
        from ray.train.torch import TorchConfig

        return TorchConfig(backend=self.backend, timeout_s=self.timeout_s)

    @property
    def backend_cls(self) -> type[Backend]:
        """Return the backend class."""
        return OwnAddressBackend


def listen_on_own_address(address: str = "") -> None:
    """Make gloo, NCCL and the TCPStore of this process listen only on the node's address.

    If no interface of this machine has the address (because of address translation), the libraries choose an
    address themselves. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in the environment, and the latter in NCCL's own
    files, take precedence.

    Args:
        address: Address of the node; default: the node's address in Ray.
    """
    import ray

    from raytrec.compat.torch_ import bind_store

    address = address or ray.util.get_node_ip_address()
    if interface := find_interface(address):
        for name, value in get_interface_variables(interface).items():
            os.environ.setdefault(name, value)
        bind_store(address)


def prepare_gpu() -> None:
    """Configure torch's allocator and NCCL's log before their initialization, and check the worker's GPU.

    Raises:
        GpuFailedError: The GPU has failed; the id of this node is added to the error.
        ConfigError: torch or FBGEMM cannot use the GPU; see `check_gpu`.
    """
    import ray

    enable_expandable_segments()
    enable_network_log()
    try:
        check_gpu(ray.util.get_node_ip_address())
    except GpuFailedError as error:
        error.place = ray.get_runtime_context().get_node_id(), error.place[1]
        raise


def enable_expandable_segments() -> None:
    """Make torch's GPU memory allocator extend its segments instead of adding new segments.

    The number of ids, and thus the size of allocations, differs between batches. Without this setting, some memory in
    segments would remain unused, which plans do not account for. Call before the allocator is initialized. A setting
    in the environment takes precedence.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def enable_network_log() -> None:
    """Make NCCL log which network it chooses; call before NCCL is initialized.

    If NCCL_DEBUG is already set, NCCL's messages are meant for the user, and nothing is changed.
    """
    if "NCCL_DEBUG" not in os.environ and not is_set_in_nccl_files("NCCL_DEBUG"):
        file, path = mkstemp(prefix=NCCL_LOG_PREFIX)
        os.close(file)
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": path}


def read_chosen_network() -> str:
    """Return the network over which NCCL sends data to other hosts; "" if unknown.

    The network is IB (InfiniBand, RoCE), Socket (TCP) or the name of a plugin. Call once, after the first
    collective on GPUs, because the function removes NCCL's log file. Source of the format: NCCL 2.29.7,
    src/init.cc.
    """
    file = Path(os.environ.get("NCCL_DEBUG_FILE", ""))
    if not file.name.startswith(NCCL_LOG_PREFIX):
        return ""
    try:
        networks = re.findall(r"Using network (.+)", file.read_text(encoding="utf-8", errors="replace"))
        file.unlink()
    except OSError:
        return ""
    return networks[-1].strip() if networks else ""
