"""Policies that decide after which failures, and with how many workers, a worker group restarts.

Ray Train's controller (ray 2.60.0, ray/train/v2/_internal) asks a FailurePolicy and a ScalingPolicy. Ray's
own policies count nodes only every 20 s, and therefore also count lost nodes. They retry errors that are certain to
recur, and resize a running group without a checkpoint.
"""

from __future__ import annotations

import re
from collections import Counter
from time import monotonic
from typing import Any

import ray
from ray.train import FailureConfig
from ray.train.v2.api.exceptions import ControllerError

from raytrec.cluster.local_ray import listens
from raytrec.cluster.session import pin_to_node
from raytrec.common.errors import GpuFailedError
from raytrec.common.messages import Command
from raytrec.compat.ray_core import has_autoscaler, list_alive_nodes, list_draining_nodes, list_free_resources
from raytrec.compat.ray_train import (
    RETRYABLE_CONTROLLER_ERRORS,
    FailureDecision,
    FailurePolicy,
    NoopDecision,
    RequestingPolicy,
    ResizeDecision,
)
from raytrec.driver.coordinator import fetch
from raytrec.driver.failure_analysis import Cause, FailureKind, find_cause

NUMBER_PATTERN = re.compile(r"\d[\d.]*( bytes| [KMGT]iB)?")
NODE_SETTLE_TIME_S = 2.0  # time after a failure for Ray to stop counting lost nodes and to count returning nodes
RAYLET_CONNECT_TIMEOUT_S = 1.0
GPU_RELEASE_TIMEOUT_S = 10.0  # time for the processes of a failed group to release their GPUs
OLD_GROUP_TIMEOUT_S = 10.0  # time after which a new group starts although the old one seems to hold its resources
SCALE_UP_INTERVAL_S = 15.0  # time between two checks for room for more workers, while fewer than the maximum run


class _GpuReservation:
    """Actor that reserves one GPU while it exists; `gpu` returns Ray's id of the GPU."""

    def gpu(self) -> str:
        return ray.get_runtime_context().get_accelerator_ids()["GPU"][0]


class GroupFailurePolicy(FailurePolicy):
    """FailurePolicy that restarts a worker group after at most `max_failures` dead processes and exceptions.

    RaytrecErrors end the run at once, except that GPUs that fail when the group starts are excluded while enough other
    GPUs remain. Lost nodes, requested restarts and start failures that Ray Train retries are not counted. Two
    consecutive failures with the same exception at the same step end the run as well, because the exception would
    recur. Numbers in the two texts may differ, such as a GPU's free memory.

    Args:
        coordinator: Coordinator of the run.
        max_failures: Maximum number of counted failures after which the group still restarts.
        min_workers: Minimum number of workers. Without an autoscaler, no GPU is excluded if fewer would remain.
    """

    def __init__(self, coordinator: Any, max_failures: int, min_workers: int):
        super().__init__(FailureConfig())
        self._coordinator, self._left, self._min_workers = coordinator, max_failures, min_workers
        self._reserved: list[Any] = []  # actors that reserve failed GPUs
        self._last: tuple[str, int] | None = None

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        """Return RETRY or RAISE for a failure of the group; report all but requested restarts to the coordinator.

        Args:
            training_failed_error: Ray Train's ControllerError if the group did not start, else its WorkerGroupError.
        """
        if isinstance(training_failed_error, ControllerError):
            return self._decide_failed_start(training_failed_error)
        cause = find_cause(training_failed_error.worker_failures)
        retry = self._should_restart(cause)
        if cause.kind != FailureKind.RESTART:
            dead = cause.kind != FailureKind.CONSEQUENCE
            self._coordinator.failed.remote(cause.rank, cause.sentence, dead, retry)
        return FailureDecision.RETRY if retry else FailureDecision.RAISE

    def _should_restart(self, cause: Cause) -> bool:
        """Return True if the group restarts after a failure, and count the failure if it is counted (see the class)."""
        if cause.kind in (FailureKind.RESTART, FailureKind.NODE):
            return True
        if cause.kind == FailureKind.RAYTREC_ERROR:
            return False
        self._left -= 1
        failure = NUMBER_PATTERN.sub("#", cause.text), fetch(self._coordinator.step, -1)
        is_repeated = cause.kind == FailureKind.ERROR and self._last == failure
        self._last = failure
        return self._left >= 0 and not is_repeated

    def _decide_failed_start(self, error: ControllerError) -> FailureDecision:
        """Return RETRY or RAISE for a group that did not start, e.g. because a node has left or is unreachable."""
        failure = error.controller_failure
        cause = find_cause({0: failure})
        if isinstance(cause.error, GpuFailedError) and self._exclude_gpu(cause.error):
            self._coordinator.failed.remote(None, f"{cause.text}; the GPU is excluded", True, True)
            return FailureDecision.RETRY
        retry = isinstance(failure, RETRYABLE_CONTROLLER_ERRORS)
        if not retry and cause.kind in (FailureKind.NODE, FailureKind.DEATH, FailureKind.CONSEQUENCE):
            retry = self._should_restart(cause)
        text = "a worker " * (cause.kind in (FailureKind.NODE, FailureKind.DEATH)) + cause.text.removeprefix("raised ")
        self._coordinator.failed.remote(None, f"workers did not start: {text}", True, retry)
        return FailureDecision.RETRY if retry else FailureDecision.RAISE

    def _exclude_gpu(self, failed: GpuFailedError) -> bool:
        """Reserve a failed GPU, so that workers do not use it until the controller ends. Return True on success.

        Ray cannot remove a GPU from a node, so an actor reserves it. Return False if the run needs all GPUs, or
        if the GPU cannot be reserved within GPU_RELEASE_TIMEOUT_S.
        """
        gpus = sum(node["Resources"].get("GPU", 0) for node in list_alive_nodes())
        if gpus - len(self._reserved) - 1 < self._min_workers and not has_autoscaler():
            return False
        node, gpu = failed.place
        holder = ray.remote(num_gpus=1)(_GpuReservation).options(**pin_to_node(node))
        reservations, deadline = [], monotonic() + GPU_RELEASE_TIMEOUT_S
        try:
            # Ray chooses among the free GPUs, so GPUs are reserved until Ray chooses the failed GPU.
            while (remaining_s := deadline - monotonic()) > 0:
                reservations.append(holder.remote())
                if ray.get(reservations[-1].gpu.remote(), timeout=remaining_s) == gpu:
                    self._reserved.append(reservations.pop())
                    return True
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            pass
        finally:
            for reservation in reservations:
                ray.kill(reservation)
        return False


class NodeCapacityPolicy(RequestingPolicy):
    """ScalingPolicy that starts as many workers as the alive nodes have room for, within the limits of the run.

    The policy never resizes a running group. Instead, it asks the group to save and restart, so that no step is
    lost.

    Args:
        scaling_config: Scaling configuration of Ray Train.
        coordinator: Coordinator of the run.
        min_workers: Minimum number of workers.
        max_workers: Maximum number of workers.
        **requests: reader_cpus and autoscaler_exists, as for RequestingPolicy.
    """

    def __init__(self, scaling_config: Any, coordinator: Any, min_workers: int, max_workers: int, **requests: Any):
        super().__init__(scaling_config, max_workers, **requests)
        self._coordinator, self._min_workers, self._max_workers = coordinator, min_workers, max_workers
        self._checked_at, self._had_room = monotonic(), False
        self._held: Counter[str] = Counter()  # node → workers of the running group
        self._since: float | None = None  # time of the first decision since the group has been down
        self._reported, self._asked_for = False, 0

    def make_decision_for_non_running_worker_group(self) -> NoopDecision | ResizeDecision:
        """Return a decision to start the group, or to wait while the nodes lack room for the minimum of workers.

        After a failure, the policy waits at most NODE_SETTLE_TIME_S for room for as many workers as before, and
        starts the minimum after OLD_GROUP_TIMEOUT_S even without room.
        """
        self.request_resources()
        is_first, now = not self._asked_for, monotonic()
        self._since = self._since or now
        slots, waited, size = self._count_possible_workers(self._held), now - self._since, self._held.total()
        wanted = min(self._max_workers, max(size, self._min_workers))
        if slots < wanted and not is_first and waited < NODE_SETTLE_TIME_S:
            return NoopDecision()
        if slots < self._min_workers:
            if waited > OLD_GROUP_TIMEOUT_S and self._asked_for:  # the old group's processes may hold the resources
                return self._resize(self._min_workers)
            if not self._reported:
                self._reported = True
                self._coordinator.waiting.remote(slots, self._min_workers)
            return NoopDecision()
        return self._resize(min(slots, self._max_workers))

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any):
        """Ask the group to restart if a node will be preempted or more workers fit; always return a NoopDecision.

        Args:
            worker_group_state: Ray Train's state of the group, with the nodes of its workers.
            worker_group_status: Ignored.
        """
        self.request_resources()
        nodes = Counter(worker.metadata.node_id for worker in worker_group_state.workers)
        if nodes != self._held:
            self._held, self._checked_at, self._had_room = nodes, monotonic(), False
        draining = list_draining_nodes() & set(nodes)
        if draining:
            self._coordinator.ask.remote(Command.RESTART, f"{len(draining)} of {len(nodes)} nodes will be preempted")
        elif nodes.total() < self._max_workers and monotonic() - self._checked_at > SCALE_UP_INTERVAL_S:
            self._checked_at = monotonic()
            self._request_scale_up(nodes)
        return NoopDecision()

    def _request_scale_up(self, nodes: Counter[str]) -> None:
        """Ask the group to restart if two consecutive checks find room for more workers.

        Room that only one check finds may be temporary.
        """
        slots = min(self._count_possible_workers(nodes), self._max_workers)
        if slots > nodes.total() and self._had_room:
            self._coordinator.ask.remote(Command.RESTART, f"there is room for {slots} workers")
        elif slots > nodes.total():
            self._checked_at -= 0.9 * SCALE_UP_INTERVAL_S  # look again soon
        self._had_room = slots > nodes.total()

    def _resize(self, workers: int) -> ResizeDecision:
        self._held, self._since, self._reported, self._asked_for = Counter(), None, False, workers
        return ResizeDecision(workers, self.resources_per_worker)

    def _count_possible_workers(self, own_workers: Counter[str]) -> int:
        """Return the number of workers that fit on the alive nodes in addition to other work.

        The resources of the group's own workers (node id → number) count as free. Draining nodes, which will be
        preempted, do not count.
        """
        bundle = self.resources_per_worker
        free, draining, slots = list_free_resources(), list_draining_nodes(), 0
        for node in list_alive_nodes():
            # Ray lists a node for seconds after its end, but its raylet then refuses connections.
            raylet = node["NodeManagerAddress"], node["NodeManagerPort"]
            if node["NodeID"] in draining or not listens(*raylet, RAYLET_CONNECT_TIMEOUT_S):
                continue
            available, own = free.get(node["NodeID"], {}), own_workers[node["NodeID"]]
            slots += own + int(min(available.get(r, 0) // amount for r, amount in bundle.items()))
        return slots
