"""Private names of Ray (2.60.0): its cluster, processes, errors and libraries. Functions import Ray."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from raytrec.compat.versions import private

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what Ray sets in the environment of a job's driver
# Calls that exist on the two kinds of servers and change nothing; what matters is whether they are refused.
GCS_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
CLIENT_CALL = "/ray.rpc.RayletDriver/ClusterInfo"
HEAD_PROCESSES = ("gcs_server", "ray.util.client.server")  # that listen at the addresses of a cluster
# ray/train/v2/_internal/constants.py. How soon the end, or an error, is seen; how long Ray waits for places
# that are not there after all; and whether it watches for nodes that will go.
HEALTH_CHECK_INTERVAL_S = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
WORKER_GROUP_START_TIMEOUT_S = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
ENABLE_PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
SNAPSHOT = "checkpoint_manager_snapshot.json"  # what Ray Train notes in the folder of a run
NOT_TAKEN = "Initialization failure from server"  # Ray client's error, with the server's traceback
NOT_STARTED = "Starting Ray client server failed"  # the traceback, when a process has died
NO_AGENT = "No available agent"  # the Job API's error while a cluster starts


def is_head(command: list[str]) -> bool:
    """Whether a process of this command listens at HOST:PORT or ray://HOST:PORT of a cluster."""
    return any(Path(word).name in HEAD_PROCESSES for word in command)


def alive_nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster that are alive, as in ray.nodes()."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def available_resources() -> dict[str, dict[str, float]]:
    """Node's id → resources that are free."""
    import ray

    return ray._private.state.available_resources_per_node()


def draining_nodes() -> set[str]:
    """Ids of nodes that are being drained (ray.train.get_preemption_info has the same source)."""
    import ray

    return set(ray._private.state.state.get_draining_nodes() or {})


def actor_state(actor_id: str) -> dict[str, Any]:
    """What the GCS of this process's own cluster knows of an actor; empty: nothing."""
    import ray

    return ray._private.state.actors(actor_id) or {}


def keep_for_actor(value: bytes) -> None:
    """In an actor: keeps a value for when Ray starts it again, in the GCS, as long as that runs."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_key_of_actor(), value)


def kept_for_actor() -> bytes | None:
    """In an actor: what it has kept; None: nothing."""
    from ray.experimental import internal_kv

    return internal_kv._internal_kv_get(_key_of_actor())


def _key_of_actor() -> str:
    import ray

    return f"raytrec-{ray.get_runtime_context().get_actor_id()}"


def starts_nodes() -> bool:
    """Whether an autoscaler starts nodes: `ray up` and KubeRay give each node, the head too, a type."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    cluster = get_cluster_resource_state(gcs_client(ray.get_runtime_context().gcs_address))
    return any(node.ray_node_type_name for node in cluster.node_states)


def gcs_client(address: str) -> Any:
    """A client of the GCS at HOST:PORT."""
    import ray._raylet as raylet

    return private(raylet, "GcsClient", "ray")(address=address)


def drain(gcs_address: str, node: str, why: str, deadline_ms: int) -> tuple[bool, str]:
    """Marks a node as one that is taken away; whether Ray accepts, and why not.

    Args:
        deadline_ms: Unix time.
    """
    from ray.core.generated import autoscaler_pb2

    preemption = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    return gcs_client(gcs_address).drain_node(node, preemption, why, deadline_ms)


def head_nodes() -> list[str]:
    """Ids of the head, if it is alive."""
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME

    return [node["NodeID"] for node in alive_nodes() if HEAD_NODE_RESOURCE_NAME in node["Resources"]]


def system_memory() -> int:
    """Bytes of main memory of this machine, or of the container that this process is in."""
    from ray._common.utils import get_system_memory

    return get_system_memory()


def bootstrap_address(address: str) -> str | None:
    """HOST:PORT that Ray would join for an address, with 127.0.0.1 turned into the machine's own.

    Raises:
        ConnectionError, ValueError: there is no cluster, or it is not an address.
    """
    from ray._private import services

    return services.canonicalize_bootstrap_address(address)


def own_address() -> str:
    """The address by which Ray knows this machine."""
    from ray._private import services

    return services.get_node_ip_address()


def is_ray_process(pid: int) -> bool:
    """Whether a process of this machine is a worker of Ray's, by its title.

    Raises:
        OSError: it is gone.
    """
    return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()


def job_id() -> str | None:
    """The id under which this process was submitted to Ray's Job API; None: it was not."""
    try:
        return json.loads(os.environ.get(JOB_CONFIG, "{}"))["metadata"]["job_submission_id"]
    except (KeyError, ValueError):
        return None


def token_metadata() -> tuple[tuple[str, str], ...]:
    """What Ray sends with each call; nothing where it asks for no token."""
    from ray._private.authentication import grpc_authentication_client_interceptor as interceptor

    return interceptor._get_authentication_metadata_tuple()


def nodes_without_gpus() -> dict[str, float]:
    """Id → CPUs of nodes with CPUs and without GPUs; none where all nodes are of one kind."""
    alive = {node["NodeID"]: node["Resources"] for node in alive_nodes()}
    if not any(has.get("GPU") for has in alive.values()):
        return {}
    return {node: has["CPU"] for node, has in alive.items() if has.get("CPU") and not has.get("GPU")}


def reported(error: BaseException) -> BaseException:
    """What made a worker fail its health check; another error itself."""
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    return error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else error


def lost_its_node(error: BaseException) -> bool:
    """Whether an error of Ray's means that an actor's node has gone."""
    from ray.exceptions import NodeDiedError, RayActorError

    preempted = isinstance(error, RayActorError) and error.preempted
    return isinstance(error, NodeDiedError) or preempted or "node has died" in str(error)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether Ray has ended a process because its node ran low on memory."""
    from ray.exceptions import OutOfMemoryError

    return isinstance(error, OutOfMemoryError) or "running low on memory" in str(error)


def server_version(client: Any) -> str:
    """The version of Ray that a JobSubmissionClient has asked its cluster for."""
    return private(client, "_server_ray_version", "ray")


def quiet_uploads() -> None:
    """Silences the line for each file that is uploaded with a job."""
    for talkative in (
        "ray.dashboard.modules.job.sdk",
        "ray.dashboard.modules.dashboard_sdk",
        "ray._private.runtime_env.packaging",
    ):
        logging.getLogger(talkative).setLevel(logging.WARNING)


def version_mismatch(text: str) -> tuple[str, str] | None:
    """Ray's and Python's version of a cluster that does not take this client's; None: it is another error."""
    found = re.findall(r"(Ray|Python): (\S+)", text) if "ersion mismatch" in text else []
    return (found[0][1], found[1][1]) if len(found) > 1 else None


def node_providers() -> tuple[Any, Any]:
    """Return Ray's node provider classes for AWS and for GCP; they need requirements/cloud.txt."""
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.gcp.node_provider import GCPNodeProvider

    return AWSNodeProvider, GCPNodeProvider


def prepare_replica() -> None:
    """Set up the process of a Ray Serve replica; called by the replica's constructor.

    Its server for calls between deployments takes pickles from any client, so it must listen on loopback, not
    on all interfaces; nothing calls it where RAY_SERVE_USE_GRPC_BY_DEFAULT is off. And Serve must not freeze
    the garbage collector after the constructor, because the first model would then never be freed.
    """
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add_port(
        server, address.replace("[::]:", "127.0.0.1:")
    )
    replica.RAY_SERVE_FREEZE_GC_ON_STARTUP = False
