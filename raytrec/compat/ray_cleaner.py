"""Ray Train's PlacementGroupCleaner, asking its own cluster.

It removes the places of a group whose controller has died. Ray 2.60 (ray/train/v2/_internal: execution/
controller/placement_group_cleaner.py, callbacks/placement_group_callback.py) asks the state API whether the
controller lives, and that asks the cluster that was started last on this machine: when it is another one, it
knows of no such controller, and all workers of the run are killed.
"""

from __future__ import annotations

from typing import Any

from ray.train.v2._internal.callbacks import placement_group_callback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller import placement_group_cleaner
from ray.train.v2._internal.execution.controller.placement_group_cleaner import PlacementGroupCleaner

from raytrec.compat.ray_core import actor_state
from raytrec.compat.versions import missing


class OwnClusterCleaner(PlacementGroupCleaner):
    """The actor; alone in its process."""

    def start_monitoring(self) -> bool:
        placement_group_cleaner.is_actor_alive = is_alive_here
        return super().start_monitoring()


class OwnClusterCleanerCallback(PlacementGroupCleanerCallback):
    """Starts the actor, from the controller's process, which serves one run."""

    def after_controller_start(self, train_run_context: Any) -> None:
        placement_group_callback.PlacementGroupCleaner = OwnClusterCleaner
        super().after_controller_start(train_run_context)


def with_own_cleaner(callbacks: list[Any]) -> list[Any]:
    """Ray Train's default callbacks with that one in its place.

    Raises:
        RunError: as `replaced`.
    """
    return replaced(callbacks, PlacementGroupCleanerCallback, [OwnClusterCleanerCallback()])


def without_cleaner(callbacks: list[Any]) -> list[Any]:
    """Ray Train's default callbacks without it: in a Ray that ends with its run, nothing has to be removed.

    Raises:
        RunError: as `replaced`.
    """
    return replaced(callbacks, PlacementGroupCleanerCallback, [])


def replaced(callbacks: list[Any], kind: type, others: list[Any]) -> list[Any]:
    """Callbacks with others in the place of the one of some kind.

    Raises:
        RunError: Ray Train has no such callback any more.
    """
    if not any(type(each) is kind for each in callbacks):
        raise missing(f"{kind.__name__} among TorchTrainer's callbacks", "ray")
    return [new for each in callbacks for new in (others if type(each) is kind else [each])]


def is_alive_here(actor_id: str, timeout: float) -> bool:
    """Whether an actor of this process's own cluster lives, by its GCS.

    Raises:
        RayStateApiException: not known; the cleaner then asks again.
    """
    import ray
    from ray.util.state.exception import RayStateApiException

    actor = actor_state(actor_id)
    if not actor and not ray.nodes():
        raise RayStateApiException("the cluster does not answer")
    return bool(actor) and actor["State"] != "DEAD"
