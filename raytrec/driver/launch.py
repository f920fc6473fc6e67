"""Start, supervise and stop a Ray Train worker group in the Ray session of a command."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any, TypeVar

from raytrec.cluster.lifeline import RAYLET, RayLost, RayMonitor, wait_for
from raytrec.cluster.session import has_local_ray, is_job_driver, is_stuck, ray_session, starts_local_ray
from raytrec.cluster.warm_process import keep_warm_process
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.memory import ALLOCATOR_ENV
from raytrec.common.messages import Command
from raytrec.common.storage import join_uri, make_relative, open_filesystem, quote_for_shell
from raytrec.compat.ray_core import (
    ENABLE_PREEMPTION_WATCHER,
    HEALTH_CHECK_INTERVAL_S,
    TRAIN_SNAPSHOT_FILE,
    WORKER_GROUP_START_TIMEOUT_S,
)
from raytrec.config.run_config import RunConfig
from raytrec.driver import nodes
from raytrec.driver.failure_analysis import to_raytrec_error, write_traceback
from raytrec.driver.recorder import Watch
from raytrec.planning.memory import disable_async_save, exclude_training_memory
from raytrec.worker.context import WorkerTask

T = TypeVar("T")


@contextmanager
def open_session(config: RunConfig) -> Iterator[None]:
    """Run the block in a Ray session (cluster.session); a local cluster forks its workers (cluster.forking).

    Raises:
        RunError: Ray cannot be started or joined; see `ray_session`.
    """
    address = config.scaling.address
    with keep_warm_process(starts_local_ray(address)), ray_session(address, nodes.count_local_cpus(config)):
        yield


def run_in_session(config: RunConfig, failed: Callable[[str, bool], None], work: Callable[[], T]) -> T:
    """Run `work` in a Ray session, and return its result; repeat it in a new session if a local cluster's raylet ends.

    The raylet is Ray's process that starts workers on a machine, and the GCS its process that manages the cluster. Each
    repetition counts as one of scaling.max_failures, and begins after all processes of the previous Ray session have
    ended. This process cannot restart a cluster that it has joined, and Ray ends this process once the GCS has been
    gone for a minute; `work` is not repeated in these cases.

    Args:
        config: Configuration of the run.
        failed: Function called with a clause that names the lost part of Ray, and True if `work` is repeated.
        work: Function that resumes from the newest checkpoint when it is called again.

    Raises:
        RayLost: A part of Ray has ended and `work` is not repeated. The error states how to resume the run.
        RunError: Ray cannot be started or joined; or `work` raised the error, as it may any other error.
    """
    remaining_failures = config.scaling.max_failures
    while True:
        try:
            with open_session(config):
                is_local = has_local_ray()
                return work()
        except RayLost as lost:
            remaining_failures -= 1
            again = is_local and lost.part == RAYLET and remaining_failures >= 0 and not is_stuck()
            failed(lost.what, again)
            if not again:
                do = f"resume the run: {resume_command(config)}"
                raise RayLost(lost.what, where=lost.where, do=do) from None


def resume_command(config: RunConfig, command: str = "train") -> str:
    """Return the command that resumes a run (train) or search (tune); in a job, the advice to submit the job again."""
    if is_job_driver():
        return "submit the same job again"
    return f"raytrec {command} --resume {quote_for_shell(make_relative(Path(config.run.dir)))}"


def run_group(
    worker: Callable[[WorkerTask], None],
    task: WorkerTask,
    watch: Watch,
    *,
    saves: bool = False,
    restarts: bool = False,
    on_poll: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run a function on a Ray Train worker group, and return the metrics that rank 0 has reported as the result.

    A Ray session must be open (`open_session`). Ray Train's environment variables are set in this process. If the group
    fails, the traceback is written to error.txt in run.dir.

    Args:
        worker: Function that each rank runs, such as worker.loop.train_worker.
        task: Argument of the function. This function sets its coordinator. Its checkpoint is the folder of all
            checkpoints if `saves`, else the checkpoint to read; empty: none.
        watch: Receiver of the group's messages.
        saves: True if the function saves checkpoints, so that it can be restarted and asked to stop; it is restarted
            after at most scaling.max_failures counted failures (policies.GroupFailurePolicy).
        restarts: True if the function can be restarted although it does not save.
        on_poll: Function called every half second while the group runs; a ConfigError that it raises ends the group.

    Raises:
        ConfigError: The configuration does not fit the cluster, or `on_poll` raised the error.
        Interrupted: Ctrl-C or SIGTERM ended the group.
        RayLost: A part of Ray has ended.
        RaytrecError: The group failed and is not restarted, or ended without a result; the error states the cause.
    """
    import ray

    config, checkpoint, scaling = task.config, task.checkpoint, task.config.scaling
    gpu_nodes = nodes.list_gpu_nodes() if scaling.device != "cpu" else []
    device = nodes.choose_device(config, gpu_nodes, watch.console)
    checked_config = config if saves else exclude_training_memory(config) if checkpoint else disable_async_save(config)
    nodes.check_constraints(checked_config, task.schema, device, gpu_nodes, watch.console)
    watch.console.phase("starting the workers")
    for name, value in RAY_TRAIN_ENV.items():
        os.environ.setdefault(name, value)
    import ray.train

    from raytrec.compat.ray_train import ControlledTrainer
    from raytrec.driver.coordinator import fetch, start_coordinator
    from raytrec.driver.policies import GroupFailurePolicy, NodeCapacityPolicy
    from raytrec.worker.rendezvous import OwnAddressConfig

    coordinator = task.coordinator = start_coordinator(scaling.hang_timeout_s, PHASE_TIMEOUT_S)
    cpu_nodes_read = nodes.reads_on_cpu_nodes(config, device)
    resources = nodes.build_worker_bundle(config, device, cpu_nodes_read)
    ray_scaling = ray.train.ScalingConfig(
        num_workers=(scaling.min_workers, scaling.max_workers) if scaling.elastic else scaling.max_workers,
        use_gpu=device == "cuda",
        resources_per_worker=resources,
        placement_strategy="PACK" if device == "cuda" else "SPREAD",
    )
    reader_cpus = scaling.max_workers * config.data.readers if cpu_nodes_read else 0
    requests = {"reader_cpus": reader_cpus, "autoscaler_exists": not has_local_ray()}
    scaling_policy = NodeCapacityPolicy(ray_scaling, coordinator, scaling.min_workers, scaling.max_workers, **requests)
    max_failures = scaling.max_failures if saves or restarts else 0
    failure_policy = GroupFailurePolicy(coordinator, max_failures, scaling.min_workers)
    stop = StopSignalHandler(coordinator, scaling.shutdown_grace_s if saves else 0)
    lifeline = RayMonitor(scaling.hang_timeout_s, is_own_ray=has_local_ray())
    backend = OwnAddressConfig("nccl" if device == "cuda" else "gloo", compute_collective_timeout(config, device))
    trainer = ControlledTrainer(
        worker,
        train_loop_config=task,
        backend_config=backend,
        scaling_config=ray_scaling,
        run_config=_make_ray_run_config(checkpoint if saves else join_uri(config.run.dir, "ray")),
        policies={"scaling_policy": scaling_policy, "failure_policy": failure_policy},
        owns_ray=has_local_ray(),
        on_start=stop.install,
        wait=lambda ref: wait_for(ref, lifeline, on_poll),
    )
    with stop, watch.reading(coordinator):
        try:
            trainer.fit()
        except RayLost as lost:
            write_traceback(lost, config)
            raise
        except ConfigError as error:
            if isinstance(error, ray.exceptions.RayError):  # raised by a rank
                raise to_raytrec_error(error, config, fetch(coordinator.cause, "")) from None
            stop.abort()
            raise
        except Exception as error:
            lifeline.confirm()
            if stop.signal is None:
                raise to_raytrec_error(error, config, fetch(coordinator.cause, "")) from None
    if watch.result is None and stop.signal is not None:
        raise Interrupted(stop.signal)
    if watch.result is None:
        do = f"resume the run: {resume_command(config)}" if saves else "run the same command again"
        raise RunError("the workers exited without a result", where=config.run.dir if saves else None, do=do)
    return watch.result


def compute_collective_timeout(config: RunConfig, device: str) -> int:
    """Return the timeout of a collective between workers on a device (cpu or cuda), in seconds.

    By default, torch ends a process that waits in NCCL until the timeout, and the process would seem to have failed by
    itself. With NCCL (cuda), the timeout is therefore longer than PHASE_TIMEOUT_S, so that the coordinator first
    reports the rank for which the others wait. Gloo (cpu) raises an error instead.
    """
    return PHASE_TIMEOUT_S + (int(config.scaling.hang_timeout_s) + 1 if device == "cuda" else 0)


# Maximum seconds without progress while a rank builds, restores, evaluates or saves a model, or waits for a batch.
# These phases end or fail by themselves.
PHASE_TIMEOUT_S = 1800
# Seconds between two checks of the workers; seconds that Ray waits for a group to get its resources; and no
# preemption watcher, because policies.NodeCapacityPolicy detects leaving nodes sooner and needs no barrier.
RAY_TRAIN_ENV = {HEALTH_CHECK_INTERVAL_S: "0.5", WORKER_GROUP_START_TIMEOUT_S: "20", ENABLE_PREEMPTION_WATCHER: "0"}


def _make_ray_run_config(folder: str) -> Any:
    """Return a configuration of Ray Train that stores its files in `folder`, a path or URI.

    For a run that saves, `folder` contains the checkpoints: Ray Train accepts only checkpoints in it. The snapshot that
    Ray Train wrote for an earlier driver is removed, because an incomplete snapshot would prevent the start.
    raytrec does not need the snapshot: checkpoint.files finds the newest checkpoint.
    """
    import ray.train

    filesystem, path = open_filesystem(join_uri(folder, TRAIN_SNAPSHOT_FILE))
    if filesystem.get_file_info(path).is_file:
        filesystem.delete_file(path)
    filesystem, path = open_filesystem(folder)  # a URI may contain secrets, and Ray Train would show it
    place, _, name = path.rpartition("/")
    return ray.train.RunConfig(
        name=name, storage_path=place, storage_filesystem=filesystem, worker_runtime_env={"env_vars": ALLOCATOR_ENV}
    )


DUPLICATE_SIGNAL_WINDOW_S = 1.0  # `timeout` and similar programs signal both the process and its group


class Interrupted(KeyboardInterrupt):
    """Exception raised when Ctrl-C or SIGTERM has ended a group.

    Attributes:
        signal: Number of the signal.
    """

    def __init__(self, signal: int):
        super().__init__(f"interrupted by signal {signal}")
        self.signal = signal


class StopSignalHandler(AbstractContextManager):
    """Handler of Ctrl-C and SIGTERM: the first signal asks the group to save and end, the second ends it at once.

    A signal within DUPLICATE_SIGNAL_WINDOW_S of the last one is ignored. Ray Train 2.60's own handler, which is
    replaced, ends the workers and then the process without a message. Leaving the context restores earlier handlers.

    Args:
        coordinator: Coordinator of the run.
        patience_s: Seconds after the first signal until the group is ended; 0: the first signal ends it at once.

    Attributes:
        signal: Number of the last signal that was not ignored; None before the first signal.
    """

    def __init__(self, coordinator: Any, patience_s: float):
        self._coordinator, self._patience_s = coordinator, patience_s
        self.signal: int | None = None
        self._before: dict[int, Any] = {}
        self._asked_at = 0.0
        self._timer: Timer | None = None

    def install(self, controller: Any) -> None:
        """Install the signal handlers. The trainer calls this method in the main thread with Ray Train's controller."""
        self._controller = controller
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        is_repeated = self.signal is not None
        if is_repeated and monotonic() - self._asked_at < DUPLICATE_SIGNAL_WINDOW_S:
            return None
        self.signal, self._asked_at = number, monotonic()
        if is_repeated or not self._patience_s:
            return self.abort()
        self._coordinator.ask.remote(Command.STOP, signal.Signals(number).name)
        self._timer = Timer(self._patience_s, self.abort)
        self._timer.daemon = True
        self._timer.start()

    def abort(self) -> None:
        """End the group at once, without a checkpoint."""
        self._controller.abort.remote()

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
