"""A trial on the cluster: a whole run, as Ray Tune sees it.

Tune calls one method of a trial after the other in the main thread of its actor. A run needs a main thread,
too, because signals are what asks it to save and end; so an actor of its own drives it, and this one reads
from the run folder how far it has got.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ray import tune

from raytrec.common.errors import RaytrecError, RunError, root_cause
from raytrec.driver.driver_state import ASKED, driver_of
from raytrec.metrics.selection import Figure
from raytrec.tuning.trials import FAILED, FINISHED, RUNNING, STOPPED, Evaluations

LOOK_S = 0.5  # between two looks at a run
LOSS, ROWS = "loss", "rows"  # of a result: what the scheduler compares, and at which age


class TrialActor(tune.Trainable):
    """One trial.

    Its config is {"number", "folder" (of the run, which has been made), "here" (where the command was given),
    "rows" (of a step), "figure" (the record of the searched metric)}. Each result says {"step", "rows",
    "value" (of the last evaluation; NaN before the first), "loss" (smaller is better), "points", "state",
    "error", "done"}.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._folder, self._rows = Path(config["folder"]), config["rows"]
        self._figure = Figure(**config["figure"])
        self._evaluations = Evaluations(self._folder, self._figure.key)
        self._driver = _beside(TrialDriver)
        self._end = self._driver.drive.remote(str(self._folder), config["here"])

    def step(self) -> dict[str, Any]:
        """How far the run has got, half a second later or when it has ended."""
        import ray

        ended = bool(ray.wait([self._end], timeout=LOOK_S)[0])
        state, error = self._how_it_ended() if ended else (RUNNING, "")
        self._evaluations.look()
        points = self._evaluations.points
        step = max(points, default=0)
        value = points.get(step, float("nan"))
        return {
            "step": self._evaluations.step,
            ROWS: step * self._rows,
            LOSS: self._figure.loss(value),
            "value": value,
            "points": list(points.items()),
            "state": state,
            "error": error,
            "done": ended,
        }

    def cleanup(self) -> None:
        """Ends the run at once, where it has not ended."""
        import ray

        ray.kill(self._driver)

    def _how_it_ended(self) -> tuple[str, str]:
        """
        Raises:
            RunError: its process died, so that it is worth another try from its last checkpoint.
        """
        import ray

        try:
            return ray.get(self._end)
        except ray.exceptions.RayActorError as died:
            if driver_of(self._folder).get("status") == "STOPPED":  # asked to, before it could save
                return STOPPED, ""
            raise RunError(f"the process that drives the trial died: {_first_line(died)}") from None


class TrialDriver:
    """Drives the run of a trial, in its main thread."""

    def drive(self, folder: str, here: str) -> tuple[str, str]:
        """Trains a run, from its newest checkpoint on if it has one; how that ended, and why.

        Args:
            here: working directory, where modules of the user's are looked for.
        """
        from raytrec.driver.run import train

        os.chdir(here)
        signal.signal(signal.SIGTERM, _leave)  # until the run has a handler of its own, by which it saves
        try:
            # What it names as code, the search has been allowed. It waits for a driver of before to end.
            train(None, resume=folder, resume_latest=True, allow_code=True)
        except ASKED:
            return STOPPED, ""
        except Exception as error:
            cause = root_cause(error)
            ours = isinstance(cause, RaytrecError)
            return FAILED, str(cause) if ours else f"{type(cause).__name__}: {cause}"
        return FINISHED, ""


def _leave(_number: int, _frame: Any) -> None:
    raise SystemExit


def _beside(kind: type) -> Any:
    """An actor on this node, which ends with this one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=here).remote()


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
