"""Private names of Ray Serve (2.60.0)."""

from __future__ import annotations

from typing import Any

from ray.serve._private import replica


def keep_replica_on_loopback() -> None:
    """For a replica's constructor: its server for calls between deployments, which takes pickles of all who
    connect, listens on loopback, not on all interfaces. Nothing calls it where RAY_SERVE_USE_GRPC_BY_DEFAULT
    is off."""
    replica.add_port_to_grpc_server = _on_loopback


def leave_models_to_the_collector() -> None:
    """For a replica's constructor: Serve would freeze what the collector knows after it, and so keep a first
    model for good."""
    replica.RAY_SERVE_FREEZE_GC_ON_STARTUP = False


_add_port = replica.add_port_to_grpc_server


def _on_loopback(server: Any, address: str) -> int:
    return _add_port(server, address.replace("[::]:", "127.0.0.1:"))
