"""Where read tasks run: on nodes without GPUs, as long as there are any."""

from __future__ import annotations

import random
from functools import lru_cache
from time import monotonic
from typing import Any

from raytrec.compat.ray_data import prefer_node

LOOK_EVERY_S = 10.0  # nodes come and go


def place() -> dict[str, Any]:
    """Ray options for one read task.

    On a cluster of both kinds, the CPUs beside GPUs belong to those who train: a node without GPUs is chosen
    at random, those with more CPUs more often, because tasks ask for none; Ray chooses another if it is gone.
    Else Ray chooses, this node first.
    """
    nodes = _nodes(int(monotonic() / LOOK_EVERY_S))
    if not nodes:
        return {"scheduling_strategy": "DEFAULT"}
    (chosen,) = random.choices(list(nodes), weights=list(nodes.values()))
    return {"scheduling_strategy": prefer_node(chosen)}


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
