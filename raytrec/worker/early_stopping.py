"""Early stopping: training ends when a metric of its evaluations has not improved for a while."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from raytrec.common import messages
from raytrec.common.formatting import number
from raytrec.common.messages import ENDED_EARLY
from raytrec.config.sections import EarlyStoppingSection
from raytrec.metrics.selection import Figure
from raytrec.worker.context import WorkerContext
from raytrec.worker.progress import Progress

WHERE = "train.early_stopping.metric"


class EarlyStopping:
    """Decides after each evaluation, on all ranks alike.

    An evaluation improves on the best one if its figure is better; one whose figure is not defined does not.
    What has been seen is in `progress`, and so in every checkpoint: a resumed run ends where an undisturbed
    one does.

    Args:
        section: train.early_stopping; None: training never ends early.
        progress: of the run.
        device: what the collectives of this rank take.
    """

    def __init__(self, section: EarlyStoppingSection | None, progress: Progress, device: torch.device):
        self._progress, self._device = progress, device
        self._figure: Figure | None = None
        if section:
            self._patience = section.patience
            self._figure = progress.window.selection.best(section.metric, WHERE)

    @property
    def over(self) -> bool:
        """Whether training is to end now."""
        return self._figure is not None and self._progress.early_stopping.get("since", 0) >= self._patience

    def after_evaluation(self) -> None:
        """Takes the evaluation of this step into account; a collective.

        Rank 0 says its figure: of some metrics it is the only rank that has one.
        """
        if self._figure is None:
            return
        own = number(self._progress.evaluation.get(self._figure.key))
        said = torch.tensor(own, dtype=torch.float64, device=self._device)
        dist.broadcast(said, src=0)
        value, seen = float(said), self._progress.early_stopping
        best = seen.get("best")
        # A comparison with NaN is false: what is not defined improves on nothing.
        if self._figure.loss(value) < (float("inf") if best is None else self._figure.loss(best)):
            seen |= {"best": value, "step": self._progress.step, "since": 0}
        else:
            seen["since"] = seen.get("since", 0) + 1

    def report(self, context: WorkerContext) -> None:
        """Tells of an end before the last step, and what training has come to since it last reported."""
        if self._figure is None or not self.over:
            return
        step = self._progress.step
        if step % context.task.config.train.log_every_steps:
            context.report(messages.Train(step=step, figures=self._progress.report()))
        details = {"step": step, "reason": self._why(self._figure)}
        context.report(messages.Event(event=ENDED_EARLY, details=details))

    def result(self) -> dict[str, Any]:
        """What the result says of why training has ended; nothing without early stopping."""
        if self._figure is None:
            return {}
        return {"train.ended": self._why(self._figure) if self.over else "after all steps"}

    def _why(self, figure: Figure) -> str:
        seen = self._progress.early_stopping
        count = f"{seen['since']} evaluation{'s' * (seen['since'] > 1)}"
        if seen.get("best") is None:
            return f"{figure.key} was defined in none of {count}"
        return (
            f"{figure.key} has not improved in {count}; it was best at step {seen['step']}, "
            f"{figure.text(seen['best'])}"
        )
