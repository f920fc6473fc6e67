"""Warm processes on the nodes of a cluster that was joined: workers that start again are forked.

On a local Ray even the first workers are forked (warm.py). Of a cluster that was joined, raylets start the
workers as new processes, which import for seconds. While they train, an actor on each of their nodes starts
a process that imports the same. Workers that start again ask it for a fork (warm_site/sitecustomize.py), and
begin from the beginning where it does not answer.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from raytrec.cluster.forked_worker import is_private, node_place
from raytrec.cluster.warm import PLACE, Warm

SITE = Path(__file__).parent / "warm_site"
LOOK_EVERY_S = 5.0


def asks_for_forks(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker's runtime environment, with those by which it asks for a fork.

    Args:
        environment: its variables.
    """
    import ray

    of_job = ray.get_runtime_context().runtime_env.get("env_vars", {}).get("PYTHONPATH")
    return {**environment, "PYTHONPATH": ":".join([str(SITE), of_job or "${PYTHONPATH}"])}


class WarmNodes:
    """Keeps a warm process on each node that workers are on; they end with the driver.

    Args:
        modules, on_ray: what it imports; see Warm.
        environment: of the workers' runtime environment.
        nodes: asks for the names of the nodes that workers are on: a reference of Ray's. (The driver itself
            asks the GCS nothing, which would not answer for a minute when it has ended.)
        began: whether workers train, so that nobody waits for what is imported meanwhile.
    """

    def __init__(
        self,
        modules: Sequence[str],
        on_ray: Sequence[str],
        environment: Mapping[str, str],
        nodes: Callable[[], Any],
        began: Callable[[], bool],
    ):
        self._import, self._environment = (list(modules), list(on_ray)), dict(environment)
        self._nodes, self._began = nodes, began
        self._asked: Any = None
        self._actors: dict[str, Any] = {}
        self._next_s = 0.0

    def look(self) -> None:
        """To be called now and then; does not wait."""
        import ray

        if not self._began() or monotonic() < self._next_s:
            return
        if self._asked is None:
            self._asked = self._nodes()
        if not ray.wait([self._asked], timeout=0, fetch_local=False)[0]:
            return
        asked, self._asked, self._next_s = self._asked, None, monotonic() + LOOK_EVERY_S
        try:
            self._keep(set(ray.get(asked)))
        except ray.exceptions.RayError:  # of what has ended, others will say so
            return

    def _keep(self, nodes: set[str]) -> None:
        for node in nodes - set(self._actors):
            self._actors[node] = self._start(node)
        for node in set(self._actors) - nodes:  # an autoscaler takes nodes away that have no actors
            del self._actors[node]

    def _start(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        actor = ray.remote(WarmNode).options(
            num_cpus=0,
            scheduling_strategy=On(node, soft=False),
            runtime_env={"env_vars": self._environment},
        )
        return actor.remote(*self._import)


class WarmNode:
    """The actor: a node's warm process ends with it."""

    def __init__(self, modules: list[str], on_ray: list[str]):
        self._warm: Warm | None = None
        place = Path(node_place(os.environ))
        if PLACE in os.environ:  # its raylet has workers forked already
            return
        _sweep(place)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        if is_private(str(place.parent)):
            self._warm = Warm(modules, on_ray, _first_environment())
            self._warm.listen(place)
            self._warm.serve_joined(place)

    def __ray_shutdown__(self) -> None:
        """What Ray calls before the actor ends, unless it is killed."""
        if self._warm is not None:
            self._warm.close()


def _sweep(place: Path) -> None:
    """Removes the folders of actors that were killed, as all are at the end of a job."""
    family = place.parent.name.rsplit("-", 2)[0]
    for folder in place.parent.parent.glob(f"{family}-*"):
        if is_private(str(folder)) and not _answers(folder / place.name):
            shutil.rmtree(folder, ignore_errors=True)


def _answers(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(place))
        except OSError:
            return False
    return True


def _first_environment() -> dict[str, str]:
    """With which this process began: a worker of Ray's changes its own, and the next begins with this."""
    parts = Path("/proc/self/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(part).split("=", 1) for part in parts if b"=" in part)
