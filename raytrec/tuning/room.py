"""How many trials run at a time: each of them has to find room for its workers."""

from __future__ import annotations

import os
from collections.abc import Iterable

from raytrec.common.errors import ConfigError
from raytrec.compat.ray_core import starts_nodes
from raytrec.config.run_config import RunConfig
from raytrec.driver.nodes import alive_nodes
from raytrec.driver.session import bundle, local_cpus


def cpus_of_local_ray(configs: Iterable[RunConfig], at_once: int | None) -> int:
    """Logical CPUs of a local Ray: those of the trials that run at a time, which are what the machine's
    processors hold, but at least one.

    Args:
        at_once: trials that the user wants to run at a time, whatever the processors hold.
    """
    each = max(map(local_cpus, configs))
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return each * (at_once or max(1, here // each))


def trials_at_once(configs: Iterable[RunConfig], at_once: int | None) -> int:
    """How many trials the nodes of this Ray hold, each with all of its workers, but at least one.

    More would wait for one another's places, which does no harm, as a group of workers gets all of its places
    or none; but a trial that waits is no use. Where an autoscaler starts nodes, the user's word counts.

    Args:
        at_once: at most so many; None: as many as there is room for.

    Raises:
        ConfigError: there is not even room for one.
    """
    room = min(map(_room, configs))
    if starts_nodes():
        return at_once or max(1, room)
    if not room:
        raise ConfigError(
            "the cluster has no room for the workers of one trial",
            where="scaling.num_workers, scaling.cpus_per_worker, data.readers",
            expected="CPUs for each worker and its readers, and a GPU for each worker on GPUs",
            do="lower scaling.num_workers or data.readers, or join a larger cluster",
        )
    return min(at_once or room, room)


def _room(config: RunConfig) -> int:
    """Trials of this kind that there is room for, were nothing else there."""
    nodes = [node["Resources"] for node in alive_nodes()]
    gpus = config.scaling.device == "cuda" or (
        config.scaling.device == "auto" and any(node.get("GPU") for node in nodes)
    )
    places = bundle(config, "cuda" if gpus else "cpu")
    workers = sum(int(min(node.get(name, 0) // n for name, n in places.items())) for node in nodes)
    least = workers // config.scaling.min_workers
    return workers // config.scaling.max_workers or min(least, 1)
