"""Private names of Ray Data (2.60.0)."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from raytrec.compat.versions import private

STATISTICS = ("register_dataset_to_stats_actor", "update_execution_metrics", "update_iteration_metrics")
# Of OpRuntimeMetrics.
PROGRESS = (
    "num_tasks_submitted",
    "num_task_outputs_generated",
    "num_tasks_finished",
    "num_external_outqueue_blocks",
)
LEAST_REST_S, MOST_REST_S = 0.01, 0.2
QUICK_S = 0.05  # half of what Ray Data's executor waits for a task that has nothing ready


def prefer_node(node: str) -> Any:
    """A scheduling strategy: on this node, or where Ray chooses if it is gone or full."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)


def ask_for_no_nodes() -> None:
    """Lets Ray Data start read tasks whatever a cluster has left, and ask its autoscaler for nothing.

    Read tasks ask for no CPU, so nothing is lost; the stream limits them in number and memory, and Ray's
    scheduler knows whether there is a CPU for them. But Ray Data's own autoscaler (2.60) starts no task
    where Ray Train's workers have reserved all CPUs of a cluster, and waits for ever without a word; and it
    goes through an actor, whose process takes seconds to start, before the first batch, and 1 % of a core.
    """
    from ray.data import ExecutionResources
    from ray.data._internal.cluster_autoscaler import ClusterAutoscaler
    from ray.data._internal.execution import streaming_executor

    enough = ExecutionResources.for_limits(cpu=10_000, object_store_memory=2**50, memory=2**50)

    class Enough(ClusterAutoscaler):
        def try_trigger_scaling(self) -> None:
            pass

        def on_executor_shutdown(self) -> None:
            pass

        def get_total_resources(self) -> ExecutionResources:
            return enough

    def create_none(*_: Any, **__: Any) -> Enough:
        return Enough()

    private(streaming_executor, "create_cluster_autoscaler", "ray")
    streaming_executor.create_cluster_autoscaler = create_none


def pace_executors() -> None:
    """Lets the threads that drive Ray Data's executions rest while there is nothing for them to do.

    Ray 2.60's (execution/streaming_executor.py) goes round and round without a pause while it holds back the
    output of its tasks, or has no more tasks: always when batches come faster than they are trained. During
    the step it takes all that it is given of a core, and of Python's lock.
    """
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

    before = private(StreamingExecutor, "_scheduling_loop_step", "ray")
    if before.__name__ == "step_and_rest":
        return

    def step_and_rest(self: StreamingExecutor, topology: Any) -> bool:
        began = monotonic()
        has_more = before(self, topology)
        # What changes whenever tasks of an operator begin, bring something or end, or a reader takes it.
        counts = [tuple(private(op.metrics, name, "ray") for name in PROGRESS) for op in topology]
        known, rest_s = getattr(self, "raytrec_rest", (None, 0.0))
        idle = counts == known and monotonic() - began < QUICK_S  # else it has waited for a task
        rest_s = min(max(2 * rest_s, LEAST_REST_S), MOST_REST_S) if idle else 0.0
        self.raytrec_rest = counts, rest_s
        if rest_s and has_more:
            sleep(rest_s)
        return has_more

    StreamingExecutor._scheduling_loop_step = step_and_rest


def keep_no_statistics() -> None:
    """Lets Ray Data measure nothing of this process's executions, and start no actor for statistics.

    A stream is an execution for each epoch, under its own name, and the actor keeps some 150 gauges of
    each (data/_internal/stats.py): it grew by 0.5 to 1 MiB with every epoch of each rank, without end, and
    the agents that export its gauges with it. It is also detached, and pinned to the node that reads
    first, which would never become idle; and a process that wakes a hundred times a second. None of this is
    read. Names of executions, which the actor counts, are random.
    """
    from ray.data._internal.execution.callbacks import ResourceAllocatorPrometheusCallback
    from ray.data._internal.stats import _StatsManager

    def nothing(*_: Any, **__: Any) -> None:
        pass

    for name in STATISTICS:
        private(_StatsManager, name, "ray")
        setattr(_StatsManager, name, staticmethod(nothing))
    private(_StatsManager, "gen_dataset_id_from_stats_actor", "ray")
    _StatsManager.gen_dataset_id_from_stats_actor = staticmethod(lambda: uuid4().hex)
    private(ResourceAllocatorPrometheusCallback, "on_execution_step", "ray")
    ResourceAllocatorPrometheusCallback.on_execution_step = nothing
