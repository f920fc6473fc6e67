"""The workers' rendezvous of a local run, on loopback only.

torch's TCPStore, through which ranks find each other, listens on all interfaces and asks for no password.
Neither Ray Train's TorchConfig nor torch's env:// rendezvous lets one choose the address, so the workers of a
local cluster hand the store a socket that is bound already (torch 2.13.0: torch/distributed/rendezvous.py;
ray 2.60.0: ray/train/torch/config.py).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from importlib import import_module

from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend


class _LoopbackBackend(_TorchBackend):
    def on_start(self, worker_group, backend_config) -> None:
        worker_group.execute(bind_store_to_loopback)
        super().on_start(worker_group, backend_config)


@dataclass
class LoopbackTorchConfig(TorchConfig):
    """TorchConfig for workers that are all on this machine."""

    @property
    def backend_cls(self) -> type:
        return _LoopbackBackend


def bind_store_to_loopback() -> None:
    """Makes the TCPStore that this process may start listen on 127.0.0.1."""
    from torch.distributed import TCPStore

    module = import_module("torch.distributed.rendezvous")  # torch.distributed.rendezvous is a function, too

    def store(host_name: str, port: int, *args, is_master: bool = False, **options) -> TCPStore:
        if is_master:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(1024)
            options["master_listen_fd"] = listener.detach()
        return TCPStore(host_name, port, *args, is_master=is_master, **options)

    module.TCPStore = store
