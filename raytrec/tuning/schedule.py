"""Which trials Ray Tune runs, and which of them are stopped: in the process of the search."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import Searcher

from raytrec.metrics.selection import Figure
from raytrec.tuning.actor import LOSS, ROWS
from raytrec.tuning.trials import Trial


class Queue(Searcher):
    """Hands out trials in their order, until there are none or the search is to end.

    Args:
        configs: what each trial's actor is told.
        ending: whether no further trial should begin.
    """

    def __init__(self, configs: Iterable[dict[str, Any]], ending: Callable[[], bool]):
        super().__init__()
        self._configs, self._ending = list(configs), ending

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        if self._ending() or not self._configs:
            return Searcher.FINISHED
        return self._configs.pop(0)

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        """Nothing is learned from it: all configurations have been drawn."""

    # Ray Tune's snapshots are not used: what it takes to resume a search is in its folder.
    def save(self, checkpoint_path: str) -> None: ...
    def restore(self, checkpoint_path: str) -> None: ...


class Halving(ASHAScheduler):
    """Asynchronous successive halving (Li et al., MLSys 2020, https://arxiv.org/abs/1810.05934).

    A trial's age is the rows that it was trained on, so that batch sizes may differ. At grace,
    grace × factor, grace × factor², … rows its loss is compared with those that others had at that age; one
    that is not among the best 1 / factor of them is stopped. It is asked to, and reported on until it has
    saved: Ray Tune itself, which would be told by the decision STOP, might give it no more than 10 s.

    Args:
        past: trials of before, whose evaluations count.
        stop: called with the number of a trial that is to end, and its last step.
        grace_rows, most_rows: the age at which a trial may be stopped first; the age of a whole run.
    """

    def __init__(
        self,
        figure: Figure,
        past: Iterable[Trial],
        stop: Callable[[int, int], None],
        *,
        grace_rows: int,
        most_rows: int,
        factor: float,
    ):
        super().__init__(
            time_attr=ROWS,
            metric=LOSS,
            mode="min",
            grace_period=grace_rows,
            max_t=max(most_rows - 1, grace_rows),  # at the end there is nothing to stop
            reduction_factor=factor,
            stop_last_trials=False,  # a run ends by itself
        )
        self._stop = stop
        for trial in past:
            known = SimpleNamespace(trial_id=trial.number)
            super().on_trial_add(None, known)
            for step, value in sorted(trial.points.items()):
                result = {ROWS: step * trial.batch_rows, LOSS: figure.loss(value)}
                super().on_trial_result(None, known, result)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, _known(trial))

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_remove(tune_controller, _known(trial))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict) -> None:
        super().on_trial_complete(tune_controller, _known(trial), result)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        decision = super().on_trial_result(tune_controller, _known(trial), result)
        if decision == TrialScheduler.STOP:
            self._stop(trial.config["number"], result["step"])
        return TrialScheduler.CONTINUE


def _known(trial: Any) -> SimpleNamespace:
    """A trial of Ray Tune's under its number, which stays the same when the search is resumed."""
    return SimpleNamespace(trial_id=trial.config["number"])
