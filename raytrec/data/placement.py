"""Where read tasks run: on nodes without GPUs, as long as there are any. That they run at all. What stays."""

from __future__ import annotations

import random
from functools import lru_cache
from time import monotonic
from typing import Any

LOOK_EVERY_S = 10.0  # nodes come and go


def place() -> dict[str, Any]:
    """Ray options for one read task.

    On a cluster of both kinds, the CPUs beside GPUs belong to those who train: a node without GPUs is chosen
    at random, those with more CPUs more often, because tasks ask for none; Ray chooses another if it is gone.
    Else Ray chooses, this node first.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = _nodes(int(monotonic() / LOOK_EVERY_S))
    if not nodes:
        return {"scheduling_strategy": "DEFAULT"}
    (chosen,) = random.choices(list(nodes), weights=list(nodes.values()))
    strategy = NodeAffinitySchedulingStrategy(chosen, soft=True, _spill_on_unavailable=True)
    return {"scheduling_strategy": strategy}


def nodes_without_gpus() -> dict[str, float]:
    """Id → CPUs of nodes with CPUs and without GPUs; none where all nodes are of one kind."""
    import ray

    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    if not any(has.get("GPU") for has in alive.values()):
        return {}
    return {node: has["CPU"] for node, has in alive.items() if has.get("CPU") and not has.get("GPU")}


@lru_cache(maxsize=1)
def _nodes(_: int) -> dict[str, float]:
    return nodes_without_gpus()


def leave_room_to_ray() -> None:
    """Lets Ray Data start read tasks where other parts of Ray have reserved all that there is.

    Where Ray Train's workers have reserved all CPUs of a cluster, Ray Data 2.60 starts no task, not even one
    that asks for no CPU, and waits for ever without a word (`get_total_resources` is then zero). The stream
    itself limits its tasks in number and memory; whether there is a CPU for them, Ray's scheduler says.
    """
    from ray.data import ExecutionResources
    from ray.data._internal.cluster_autoscaler import RateBasedClusterAutoscaler

    before = RateBasedClusterAutoscaler.get_total_resources
    if before.__name__ == "at_least_something":
        return
    enough = ExecutionResources.for_limits(cpu=10_000, object_store_memory=2**50, memory=2**50)

    def at_least_something(self: RateBasedClusterAutoscaler) -> ExecutionResources:
        total = before(self)
        return total if total.cpu and total.object_store_memory else enough

    RateBasedClusterAutoscaler.get_total_resources = at_least_something


def settle_here() -> None:
    """Starts what Ray Data keeps for as long as there is a cluster on this node: call it on the driver's.

    Its actor for statistics is detached, and pinned to the node of whoever reads first (ray 2.60.0,
    data/_internal/stats.py). A worker's node would then never become idle, and no autoscaler could end it.
    """
    from ray.data._internal.stats import get_or_create_stats_actor

    get_or_create_stats_actor()


def keep_no_statistics() -> None:
    """Lets Ray Data send nothing of this process's executions to its actor for statistics.

    A stream is an execution for each epoch, under a name of its own, and the actor keeps some 150 gauges of
    each (ray 2.60.0, data/_internal/stats.py): it grew by 0.5 to 1 MiB with every epoch of each rank, without
    end, and the agents that export its gauges with it. What they show of one epoch's reading nobody looks at.
    """
    from ray.data._internal.stats import _StatsManager

    def nothing(*_: Any, **__: Any) -> None:
        pass

    for name in ("register_dataset_to_stats_actor", "update_execution_metrics", "update_iteration_metrics"):
        if not hasattr(_StatsManager, name):
            raise AttributeError(f"Ray Data has another _StatsManager: no {name}")
        setattr(_StatsManager, name, staticmethod(nothing))
