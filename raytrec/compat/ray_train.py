"""Trainer, scaling policy and callbacks that use private names of Ray Train (2.60.0)."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import DefaultAutoscalingCoordinator
from ray.train.v2._internal.callbacks import placement_group_callback
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller import placement_group_cleaner
from ray.train.v2._internal.execution.controller.placement_group_cleaner import PlacementGroupCleaner
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.failure_handling.default import RETRYABLE_CONTROLLER_ERRORS
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
    AUTOSCALING_REQUESTS_EXPIRE_TIME_S,
    AUTOSCALING_REQUESTS_INTERVAL_S,
)
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from raytrec.compat.ray_core import get_actor_state
from raytrec.compat.versions import missing

__all__ = [
    "RETRYABLE_CONTROLLER_ERRORS",
    "ControlledTrainer",
    "FailureDecision",
    "FailurePolicy",
    "NoopDecision",
    "RequestingPolicy",
    "ResizeDecision",
]


class ControlledTrainer(DataParallelTrainer):
    """Ray Train trainer with custom controller policies and a custom wait for the controller.

    Args:
        *args: Positional arguments of DataParallelTrainer.
        policies: Keyword arguments of the controller: scaling_policy and failure_policy.
        on_start: Function called with the started controller in the thread that calls `fit`.
        wait: Function that waits for an object reference, and returns the object or raises the error of its task.
        owns_ray: True if Ray is shut down at the end of the run, so that no actor has to remove the placement group.
        **options: Further keyword arguments of DataParallelTrainer.
    """

    def __init__(
        self,
        *args: Any,
        policies: dict[str, Any],
        on_start: Callable[[Any], None],
        wait: Callable[[Any], Any],
        owns_ray: bool = False,
        **options: Any,
    ):
        super().__init__(*args, **options)
        self._policies, self._on_start, self._wait, self._owns_ray = policies, on_start, wait, owns_ray

    def _initialize_and_run_controller(self, **parts: Any) -> Any:
        """Run the controller with `policies`, and return its result, for which `wait` waits instead of ray.get."""
        try:
            return super()._initialize_and_run_controller(**parts | self._policies)
        except _ControllerStarted as started:
            (controller,) = started.args
        self._wait(controller.run.remote())
        return self._wait(controller.get_result.remote())

    def _register_sigint_handler(self, controller: Any) -> None:
        """Call `on_start`, and leave Ray's method, which calls this one between start and run of the controller."""
        self._on_start(controller)
        raise _ControllerStarted(controller)

    def _create_default_callbacks(self) -> list[Any]:
        no_datasets = NoDatasets(self.train_run_context, self.datasets)
        callbacks = replace_callback(super()._create_default_callbacks(), DatasetsCallback, [no_datasets])
        # If Ray ends with the run, nothing is left to remove.
        cleaner = [] if self._owns_ray else [OwnClusterCleanerCallback()]
        return replace_callback(callbacks, PlacementGroupCleanerCallback, cleaner)


def replace_callback(callbacks: list[Any], kind: type, replacement_callbacks: list[Any]) -> list[Any]:
    """Return a copy of a list of callbacks in which `replacement_callbacks` replace each instance of `kind`.

    Instances of subclasses of `kind` are kept.

    Raises:
        RunError: The list contains no instance, because the installed version of Ray Train differs.
    """
    if not any(type(callback) is kind for callback in callbacks):
        raise missing(f"{kind.__name__} among TorchTrainer's callbacks", "ray")
    return [new for callback in callbacks for new in (replacement_callbacks if type(callback) is kind else [callback])]


class OwnClusterCleaner(PlacementGroupCleaner):
    """Actor that removes the placement group of a run whose controller has died.

    Ray 2.60 (ray/train/v2/_internal: execution/controller/placement_group_cleaner.py,
    callbacks/placement_group_callback.py) asks the state API whether the controller is alive. The state API
    queries the cluster that was started last on this machine. If this is another cluster, it does not know the
    controller, and Ray would kill all workers of the run. This actor, alone in its process, queries its own
    cluster.
    """

    def start_monitoring(self) -> bool:
        """Start monitoring the controller with `is_own_actor_alive`, and return True."""
        placement_group_cleaner.is_actor_alive = is_own_actor_alive
        return super().start_monitoring()


class OwnClusterCleanerCallback(PlacementGroupCleanerCallback):
    """Callback that makes the controller's process, which serves one run, start an OwnClusterCleaner."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Start the cleaner for this run."""
        placement_group_callback.PlacementGroupCleaner = OwnClusterCleaner
        super().after_controller_start(train_run_context)


def is_own_actor_alive(actor_id: str, timeout: float) -> bool:
    """Return True if an actor in this process's cluster is not dead according to the GCS.

    `timeout` is ignored; Ray's function of this name has this argument.

    Raises:
        RayStateApiException: The GCS does not respond; the cleaner then asks again.
    """
    import ray
    from ray.util.state.exception import RayStateApiException

    actor = get_actor_state(actor_id)
    if not actor and not ray.nodes():
        raise RayStateApiException("the cluster does not respond")
    return bool(actor) and actor["State"] != "DEAD"


class NoDatasets(DatasetsCallback):
    """Callback for a trainer without Ray Data datasets; it starts no actor for datasets.

    Workers still receive the driver's Ray Data settings.
    """

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Return {}, because the workers have no dataset shards."""
        return {}


class _ControllerStarted(Exception):
    """Signal whose argument is the controller that Ray Train has started."""


class RequestingPolicy(ScalingPolicy):
    """Base class of scaling policies that request the maximum number of workers of a run from an autoscaler.

    Args:
        scaling_config: Ray Train's scaling configuration.
        max_train_workers: Maximum number of workers.
        reader_cpus: Number of CPUs for readers, which the autoscaler should provide in addition to the workers' CPUs.
        autoscaler_exists: False if there is no autoscaler; resources are then not requested, and the actor that
            forwards requests is not started.
    """

    def __init__(self, scaling_config: Any, max_train_workers: int, reader_cpus: int, autoscaler_exists: bool = True):
        super().__init__(scaling_config)
        self._workers, self._extra_cpus, self._has_autoscaler = (max_train_workers, reader_cpus, autoscaler_exists)
        self._cpu_coordinator: DefaultAutoscalingCoordinator | None = None
        self._requested_at = 0.0

    @property
    def resources_per_worker(self) -> dict[str, float]:
        """Return the resources that Ray reserves for each worker, by name."""
        return self.scaling_config._resources_per_worker_not_none

    def request_resources(self) -> None:
        """Renew the requests to the autoscaler that are older than Ray's interval; do nothing without an autoscaler."""
        if not self._has_autoscaler:
            return
        self._maybe_send_resource_request()
        if monotonic() - self._requested_at > AUTOSCALING_REQUESTS_INTERVAL_S:
            self._request_extra_cpus()

    def after_controller_start(self, train_run_context: Any) -> None:
        """Send the first request to the autoscaler, if there is one."""
        if not self._has_autoscaler:
            return
        if self._extra_cpus:
            self._cpu_coordinator = DefaultAutoscalingCoordinator(f"readers-{train_run_context.run_id}")
        super().after_controller_start(train_run_context)
        self._request_extra_cpus()

    def _get_num_workers_for_resource_request(self) -> int:
        return self._workers

    def _request_extra_cpus(self) -> None:
        if self._cpu_coordinator:
            self._requested_at = monotonic()
            bundles = [{"CPU": 1}] * self._extra_cpus
            self._cpu_coordinator.request_resources(bundles, AUTOSCALING_REQUESTS_EXPIRE_TIME_S)

    def _cancel_resource_request(self) -> None:
        super()._cancel_resource_request()
        if self._cpu_coordinator:
            self._cpu_coordinator.cancel_request()
