"""How far a run has got: what goes into a checkpoint beside the tensors, and comes back out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from raytrec.metrics.sums import Sums
from raytrec.tasks.outputs import Outputs
from raytrec.worker.context import Clock


@dataclass
class Progress:
    """Counts of a run from its very beginning, through all restarts.

    Attributes:
        step: steps that have been trained. The cursor: with steps per epoch it says which rows are left.
        rows: rows of those steps, rows that could not be read included.
        trained: rows that had a loss, as far as they have been reported.
        nan_steps: steps that were skipped because their loss was not finite (train.on_nan: skip).
        window: sums for the metrics since they were last reported, or of the last eval.window_steps steps.
        clock: seconds and rows of training.
        reported: the figures of the last window.
        evaluation: figures of the last evaluation of train.eval_every_steps, and its step.
        early_stopping: of the evaluations so far the best figure, its step, and how many came since it.
    """

    window: Sums
    step: int = 0
    rows: int = 0
    trained: int = 0
    nan_steps: int = 0
    clock: Clock = field(default_factory=Clock)
    reported: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    early_stopping: dict[str, Any] = field(default_factory=dict)

    @property
    def evaluated(self) -> bool:
        """Whether this very step has been evaluated."""
        return self.evaluation.get("step") == self.step

    @property
    def last_evaluation(self) -> dict[str, Any] | None:
        """The figures of this very step as JSON, which has no NaN."""
        if not self.evaluated:
            return None
        undefined = {k for k, v in self.evaluation.items() if isinstance(v, float) and not isfinite(v)}
        return {k: None if k in undefined else v for k, v in self.evaluation.items()}

    def count(self, rows: int, outputs: Outputs) -> None:
        """A step of `rows` rows, over all ranks, has been trained."""
        self.step, self.rows = self.step + 1, self.rows + rows
        self.nan_steps += outputs.skipped
        self.window.add(outputs)
        self.clock.step(rows)

    def result(self) -> dict[str, Any]:
        """What the training of a finished run comes to."""
        return {
            "train.rows": self.trained,
            "train.skipped_rows": self.rows - self.trained,
            "train.nan_steps": self.nan_steps,
            "train.steps": self.step,
            "train.samples_per_s": self.clock.rows_per_s,
        }

    def record(self) -> dict[str, Any]:
        """As JSON; a collective."""
        return {
            "step": self.step,
            "rows": self.rows,
            "trained": self.trained,
            "nan_steps": self.nan_steps,
            "window": self.window.total(),
            **({"last_steps": steps} if (steps := self.window.last_steps()) else {}),
            "seconds": self.clock.seconds,
            "timed_rows": self.clock.rows,
            "evaluation": self.last_evaluation,
            "early_stopping": self.early_stopping,
        }

    def resume(self, record: dict[str, Any]) -> None:
        """Goes on from a record."""
        for name in ("step", "rows", "trained", "nan_steps"):
            setattr(self, name, record[name])
        self.window.resume(record["window"], record.get("last_steps"))
        self.clock.seconds, self.clock.rows = record["seconds"], record["timed_rows"]
        self.evaluation = record["evaluation"] or {}
        self.early_stopping = dict(record.get("early_stopping", {}))  # earlier raytrecs had none

    def report(self) -> dict[str, Any]:
        """Figures of the window, and of what has been counted since the last report; a collective."""
        figures = self.reported = self.window.reduce()
        self.trained += int(figures["rows"])
        return figures | {
            "rows": self.rows,
            "rows_per_s": self.clock.rows_per_s,
            "skipped_rows": self.rows - self.trained,
            "nan_steps": self.nan_steps,
        }
