"""Names of Ray Train's (2.60.0) outside its interface, for modules that do not import it."""

from __future__ import annotations

# ray/train/v2/_internal/constants.py. How soon the end, or an error, is seen; how long Ray waits for places
# that are not there after all; and whether it watches for nodes that will go.
HEALTH_CHECK_INTERVAL_S = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
WORKER_GROUP_START_TIMEOUT_S = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
ENABLE_PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
SNAPSHOT = "checkpoint_manager_snapshot.json"  # what Ray Train notes in the folder of a run


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
