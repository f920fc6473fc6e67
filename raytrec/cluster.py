"""Starting a local Ray on loopback, or joining a cluster."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from raytrec.errors import RunError
from raytrec.interfaces import socket_interfaces
from raytrec.remote.refused import check_token
from raytrec.remote.token import IN_JOB, use_token


def in_job() -> bool:
    """Whether this process is the driver of a Ray job that was submitted."""
    return IN_JOB in os.environ


@contextmanager
def ray_session(address: str | None = None, num_cpus: int | None = None) -> Iterator[None]:
    """Ray, for as long as the block runs.

    In this order: a Ray that this process already uses (left running), the cluster at `address`, the cluster
    of the Ray job that this process is the driver of, or a new local one. A local one listens on loopback
    only, has no dashboard, and ends with the block.

    Args:
        address: 'auto', HOST:PORT or ray://HOST:PORT of a running cluster.
        num_cpus: logical CPUs of a new local cluster; default: what the machine has.

    Raises:
        RunError: when the cluster cannot be reached, or refuses the token.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    use_token(create=not (address or os.environ.get("RAY_ADDRESS")))
    address = address or os.environ.get("RAY_ADDRESS")
    options: dict = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        if _is_on_loopback(address):
            stay_on_loopback()
        check_token(address)
        options["address"] = address
    else:
        stay_on_loopback()
        options |= {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RunError(
            f"cannot reach Ray: {str(error).splitlines()[0]}",
            where=f"scaling.address={address}" if address else "a new local cluster",
            do="start one with `ray start --head --node-ip-address 127.0.0.1`, or leave scaling.address out",
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _is_on_loopback(address: str) -> bool:
    """Whether a cluster listens on this machine's loopback alone, as `raytrec head` starts it.

    Ray would look for it, and make this driver listen, at the machine's own address (see stay_on_loopback).
    """
    from ray._private import services

    try:
        target = services.canonicalize_bootstrap_address(address)
        host, _, port = (target or "").rpartition(":")
        own = bool(host) and host == services.get_node_ip_address()
    except (ConnectionError, ValueError):  # ray://, or no cluster; whoever connects says so
        return False
    return own and not _listens(host, int(port)) and _listens("127.0.0.1", int(port))


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def stay_on_loopback() -> None:
    """Lets nothing of a local Ray, or of gloo and NCCL between its workers, listen beyond this machine.

    Ray 2.60 turns a node address of 127.0.0.1 back into the machine's own and its servers then listen on all
    interfaces (`services.resolve_ip_for_localhost`), unless it is told, as by default on macOS and Windows,
    that this will never be a cluster of several nodes. Its processes inherit the environment; the constant is
    for this one, where Ray may have been imported before.
    """
    from ray._private import ray_constants

    os.environ |= loopback_environment()
    ray_constants.ENABLE_RAY_CLUSTER = False


def loopback_environment() -> dict[str, str]:
    """The environment in which a Ray that is started, gloo and NCCL stay on loopback: stay_on_loopback."""
    from ray._private import ray_constants

    mine = {name: os.environ.get(name, value) for name, value in socket_interfaces("lo").items()}
    return {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"} | (mine if sys.platform == "linux" else {})
