"""Starting a local Ray on loopback, or joining a cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from raytrec.errors import RunError


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
        RunError: when the cluster cannot be reached.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    options: dict = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        options["address"] = address
    else:
        options |= {
            "address": "local",
            "num_cpus": num_cpus,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }
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
