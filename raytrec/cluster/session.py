"""Starting a local Ray on loopback, or joining a cluster."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any, NoReturn

from raytrec.cluster.access import START_ONE, check_cluster, check_versions, use_token
from raytrec.cluster.lifeline import GCS, RAYLET, RayLost
from raytrec.cluster.local_ray import heads, listens, own_sessions, private_folder
from raytrec.cluster.warm import forked_workers, warm_up
from raytrec.common.errors import RunError, first_line
from raytrec.compat.ray_core import JOB_CONFIG, bootstrap_address, own_address
from raytrec.compat.ray_start import (
    connect_by_hand,
    few_wakeups,
    in_folder,
    keep_loopback,
    logs_folder,
    loopback_setting,
    only_what_is_needed,
    silence_workers,
)
from raytrec.compat.versions import require_versions

SHUTDOWN_S = {RAYLET: 20.0, GCS: 1.0}  # Ray may take 13 s to know of its raylet's end


def in_job() -> bool:
    """Whether this process is the driver of a Ray job that was submitted."""
    return JOB_CONFIG in os.environ


def stays_here(address: str | None) -> bool:
    """Whether a run with this scaling.address has its own Ray on this machine."""
    return not (address or os.environ.get("RAY_ADDRESS") or in_job())


def begin_early() -> None:
    """Start the warm process before it is certain that this command will have its own Ray.

    Commands call this before their other imports. A process that has imported Ray is not a new command.
    """
    if stays_here(None) and "ray" not in sys.modules:
        warm_up()


@contextmanager
def ray_session(
    address: str | None = None, num_cpus: int | None = None, any_versions: bool = False
) -> Iterator[None]:
    """Ray, for as long as the block runs.

    In this order: a Ray that this process already uses (left running), the cluster at `address`, the cluster
    of the Ray job that this process is the driver of, or a new local one. A local one listens on loopback
    only, has no dashboard, and metrics for Prometheus only with RAY_enable_metrics_collection=1; it keeps its
    files where no other user can enter, and ends with the block, files included.

    Args:
        address: 'auto', HOST:PORT or ray://HOST:PORT of a running cluster.
        num_cpus: logical CPUs of a new local cluster; default: those of the machine.
        any_versions: whether packages of other versions may be installed here, as far as Ray starts.

    Raises:
        RunError: when the cluster cannot be reached, or refuses the token, or another Ray is installed.
    """
    if not any_versions:
        require_versions()
    import ray

    if ray.is_initialized():
        yield
        return
    in_environment = os.environ.get("RAY_ADDRESS")
    alone = not (address or in_environment)
    use_token(create=alone, own=alone)
    if alone:
        session = _started(num_cpus)
    elif address:
        session = _joined(address, f"scaling.address={address}")
    else:
        session = _joined(in_environment, f"RAY_ADDRESS={in_environment}")
    with session:
        yield


@contextmanager
def _joined(address: str, given: str) -> Iterator[None]:
    """A session on a cluster that is running.

    Args:
        given: where the address comes from.
    """
    if address == "auto" and not os.environ.get("RAY_ADDRESS") and (here := heads()):
        address = _the_only(here, given)
    if _is_on_loopback(address):
        stay_on_loopback()
    check_cluster(address, given)
    with _left_in_time():
        _init(given, address=address)
        yield


@contextmanager
def _started(num_cpus: int | None) -> Iterator[None]:
    """A session on a new cluster of this machine alone."""
    stay_on_loopback()
    options = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    with (
        private_folder() as folder,
        forked_workers(folder) as (environment, on_raylet),
        own_sessions(folder, environment, on_raylet) as end_rest,
    ):
        try:
            with _left_in_time():
                with only_what_is_needed():
                    _init("a new local cluster", **in_folder(folder / "ray"), **few_wakeups(), **options)
                _state.ours = True
                yield
        finally:
            end_rest()


@dataclass
class _State:
    """Of this process's Ray.

    Attributes:
        ours: it was started here.
        stuck: ray.shutdown() does not return.
    """

    ours: bool = False
    stuck: bool = False


_state = _State()


def started_here() -> bool:
    """Whether this process's Ray was started by ray_session, for this process alone."""
    return _state.ours


def logs_here() -> Path | None:
    """The folder of the logs of this process's own Ray, which goes with it; None: it has none."""
    return logs_folder() if _state.ours else None


def is_stuck() -> bool:
    """Whether this process cannot have another Ray, because it cannot leave the one that it had."""
    return _state.stuck


def leave(code: int) -> NoReturn:
    """Ends the process; at once where Ray would hold it up for a minute."""
    if _state.stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def _left_in_time() -> Iterator[None]:
    """A block that ends with ray.shutdown(), which may take SHUTDOWN_S where Ray has lost a part."""
    import ray

    try:
        yield
    except RayLost as lost:
        thread = Thread(target=ray.shutdown, daemon=True)
        thread.start()
        thread.join(SHUTDOWN_S[lost.part])
        _state.stuck = thread.is_alive()
        raise
    finally:
        _state.ours = False
        if not _state.stuck:
            ray.shutdown()


def _the_only(addresses: list[str], given: str) -> str:
    """Ray itself would take any cluster that it finds, another run's own one, too."""
    if len(addresses) > 1:
        raise RunError(
            f"there are {len(addresses)} clusters on this machine: {', '.join(sorted(addresses))}",
            where=given,
            expected="the address of one of them",
        )
    return addresses[0]


def _init(where: str, **options: Any) -> None:
    import ray

    # When this Ray has ended, no thread that still asks it for something may start or join another one.
    connect_by_hand()
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Exception itself, too, when the machine is too busy to start Ray in time
        check_versions(
            str(error),
            where=where,
            expected="the same Python on every node, to its patch number",
            do="use that Python here; or, where only the patch number differs, set "
            "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor here and where Ray is started",
        )
        do = START_ONE if "ADDRESS" in where.upper() else "try again, with less to do for this machine"
        raise RunError(f"cannot reach Ray: {first_line(error)}", where=where, do=do) from None
    silence_workers()  # raytrec reports worker exits itself
    if current_thread() is main_thread():  # Ray's own handler exits with 15
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _is_on_loopback(address: str) -> bool:
    """Whether a cluster listens on this machine's loopback alone, as `raytrec head` starts it.

    Ray would look for it, and make this driver listen, at the machine's own address (see stay_on_loopback).
    """
    try:
        target = bootstrap_address(address)
        host, _, port = (target or "").rpartition(":")
        own = bool(host) and host == own_address()
    except (ConnectionError, ValueError):  # ray://, or no cluster; connecting will report it
        return False
    return own and not listens(host, int(port)) and listens("127.0.0.1", int(port))


def on_node(node: str) -> dict[str, Any]:
    """Options of a task or actor that needs no CPU, and runs on the node of this id or not at all."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def stay_on_loopback() -> None:
    """Lets nothing of a local Ray, or of gloo and NCCL between its workers, listen beyond this machine.

    Ray 2.60 turns a node address of 127.0.0.1 back into the machine's own and its servers then listen on all
    interfaces (`services.resolve_ip_for_localhost`), unless a setting, the default on macOS and Windows,
    rules out a cluster of several nodes. Its processes inherit the environment; the constant is for this one,
    where Ray may have been imported before.
    """
    os.environ |= loopback_environment()
    keep_loopback()


def loopback_environment() -> dict[str, str]:
    """The environment in which a Ray that is started, gloo and NCCL stay on loopback: stay_on_loopback."""
    mine = {name: os.environ.get(name, value) for name, value in socket_interfaces("lo").items()}
    return loopback_setting() | (mine if sys.platform == "linux" else {})


def socket_interfaces(interface: str) -> dict[str, str]:
    """The environment that keeps gloo, and NCCL unless its files set another, to one interface.

    To NCCL a name is a prefix (eth1 is eth10, too), unless it begins with "=". NCCL takes from its files what
    the environment does not have (NCCL 2.29.7: src/misc/param.cc), so what is set here would override what an
    administrator has written there.
    """
    gloo = {"GLOO_SOCKET_IFNAME": interface}
    return gloo if in_nccl_files("NCCL_SOCKET_IFNAME") else gloo | {"NCCL_SOCKET_IFNAME": f"={interface}"}


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def in_nccl_files(name: str) -> bool:
    """Whether a file of NCCL's on this machine sets a variable."""
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")  # a user may have no home
    for file in (Path(own), Path("/etc/nccl.conf")):
        with suppress(OSError):
            if any(line.startswith(f"{name}=") for line in file.read_text().splitlines()):
                return True
    return False
