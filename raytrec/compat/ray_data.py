"""Private names of Ray Data (2.60.0)."""

from __future__ import annotations

from typing import Any

from raytrec.compat.versions import private

STATISTICS = ("register_dataset_to_stats_actor", "update_execution_metrics", "update_iteration_metrics")


def prefer_node(node: str) -> Any:
    """A scheduling strategy: on this node, or where Ray chooses if it is gone or full."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)


def leave_room_to_ray() -> None:
    """Lets Ray Data start read tasks where other parts of Ray have reserved all that there is.

    Where Ray Train's workers have reserved all CPUs of a cluster, Ray Data 2.60 starts no task, not even one
    that asks for no CPU, and waits for ever without a word (`get_total_resources` is then zero). The stream
    itself limits its tasks in number and memory; whether there is a CPU for them, Ray's scheduler says.
    """
    from ray.data import ExecutionResources
    from ray.data._internal.cluster_autoscaler import RateBasedClusterAutoscaler

    before = private(RateBasedClusterAutoscaler, "get_total_resources", "ray")
    if before.__name__ == "at_least_something":
        return
    enough = ExecutionResources.for_limits(cpu=10_000, object_store_memory=2**50, memory=2**50)

    def at_least_something(self: RateBasedClusterAutoscaler) -> ExecutionResources:
        total = before(self)
        return total if total.cpu and total.object_store_memory else enough

    RateBasedClusterAutoscaler.get_total_resources = at_least_something


def start_statistics_here() -> None:
    """Starts Ray Data's actor for statistics, which is detached and pinned to the node of whoever reads first
    (data/_internal/stats.py): on a worker's, that would never become idle, and no autoscaler could end it."""
    from ray.data._internal.stats import get_or_create_stats_actor

    get_or_create_stats_actor()


def keep_no_statistics() -> None:
    """Lets Ray Data send nothing of this process's executions to its actor for statistics.

    A stream is an execution for each epoch, under a name of its own, and the actor keeps some 150 gauges of
    each (data/_internal/stats.py): it grew by 0.5 to 1 MiB with every epoch of each rank, without end, and
    the agents that export its gauges with it. What they show of one epoch's reading nobody looks at.
    """
    from ray.data._internal.stats import _StatsManager

    def nothing(*_: Any, **__: Any) -> None:
        pass

    for name in STATISTICS:
        private(_StatsManager, name, "ray")
        setattr(_StatsManager, name, staticmethod(nothing))
