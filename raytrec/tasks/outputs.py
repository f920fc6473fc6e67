"""What a step hands to the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


OF_ROWS = ("logits", "predictions", "labels", "weights")  # tensors of TaskOutputs


class Verdict(Protocol):
    """Whether a step is skipped because its loss is not finite on some rank (worker/nonfinite.py).

    Attributes:
        mask: bool scalar on the step's device.
    """

    mask: torch.Tensor

    @property
    def skipped(self) -> bool:
        """As the host knows it; waits for the forward pass."""


@dataclass(frozen=True)
class TaskOutputs:
    """One task's part of a rank's step; detached, float32 [B] each, on the step's device.

    Attributes:
        logits: what the model gave. predictions: what they mean in the label's units (of bce, probabilities).
            Both are [B, C] for a task of C classes.
        labels: of the task; finite also where a row has none.
        weights: of each row in the task's loss and metrics; 0 for padding and rows that do not count.
        keys: column → int64 [B], for the columns that groups, items and slices need (Batch.keys).
    """

    logits: torch.Tensor
    predictions: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    keys: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def joined(cls, steps: Sequence[TaskOutputs]) -> TaskOutputs:
        """The rows of several steps of a task, one after the other."""
        import torch

        rows = {name: torch.cat([getattr(step, name) for step in steps]) for name in OF_ROWS}
        keys = {name: torch.cat([step.keys[name] for step in steps]) for name in steps[0].keys}
        return cls(**rows, keys=keys)


@dataclass(frozen=True)
class Outputs:
    """What one rank's step hands to the metrics.

    A step that is skipped on all ranks has zero logits, predictions, labels, weights and losses.

    Attributes:
        tasks: task → its part, in the order of the configuration.
        rows: float32 [B], 1 for a row and 0 for padding, whatever a task's own weights.
        loss: the scalar that this rank calls backward on (tasks/objective.py): its part × ranks.
        verdict: whether the step is skipped; None unless train.on_nan is skip.
        losses: in training, task (or objective.OF_MODEL) → its part of the loss, so that the sum over ranks ÷
            rows of the global batch is the loss of the step: × those rows ÷ ranks.
        vectors: float32 [B, width], of one tower of the model (worker.step.Head), or None.
    """

    tasks: dict[str, TaskOutputs]
    rows: torch.Tensor
    loss: torch.Tensor
    verdict: Verdict | None = None
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    vectors: torch.Tensor | None = None

    def __getitem__(self, task: str) -> TaskOutputs:
        return self.tasks[task]

    def masked(self, verdict: Verdict) -> Outputs:
        """The same of a step that may be skipped: zeros, if it is, in place of numbers that may be NaN."""

        def kept(values: torch.Tensor) -> torch.Tensor:
            return values.masked_fill(verdict.mask, 0)

        tasks = {
            task: replace(own, **{name: kept(getattr(own, name)) for name in OF_ROWS})
            for task, own in self.tasks.items()
        }
        losses = {name: kept(part) for name, part in self.losses.items()}
        return replace(
            self, tasks=tasks, rows=kept(self.rows), loss=kept(self.loss), verdict=verdict, losses=losses
        )

    @property
    def skipped(self) -> bool:
        """Whether the step is skipped on all ranks."""
        return self.verdict is not None and self.verdict.skipped
