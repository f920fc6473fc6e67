"""Private names of Ray (2.60.0) for starting a local Ray cluster. Ray is imported by functions only."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from raytrec.compat.versions import private, replace_private, set_private

# File in RAY_TMPDIR that contains HOST:PORT of the cluster that was started last.
CURRENT_CLUSTER_FILE = "ray/ray_current_cluster"
# Part of the error if a node is not up after Ray's fixed 30 s.
STARTUP_TIMEOUT_TEXT = "timed out during startup"
# Longest path that Ray appends to RAY_TMPDIR; the length of a Unix socket's address is limited.
LONGEST_SOCKET_PATH = "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
# Prefixes of environment variables that Python, C libraries or Ray read when they are loaded; prefixes of exceptions,
# which are read later or again; and variables whose value cannot be changed after a fork.
LOAD_TIME_PREFIXES = ("LD_", "MALLOC_", "PYTHON", "RAY_")
LATE_READ_PREFIXES = ("RAY_AUTH_", "RAY_TRAIN_", "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC")
UNCHANGEABLE_VARIABLES = ("RAY_JOB_ID", "RAY_RAYLET_PID")
# Makes ray.init return without waiting for prestarted workers.
NO_PRESTART_ENV = {"RAY_prestart_worker_first_driver": "0"}
# Settings that make periodic work rare in the processes of a Ray cluster for a single run (ray_config_def.h).
INFREQUENT_WORK_SETTINGS = {
    "enable_metrics_collection": False,  # needed by a dashboard or Prometheus; takes half the CPU time of an idle Ray
    "task_events_report_interval_ms": 0,  # 0: never; needed to list tasks
    "event_stats": False,  # durations of handlers in Ray's logs
    "io_context_monitor_probe_interval_ms": 10_000,
    "report_worker_backlog_interval_ms": 10_000,  # needed by an autoscaler
    "raylet_check_gc_period_milliseconds": 1_000,
    "kill_idle_workers_interval_ms": 1_000,
}
# The same for Ray's agent, which measures all processes for the dashboard (dashboard/modules/reporter).
INFREQUENT_REPORTS_ENV = {"REPORTER_UPDATE_INTERVAL_MS": "600000"}
# Modules with the actors of Ray Serve.
SERVE_MODULES = ("ray.serve._private.controller", "ray.serve._private.replica")
UNNEEDED_NODE_METHODS = ("start_api_server", "start_monitor", "start_log_monitor")  # methods of Ray's Node


def get_loopback_env() -> dict[str, str]:
    """Return environment variables that stop Ray from replacing 127.0.0.1 with the machine's own address."""
    from ray._private import ray_constants

    return {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}


def keep_loopback() -> None:
    """Apply `get_loopback_env` to this process, in which Ray may already be imported."""
    from ray._private import ray_constants

    set_private(ray_constants, "ENABLE_RAY_CLUSTER", False, "ray")


def disable_auto_connect() -> None:
    """Prevent calls to Ray from automatically starting or joining a cluster, for the rest of this process."""
    from ray._private import auto_init_hook

    set_private(auto_init_hook, "enable_auto_connect", False, "ray")


def silence_workers() -> None:
    """Suppress workers' messages that Ray prints when processes exit, despite `log_to_driver=False`."""
    import ray

    set_private(ray._private.worker, "print_to_stdstream", lambda data, ignore_prefix: None, "ray")


def make_folder_arguments(folder: Path) -> dict[str, Any]:
    """Return arguments to ray.init for a local Ray cluster that keeps its files in a folder."""
    return {"_temp_dir": str(folder)}


def make_idle_arguments() -> dict[str, Any]:
    """Return arguments to ray.init for a local Ray cluster whose idle processes leave the cores to training.

    Environment variables, such as RAY_enable_metrics_collection=1, take precedence.
    """
    settings = {name: value for name, value in INFREQUENT_WORK_SETTINGS.items() if f"RAY_{name}" not in os.environ}
    return {"_system_config": settings}


def get_logs_folder() -> Path:
    """Return the log folder of the Ray node that this process has started or joined."""
    import ray

    return Path(ray._private.worker._global_node.get_logs_dir_path())


def replace_popen(
    options: dict[str, Any], env: dict[str, str], on_process_start: Callable[[int, bool], None]
) -> AbstractContextManager[None]:
    """Make Ray start its processes in the block with additional options of subprocess.Popen.

    Args:
        options: Additional options, other than `env`.
        env: Additional environment variables.
        on_process_start: Function called with the id of each started process, and True if the process is the raylet.

    Raises:
        RunError: As for `versions.private`.
    """
    from ray._private import services

    original_popen = services.ConsolePopen

    class CustomPopen(original_popen):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **settings: Any):
            settings["env"] = (settings.get("env") or os.environ) | env
            super().__init__(*args, **settings, **options)
            on_process_start(self.pid, args[0][0] == services.RAYLET_EXECUTABLE)

    return replace_private("ray", (services, "ConsolePopen", CustomPopen))


def omit_unneeded_processes() -> AbstractContextManager[None]:
    """Make a local Ray cluster that is started in the block omit unneeded processes.

    Three processes are omitted. Each imports Ray, which takes a second; ray.init waits for one of them. The
    API server belongs to the dashboard, which is disabled. The autoscaler's monitor is for clusters that grow.
    The log monitor forwards logs to the driver; this forwarding is disabled.
    """
    from ray._private.node import Node

    return replace_private("ray", *((Node, name, lambda self, **_: None) for name in UNNEEDED_NODE_METHODS))


def replace_worker_script(script: Path) -> AbstractContextManager[None]:
    """Make a Ray cluster that is started in the block use this script instead of Ray's setup_worker.py."""
    from ray._private import ray_constants

    return replace_private("ray", (ray_constants, "SETUP_WORKER_FILENAME", str(script)))


def get_first_job_env(raylet: int) -> dict[str, str]:
    """Return the environment variables that a raylet adds for workers of a new cluster's first job.

    `raylet` is the process id of the raylet.
    """
    return dict(zip(UNCHANGEABLE_VARIABLES, ("01000000", str(raylet)), strict=True))


def draw_actor_class_ids_from(random: Callable[[int], bytes]) -> AbstractContextManager[None]:
    """Make Ray draw ids of actor classes from `random` in the block, so that Ray's generator stays unseeded.

    `random` returns a given number of random bytes.
    """
    import ray.actor

    original_class = private(ray.actor, "ActorClassID", "ray")

    class RandomClassID:
        @staticmethod
        def from_random() -> Any:
            return original_class(random(original_class.size()))

    return replace_private("ray", (ray.actor, "ActorClassID", RandomClassID))


def read_token_again() -> None:
    """Make Ray read its RAY_* settings, such as RAY_AUTH_MODE, again; Ray normally reads them only at import."""
    import ray._raylet as raylet

    private(raylet, "Config", "ray").initialize("")
