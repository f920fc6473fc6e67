"""Start a local Ray cluster on loopback, or connect to a running cluster."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any, NoReturn

from raytrec.cluster.access import check_cluster, check_version_mismatch, get_start_hint, use_token
from raytrec.cluster.lifeline import GCS, RAYLET, RayLost
from raytrec.cluster.local_ray import create_private_folder, isolate_sessions, list_local_heads, listens
from raytrec.cluster.warm_process import TRAINING, fork_workers, warm_up
from raytrec.common.errors import RunError, get_first_line
from raytrec.compat import ray_start
from raytrec.compat.ray_core import JOB_CONFIG_VARIABLE, get_own_address, resolve_bootstrap_address
from raytrec.compat.versions import require_versions

# Lost part of Ray → time for ray.shutdown() to return. Ray may need 13 s to notice the end of its raylet.
RAY_SHUTDOWN_TIMEOUT_S = {RAYLET: 20.0, GCS: 1.0}


def is_job_driver() -> bool:
    """Return True if this process is the driver of a submitted Ray job."""
    return JOB_CONFIG_VARIABLE in os.environ


def starts_local_ray(address: str | None) -> bool:
    """Return True if a run with this scaling.address starts its own Ray cluster on this machine."""
    return not (address or os.environ.get("RAY_ADDRESS") or is_job_driver())


def describe_connection(address: str | None) -> str:
    """Return the text that a command with this scaling.address shows while it starts Ray or connects to a cluster."""
    place = address or os.environ.get("RAY_ADDRESS", "auto")
    connecting = "connecting to the Ray cluster" + (f" at {place}" if place != "auto" else "")
    return "starting Ray" if starts_local_ray(address) else connecting


def warm_up_early(purpose: str = TRAINING) -> None:
    """Start the warm process (warm_process.py) if this command probably starts its own Ray cluster.

    Commands call this function before their other imports, when the configuration has not been read yet. If this
    process has already imported Ray, it is not a new command, and the call does nothing.

    Args:
        purpose: TRAINING or SERVING, as in `warm_process.warm_up`.
    """
    if starts_local_ray(None) and "ray" not in sys.modules:
        warm_up(purpose)


@contextmanager
def ray_session(address: str | None = None, num_cpus: int | None = None, any_versions: bool = False) -> Iterator[None]:
    """Connect to Ray, or start a local Ray cluster, for the duration of the block.

    The block uses the first of these clusters that is given: a cluster to which this process is already connected,
    and stays connected; the cluster at `address`; the cluster in RAY_ADDRESS, which Ray sets for the driver of a job;
    or else a new local cluster. A local cluster listens on loopback only, and has no dashboard. It exports metrics for
    Prometheus only with RAY_enable_metrics_collection=1. Its files are in a private folder, which is removed when the
    cluster stops at the end of the block. If the main thread connects or starts a cluster, SIGTERM from then on exits
    this process with code 143, also after the block.

    Args:
        address: Address of a running cluster: 'auto', HOST:PORT or ray://HOST:PORT.
        num_cpus: Logical CPUs of a new local cluster; default: all CPUs of the machine.
        any_versions: True to skip the check of installed package versions.

    Raises:
        RunError: A package has an unsupported version; the token is missing, or its file cannot be created or read;
            the folder of a local cluster cannot be created; a local cluster does not start; or the running cluster
            cannot be reached, is one of several (auto), refuses the token, was started without the token that this
            process has, or runs another version of Ray or Python.
    """
    if not any_versions:
        require_versions()
    import ray

    if ray.is_initialized():
        yield
        return
    in_environment = os.environ.get("RAY_ADDRESS")
    alone = not (address or in_environment)
    use_token(create=alone, is_local_only=alone)
    source = f"scaling.address={address} (or --address)" if address else f"RAY_ADDRESS={in_environment}"
    with _start_local_ray(num_cpus) if alone else _join_cluster(address or in_environment, source):
        yield


@contextmanager
def _join_cluster(address: str, source: str) -> Iterator[None]:
    """Connect to a running cluster for the block; `source` is as in `check_cluster`, and errors as in `ray_session`."""
    if address == "auto" and not os.environ.get("RAY_ADDRESS") and (addresses := list_local_heads()):
        address = _require_single_address(addresses, source)
    if _is_on_loopback(address):
        stay_on_loopback()
    check_cluster(address, source)
    with _shut_down_in_time():
        _connect(source, address=address)
        yield


@contextmanager
def _start_local_ray(num_cpus: int | None) -> Iterator[None]:
    """Start a local Ray cluster for this process alone, and stop it at the end of the block.

    If Ray does not start within 30 s (a constant of Ray), e.g. on a machine with a high load, start it once more.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(_start_ray_once(num_cpus))
        except RunError as error:
            if ray_start.STARTUP_TIMEOUT_TEXT not in error.what:
                raise
            stack.enter_context(_start_ray_once(num_cpus))
        yield


@contextmanager
def _start_ray_once(num_cpus: int | None) -> Iterator[None]:
    stay_on_loopback()
    options = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False, **ray_start.make_idle_arguments()}
    with (
        create_private_folder() as folder,
        fork_workers(folder) as (environment, on_raylet),
        isolate_sessions(folder, environment, on_raylet),
        _shut_down_in_time(),
    ):
        with ray_start.omit_unneeded_processes():
            _connect("a new local cluster", **ray_start.make_folder_arguments(folder / "ray"), **options)
        _state.is_own = True
        yield


@dataclass
class _RayState:
    """State of the Ray cluster that this process uses.

    Attributes:
        is_own: True while a cluster that this process started is running.
        stuck: True if ray.shutdown() did not return within RAY_SHUTDOWN_TIMEOUT_S.
    """

    is_own: bool = False
    stuck: bool = False


_state = _RayState()


def has_local_ray() -> bool:
    """Return True while a local Ray cluster runs that `ray_session` has started for this process alone."""
    return _state.is_own


def find_log_folder() -> Path | None:
    """Return the log folder of this process's local cluster, or None without such a cluster.

    The folder is removed when the cluster stops.
    """
    return ray_start.get_logs_folder() if _state.is_own else None


def is_stuck() -> bool:
    """Return True if this process cannot start another Ray cluster because ray.shutdown() has not returned."""
    return _state.stuck


def leave(code: int) -> NoReturn:
    """Exit this process with a code, without cleanup if a pending ray.shutdown() would delay the exit by a minute.

    Raises:
        SystemExit: No ray.shutdown() is pending.
    """
    if _state.stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def _shut_down_in_time() -> Iterator[None]:
    """Call ray.shutdown() at the end of the block; after a RayLost, wait at most RAY_SHUTDOWN_TIMEOUT_S for it."""
    import ray

    try:
        yield
    except RayLost as lost:
        thread = Thread(target=ray.shutdown, daemon=True)
        thread.start()
        thread.join(RAY_SHUTDOWN_TIMEOUT_S[lost.part])
        _state.stuck = thread.is_alive()
        raise
    finally:
        _state.is_own = False
        if not _state.stuck:
            ray.shutdown()


def _require_single_address(addresses: list[str], source: str) -> str:
    """Return the only address in a nonempty list; raise a RunError if there are several.

    Ray itself would choose any of the clusters, even the local cluster of another run.
    """
    if len(addresses) > 1:
        raise RunError(
            f"there are {len(addresses)} clusters on this machine: {', '.join(sorted(addresses))}",
            where=source,
            expected="the address of one cluster",
            do="use one of these addresses instead of auto",
        )
    return addresses[0]


def _connect(where: str, **options: Any) -> None:
    import ray

    # After this cluster has ended, late calls from other threads must not start or join another cluster.
    ray_start.disable_auto_connect()
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray raises a plain Exception if it does not start in time
        check_version_mismatch(
            str(error),
            where=where,
            expected="the same Python version on every node, including the patch number",
            do="use that Python version here; if only the patch number differs, set "
            "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor here and where Ray is started",
        )
        joins, is_late = "ADDRESS" in where.upper(), ray_start.STARTUP_TIMEOUT_TEXT in str(error)
        do = get_start_hint(where) if joins else "try again when the machine has less load" if is_late else None
        what = f"cannot {'connect to' if joins else 'start'} Ray: {get_first_line(error)}"
        raise RunError(what, where=where, do=do) from None
    ray_start.silence_workers()  # raytrec reports worker exits itself
    if current_thread() is main_thread():  # the exit code of Ray's own handler is 15
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _is_on_loopback(address: str) -> bool:
    """Return True if the cluster at an address listens only on loopback, as clusters of `raytrec head` do.

    For such a cluster, Ray would by default connect to the machine's network address, and make this driver listen
    there (see `stay_on_loopback`).
    """
    try:
        target = resolve_bootstrap_address(address)
        host, _, port = (target or "").rpartition(":")
        own = bool(host) and host == get_own_address()
    except (ConnectionError, ValueError):  # ray://, or no cluster: connecting reports the error
        return False
    return own and not listens(host, int(port)) and listens("127.0.0.1", int(port))


def pin_to_node(node: str) -> dict[str, Any]:
    """Return the keyword arguments of .options() for a task or actor that reserves no CPU and runs only on this node.

    `node` is Ray's id of the node.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def stay_on_loopback() -> None:
    """Make a local Ray cluster, and gloo and NCCL between its workers, listen on loopback only.

    Ray 2.60 replaces a node address of 127.0.0.1 with the machine's network address
    (`services.resolve_ip_for_localhost`), and its servers then listen on all interfaces. A setting that disables
    multi-node clusters, the default on macOS and Windows, prevents the replacement. Ray's processes inherit the
    setting from the environment. If this process has already imported Ray, the constant in Ray's module is set too.
    """
    os.environ |= get_loopback_environment()
    ray_start.keep_loopback()


def get_loopback_environment() -> dict[str, str]:
    """Return the environment variables that limit a new cluster and, on Linux, gloo and NCCL to loopback.

    Interfaces that the environment or NCCL's configuration files already set for gloo or NCCL are kept.
    """
    interfaces = {name: os.environ.get(name, value) for name, value in get_interface_variables("lo").items()}
    return ray_start.get_loopback_env() | (interfaces if sys.platform == "linux" else {})


def get_interface_variables(interface: str) -> dict[str, str]:
    """Return the environment variables with which gloo and NCCL use only one network interface.

    NCCL treats a name as a prefix (eth1 also matches eth10) unless it begins with "=". The environment takes
    precedence over NCCL's configuration files (NCCL 2.29.7: src/misc/param.cc). NCCL's variable is therefore omitted
    if these files set the interface.
    """
    gloo = {"GLOO_SOCKET_IFNAME": interface}
    return gloo if is_set_in_nccl_files("NCCL_SOCKET_IFNAME") else gloo | {"NCCL_SOCKET_IFNAME": f"={interface}"}


def find_interface(address: str) -> str | None:
    """Return the name of this machine's network interface with the IP address `address`, or None if none has it."""
    import psutil

    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if any(each.address == address for each in found)), None)


def is_set_in_nccl_files(name: str) -> bool:
    """Return True if one of NCCL's configuration files for this user sets the variable `name`."""
    # For a user without a home folder, `~` is not expanded, and no file exists.
    user_file = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    for file in (Path(user_file), Path("/etc/nccl.conf")):
        with suppress(OSError):
            if any(line.startswith(f"{name}=") for line in file.read_text(errors="replace").splitlines()):
                return True
    return False
