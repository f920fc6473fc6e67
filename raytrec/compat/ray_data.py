"""Private names of Ray Data (2.60.0)."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from raytrec.compat.versions import private, set_private

STATISTICS_METHODS = ("register_dataset_to_stats_actor", "update_execution_metrics", "update_iteration_metrics")
# Fields of OpRuntimeMetrics.
PROGRESS_FIELDS = (
    "num_tasks_submitted",
    "num_task_outputs_generated",
    "num_tasks_finished",
    "num_external_outqueue_blocks",
)
MIN_SLEEP_S, MAX_SLEEP_S = 0.01, 0.2
MAX_IDLE_STEP_S = 0.05  # half of the time for which Ray Data's executor waits for a task's output


def prefer_node(node: str) -> Any:
    """Return a scheduling strategy that prefers the node with this id; if it is lost or full, Ray chooses another."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)


def disable_autoscaling_requests() -> None:
    """Make Ray Data start read tasks regardless of free resources, without requests to its autoscaler.

    Read tasks request no CPU: data.stream limits their number and memory, and Ray's scheduler assigns the CPUs.
    Ray Data's own autoscaler (2.60) starts no task if Ray Train's workers have reserved all CPUs of a cluster,
    and waits forever without a message. It also uses an actor, whose process takes seconds to start before the
    first batch, and 1 % of a core.
    """
    from ray.data import ExecutionResources
    from ray.data._internal.cluster_autoscaler import ClusterAutoscaler
    from ray.data._internal.execution import streaming_executor

    unlimited = ExecutionResources.for_limits(cpu=10_000, object_store_memory=2**50, memory=2**50)

    class FixedAutoscaler(ClusterAutoscaler):
        def try_trigger_scaling(self) -> None:
            pass

        def on_executor_shutdown(self) -> None:
            pass

        def get_total_resources(self) -> ExecutionResources:
            return unlimited

    set_private(streaming_executor, "create_cluster_autoscaler", lambda *_, **__: FixedAutoscaler(), "ray")


def throttle_executors() -> None:
    """Make the threads that drive Ray Data's executions sleep while there is no work.

    In Ray 2.60, such a thread (execution/streaming_executor.py) spins while it holds back the output of its
    tasks, or has no more tasks. If batches arrive faster than training consumes them, the thread spins
    most of the time. It then occupies a core and the GIL whenever they are free during a step.
    """
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

    original_step = private(StreamingExecutor, "_scheduling_loop_step", "ray")
    if original_step.__name__ == "throttled_step":
        return

    def throttled_step(self: StreamingExecutor, topology: Any) -> bool:
        start = monotonic()
        has_more = original_step(self, topology)
        # Counts change when an operator's tasks start, produce output or end, or when output is consumed.
        counts = [tuple(private(op.metrics, name, "ray") for name in PROGRESS_FIELDS) for op in topology]
        previous, sleep_s = getattr(self, "raytrec_progress", (None, 0.0))
        idle = counts == previous and monotonic() - start < MAX_IDLE_STEP_S  # a longer step has waited for a task
        sleep_s = min(max(2 * sleep_s, MIN_SLEEP_S), MAX_SLEEP_S) if idle else 0.0
        self.raytrec_progress = counts, sleep_s
        if sleep_s and has_more:
            sleep(sleep_s)
        return has_more

    StreamingExecutor._scheduling_loop_step = throttled_step


def disable_statistics() -> None:
    """Make Ray Data collect no statistics about this process's executions, and start no statistics actor.

    A rank's reader is one execution per epoch, each with a separate name, and the actor keeps some 150 gauges per name
    (data/_internal/stats.py). The actor grew by 0.5 to 1 MiB per epoch and rank without limit, as did the agents
    that export its gauges. The actor is also detached and pinned to the first node that reads, which then never
    becomes idle. Its process wakes a hundred times per second. raytrec does not use these statistics. Execution
    names, which the actor would number, are random instead.
    """
    from ray.data._internal.execution.callbacks import ResourceAllocatorPrometheusCallback
    from ray.data._internal.stats import _StatsManager

    def do_nothing(*_: Any, **__: Any) -> None:
        pass

    for name in STATISTICS_METHODS:
        set_private(_StatsManager, name, staticmethod(do_nothing), "ray")
    set_private(_StatsManager, "gen_dataset_id_from_stats_actor", staticmethod(lambda: uuid4().hex), "ray")
    set_private(ResourceAllocatorPrometheusCallback, "on_execution_step", do_nothing, "ray")
