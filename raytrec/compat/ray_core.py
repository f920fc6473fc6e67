"""Private names of Ray (2.60.0): cluster, processes, errors, libraries. Ray is imported by functions only.

GCS is Ray's global control service, a server on the head node.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from raytrec.compat.versions import private

JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in the environment of a job's driver
# Calls without side effects, which check whether each of the two kinds of servers accepts the token.
GCS_PROBE_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
CLIENT_PROBE_METHOD = "/ray.rpc.RayletDriver/ClusterInfo"
HEAD_PROCESSES = ("gcs_server", "ray.util.client.server")  # processes that serve the addresses of a cluster
# From ray/train/v2/_internal/constants.py: interval between checks for exits and errors of workers, timeout for the
# start of a worker group, and whether Ray watches for nodes that will be preempted.
HEALTH_CHECK_INTERVAL_S = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
WORKER_GROUP_START_TIMEOUT_S = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
ENABLE_PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
TRAIN_SNAPSHOT_FILE = "checkpoint_manager_snapshot.json"  # written by Ray Train to the run's folder
CLIENT_REJECTED_TEXT = "Initialization failure from server"  # in Ray client's error, with the server's traceback
CLIENT_NOT_STARTED_TEXT = "Starting Ray client server failed"  # in that traceback if a process has died
NO_AGENT_TEXT = "No available agent"  # in the Job API's error while a cluster starts


def is_head(command: list[str]) -> bool:
    """Return True if a process with this command line (a list of words) serves a cluster's HOST:PORT or ray:// URL."""
    return any(Path(word).name in HEAD_PROCESSES for word in command)


def list_alive_nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster that are alive, in the format of ray.nodes()."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def list_free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of alive nodes: node id → name of a resource → amount.

    A resource that is completely in use may be missing.
    """
    import ray

    return ray._private.state.available_resources_per_node()


def list_draining_nodes() -> set[str]:
    """Return the ids of nodes that are being drained; ray.train.get_preemption_info uses the same source."""
    import ray

    return set(ray._private.state.state.get_draining_nodes() or {})


def get_actor_state(actor_id: str) -> dict[str, Any]:
    """Return the GCS's record of an actor in this process's cluster, such as its State, or {} if it is unknown."""
    import ray

    return ray._private.state.actors(actor_id) or {}


def store_actor_value(value: bytes) -> None:
    """Store a value for the current actor in the GCS, where it survives restarts of the actor."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_make_actor_key(), value)


def load_actor_value() -> bytes | None:
    """Return the value stored by `store_actor_value` for the current actor, or None if there is none."""
    from ray.experimental import internal_kv

    return internal_kv._internal_kv_get(_make_actor_key())


def _make_actor_key() -> str:
    import ray

    return f"raytrec-{ray.get_runtime_context().get_actor_id()}"


def has_autoscaler() -> bool:
    """Return True if the cluster has an autoscaler: `ray up` and KubeRay set a type for each node."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    cluster = get_cluster_resource_state(make_gcs_client(ray.get_runtime_context().gcs_address))
    return any(node.ray_node_type_name for node in cluster.node_states)


def make_gcs_client(address: str) -> Any:
    """Return a client for the GCS at HOST:PORT."""
    import ray._raylet as raylet

    return private(raylet, "GcsClient", "ray")(address=address)


def drain(gcs_address: str, node: str, why: str, deadline_ms: int) -> tuple[bool, str]:
    """Drain a node as if it were preempted; return (True if Ray accepts the request, reason for refusal).

    Args:
        gcs_address: HOST:PORT of the cluster's GCS.
        node: Ray's id of the node.
        why: Reason that Ray records.
        deadline_ms: Unix time in milliseconds until which processes on the node can run.
    """
    from ray.core.generated import autoscaler_pb2

    preemption = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    return make_gcs_client(gcs_address).drain_node(node, preemption, why, deadline_ms)


def find_head_nodes() -> list[str]:
    """Return a list that contains the id of the head node, or [] if the head is not alive."""
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME

    return [node["NodeID"] for node in list_alive_nodes() if HEAD_NODE_RESOURCE_NAME in node["Resources"]]


def measure_system_memory() -> int:
    """Return the total main memory of this machine, or of this process's container, in bytes."""
    from ray._common.utils import get_system_memory

    return get_system_memory()


def measure_available_memory() -> int:
    """Return the main memory that is not in use on this machine, or in this process's container, in bytes."""
    import psutil
    from ray._private.utils import estimate_available_memory

    return min(psutil.virtual_memory().available, estimate_available_memory())


def resolve_bootstrap_address(address: str) -> str | None:
    """Return the HOST:PORT of the cluster that Ray joins for an address, or None for "local".

    For "auto", RAY_ADDRESS takes precedence over the clusters on this machine. The machine's own address replaces
    127.0.0.1 and localhost, unless `ray_start.keep_loopback` has been called.

    Raises:
        ConnectionError: The address is "auto", and no cluster is running on this machine.
        ValueError: The address is not valid.
    """
    from ray._private import services

    return services.canonicalize_bootstrap_address(address)


def get_own_address() -> str:
    """Return the address by which Ray identifies this machine."""
    from ray._private import services

    return services.get_node_ip_address()


def is_ray_process(pid: int) -> bool:
    """Return True if a process on this machine has the title of a Ray worker.

    Raises:
        OSError: The process has exited.
    """
    return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()


def get_submission_id() -> str | None:
    """Return the id under which Ray's Job API submitted this process, or None if it was not submitted."""
    try:
        return json.loads(os.environ.get(JOB_CONFIG_VARIABLE, "{}"))["metadata"]["job_submission_id"]
    except (KeyError, ValueError):
        return None


def get_token_metadata() -> tuple[tuple[str, str], ...]:
    """Return the gRPC metadata with the token that Ray sends with each call; () without a token or authentication."""
    from ray._private.authentication import grpc_authentication_client_interceptor as interceptor

    return interceptor._get_authentication_metadata_tuple()


def find_nodes_without_gpus() -> dict[str, float]:
    """Return node id → number of CPUs of nodes with CPUs but no GPUs; {} if no node of the cluster has GPUs."""
    alive = {node["NodeID"]: node["Resources"] for node in list_alive_nodes()}
    if not any(has.get("GPU") for has in alive.values()):
        return {}
    return {node: has["CPU"] for node, has in alive.items() if has.get("CPU") and not has.get("GPU")}


def unwrap_health_check_failure(error: BaseException) -> BaseException:
    """Return the cause of a failed worker health check; other errors are returned unchanged."""
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    return error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else error


def is_node_loss(error: BaseException) -> bool:
    """Return True if a Ray error means that the node of a process has died or was preempted."""
    from ray.exceptions import NodeDiedError, RayActorError

    preempted = isinstance(error, RayActorError) and error.preempted
    return isinstance(error, NodeDiedError) or preempted or "node has died" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that Ray killed a process because its node ran low on memory."""
    from ray.exceptions import OutOfMemoryError

    return isinstance(error, OutOfMemoryError) or "running low on memory" in str(error)


def get_server_version(client: Any) -> str:
    """Return the Ray version of the cluster that a JobSubmissionClient has queried."""
    return private(client, "_server_ray_version", "ray")


def silence_uploads() -> None:
    """Silence log lines about files that are uploaded with a job."""
    for logger in (
        "ray.dashboard.modules.job.sdk",
        "ray.dashboard.modules.dashboard_sdk",
        "ray._private.runtime_env.packaging",
    ):
        logging.getLogger(logger).setLevel(logging.WARNING)


def parse_version_mismatch(text: str) -> tuple[str, str] | None:
    """Return (Ray version, Python version) of a cluster that rejected other versions; None for other error texts."""
    versions = re.findall(r"(Ray|Python): (\S+)", text) if "ersion mismatch" in text else []
    return (versions[0][1], versions[1][1]) if len(versions) > 1 else None


def load_node_providers() -> tuple[Any, Any]:
    """Return Ray's node provider classes (AWS, GCP).

    Raises:
        ImportError: The packages in requirements/cloud.txt are not installed.
    """
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.gcp.node_provider import GCPNodeProvider

    return AWSNodeProvider, GCPNodeProvider


def prepare_replica() -> None:
    """Set up the process of a Ray Serve replica; called by the replica's constructor.

    The replica's server for calls between deployments accepts pickles from any client, so the server is made to
    listen on loopback instead of all interfaces. No process calls this server if RAY_SERVE_USE_GRPC_BY_DEFAULT
    is off. Serve must not freeze the garbage collector after the constructor; the first model would never be
    freed.
    """
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]:", "127.0.0.1:"))
    replica.RAY_SERVE_FREEZE_GC_ON_STARTUP = False
