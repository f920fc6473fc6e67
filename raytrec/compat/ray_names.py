"""Names that the interfaces of Ray's libraries lack (2.60.0). Functions import Ray."""

from __future__ import annotations

import logging
import re
from typing import Any

from raytrec.compat.versions import private

# ray/train/v2/_internal/constants.py. How soon the end, or an error, is seen; how long Ray waits for places
# that are not there after all; and whether it watches for nodes that will go.
HEALTH_CHECK_INTERVAL_S = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
WORKER_GROUP_START_TIMEOUT_S = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
ENABLE_PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
SNAPSHOT = "checkpoint_manager_snapshot.json"  # what Ray Train notes in the folder of a run
NOT_TAKEN = "Initialization failure from server"  # Ray client's error, with the server's traceback
NOT_STARTED = "Starting Ray client server failed"  # the traceback, when a process has died
NO_AGENT = "No available agent"  # the Job API's error while a cluster starts


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
