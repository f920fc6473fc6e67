"""Private names of Ray (2.60.0) that a local Ray is started with. Functions import Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from raytrec.compat.versions import private, replacing

# Below RAY_TMPDIR: HOST:PORT of the cluster that was started last.
CURRENT_CLUSTER = "ray/ray_current_cluster"
# What Ray appends to RAY_TMPDIR; the address of a Unix socket must not be too long.
SOCKET = "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
# Variables of the environment that Python, C libraries or Ray read when they are loaded, but for those that
# are read later, or again; and those that no later process can read again.
READ_AT_ONCE = ("LD_", "MALLOC_", "PYTHON", "RAY_")
READ_LATER = ("RAY_AUTH_", "RAY_TRAIN_", "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC")
READ_FOR_EVER = ("RAY_JOB_ID", "RAY_RAYLET_PID")
# Lets ray.init return without waiting for workers that are started before they are needed.
ON_DEMAND = {"RAY_prestart_worker_first_driver": "0"}
# What Ray's processes do at intervals without being asked (ray_config_def.h), in a Ray for one run.
SELDOM = {
    "enable_metrics_collection": False,  # for a dashboard or Prometheus: half of what an idle Ray takes
    "task_events_report_interval_ms": 0,  # 0: never; for lists of tasks
    "event_stats": False,  # how long each handler takes, for Ray's logs
    "io_context_monitor_probe_interval_ms": 10_000,
    "report_worker_backlog_interval_ms": 10_000,  # for an autoscaler
    "raylet_check_gc_period_milliseconds": 1_000,
    "kill_idle_workers_interval_ms": 1_000,
}
# The same for its agent, which measures all processes for the dashboard (dashboard/modules/reporter).
REPORTS_SELDOM = {"REPORTER_UPDATE_INTERVAL_MS": "600000"}
UNNEEDED = ("start_api_server", "start_monitor", "start_log_monitor")  # methods of Ray's Node


def loopback_setting() -> dict[str, str]:
    """The environment in which Ray keeps 127.0.0.1, rather than turning it into the machine's own address."""
    from ray._private import ray_constants

    return {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}


def keep_loopback() -> None:
    """The same for this process, where Ray may have been imported before its environment was set."""
    from ray._private import ray_constants

    _replace(ray_constants, "ENABLE_RAY_CLUSTER", False)


def connect_by_hand() -> None:
    """Lets no call to Ray start or join a cluster by itself."""
    from ray._private import auto_init_hook

    _replace(auto_init_hook, "enable_auto_connect", False)


def silence_workers() -> None:
    """Drops what `log_to_driver=False` leaves: lines of advice on every process that ends."""
    import ray

    _replace(ray._private.worker, "print_to_stdstream", lambda data, ignore_prefix: None)


def in_folder(folder: Path) -> dict[str, Any]:
    """Arguments of ray.init for a local Ray that keeps its files there."""
    return {"_temp_dir": str(folder)}


def few_wakeups() -> dict[str, Any]:
    """Arguments of ray.init for a local Ray whose idle processes leave the cores to those who train.

    Settings of the environment (RAY_enable_metrics_collection=1) stay.
    """
    settings = {name: value for name, value in SELDOM.items() if f"RAY_{name}" not in os.environ}
    return {"_system_config": settings}


def logs_folder() -> Path:
    """Where the Ray that this process has started keeps its logs."""
    import ray

    return Path(ray._private.worker._global_node.get_logs_dir_path())


@contextmanager
def popen_replaced(
    options: dict[str, Any], env: dict[str, str], began: Callable[[int, bool], None]
) -> Iterator[None]:
    """A block in which Ray starts its processes with further options of subprocess.Popen.

    Args:
        env: added to their environment.
        began: called with the id of each, and whether it is the raylet.
    """
    from ray._private import services

    before = services.ConsolePopen

    class Apart(before):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **given: Any):
            given["env"] = (given.get("env") or os.environ) | env
            super().__init__(*args, **given, **options)
            began(self.pid, args[0][0] == services.RAYLET_EXECUTABLE)

    with replacing(services, "ConsolePopen", Apart, "ray"):
        yield


@contextmanager
def only_what_is_needed() -> Iterator[None]:
    """A block in which a local Ray is started without the processes that it has no use for.

    These are three, of which each imports Ray for a second, one of them while ray.init waits: the API server
    (of the dashboard, which is left out), the autoscaler's monitor (of a cluster that does not grow), and
    the log monitor (of logs that are not passed on to the driver).
    """
    from ray._private.node import Node

    with ExitStack() as stack:
        for name in UNNEEDED:
            stack.enter_context(replacing(Node, name, lambda self, **_: None, "ray"))
        yield


def workers_started_by(script: Path) -> AbstractContextManager[None]:
    """A block in which a Ray that is started has this script in the place of its setup_worker.py."""
    from ray._private import ray_constants

    return replacing(ray_constants, "SETUP_WORKER_FILENAME", str(script), "ray")


def first_job(raylet: int) -> dict[str, str]:
    """What the raylet adds to the environment of workers of a new cluster's first job.

    Args:
        raylet: process id.
    """
    return dict(zip(READ_FOR_EVER, ("01000000", str(raylet)), strict=True))


def actor_class_ids_from(random: Callable[[int], bytes]) -> AbstractContextManager[None]:
    """A block in which the ids of actor classes are not drawn from Ray's generator, which stays unseeded.

    Args:
        random: number of bytes → bytes.
    """
    import ray.actor

    before = private(ray.actor, "ActorClassID", "ray")

    class FromOutside:
        @staticmethod
        def from_random() -> Any:
            return before(random(before.size()))

    return replacing(ray.actor, "ActorClassID", FromOutside, "ray")


def read_token_again() -> None:
    """Lets Ray, which reads its settings when it is imported, read RAY_AUTH_* again."""
    import ray._raylet as raylet

    private(raylet, "Config", "ray").initialize("")


def _replace(module: Any, name: str, value: Any) -> None:
    """Sets a name of a module of Ray's, or raises RunError where Ray reads no such name."""
    private(module, name, "ray")
    setattr(module, name, value)
