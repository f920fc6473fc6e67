"""What a step hands to the metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


OF_ROWS = ("logits", "predictions", "labels", "weights")  # tensors of TaskOutputs


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
        is_skipped: Returns True if the step is skipped, once the device has computed the forward pass; None
            unless train.on_nan is skip.
        losses: in training, task (or objective.OF_MODEL) → its part of the loss, so that the sum over ranks ÷
            rows of the global batch is the loss of the step: × those rows ÷ ranks.
        vectors: float32 [B, width], of one tower of the model (worker.step.Head), or None.
    """

    tasks: dict[str, TaskOutputs]
    rows: torch.Tensor
    loss: torch.Tensor
    is_skipped: Callable[[], object] | None = None
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    vectors: torch.Tensor | None = None

    def __getitem__(self, task: str) -> TaskOutputs:
        return self.tasks[task]

    def masked(self, mask: torch.Tensor, is_skipped: Callable[[], object]) -> Outputs:
        """Return the outputs of a step that may be skipped: zeros if it is, as its numbers may be NaN.

        Args:
            mask: Bool scalar on the step's device; True if the step is skipped.
            is_skipped: Same for the host.
        """

        def kept(values: torch.Tensor) -> torch.Tensor:
            return values.masked_fill(mask, 0)

        tasks = {
            task: replace(own, **{name: kept(getattr(own, name)) for name in OF_ROWS})
            for task, own in self.tasks.items()
        }
        losses = {name: kept(part) for name, part in self.losses.items()}
        rows, loss = kept(self.rows), kept(self.loss)
        return replace(self, tasks=tasks, rows=rows, loss=loss, losses=losses, is_skipped=is_skipped)

    @property
    def skipped(self) -> bool:
        """True if the step is skipped on all ranks; waits for the forward pass."""
        return self.is_skipped is not None and bool(self.is_skipped())
