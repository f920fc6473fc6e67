"""Outputs of a training or evaluation step, which the metrics read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


ROW_TENSORS = ("logits", "predictions", "labels", "weights")  # attributes of TaskOutputs with one value per row


@dataclass(frozen=True)
class TaskOutputs:
    """Outputs of one task in a rank's step: detached tensors, float32 [B] each, on the step's device.

    If rows are requests with candidates, B is the number of candidates.

    Attributes:
        logits: Calibrated logits (Task.calibrate); [B, C] for a task with C classes.
        predictions: Predictions in the label's units, such as probabilities for bce; [B, C] for C classes.
        labels: Labels of the task; rows without a label have a finite value.
        weights: Weight of each row in the task's loss and metrics; 0 for padding and rows that the task ignores.
        keys: Column of Batch.keys, such as a group, item or slice column → key of each row's value, int64 [B].
    """

    logits: torch.Tensor
    predictions: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    keys: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def joined(cls, steps: Sequence[TaskOutputs]) -> TaskOutputs:
        """Return the concatenated outputs of a task in one or more steps, all of which must have the same keys."""
        import torch

        rows = {name: torch.cat([getattr(step, name) for step in steps]) for name in ROW_TENSORS}
        keys = {name: torch.cat([step.keys[name] for step in steps]) for name in steps[0].keys}
        return cls(**rows, keys=keys)


@dataclass(frozen=True)
class StepOutputs:
    """Outputs of one rank in a step.

    A step that is skipped on all ranks has zero logits, predictions, labels, weights, rows and losses.

    Attributes:
        tasks: Task → outputs of the task, in the order of the configuration.
        rows: 1 for a row and 0 for padding, independent of task weights, float32 [B].
        loss: Scalar on which this rank calls backward (tasks/objective.py), i.e. this rank's part of the
            global batch's loss, multiplied by the number of ranks.
        is_skipped: Function that waits for the forward pass and returns True if the step is skipped; None
            unless train.on_nan is skip.
        losses: Task (or objective.MODEL_LOSS_KEY) → the task's part of `loss` × rows of the global batch ÷
            ranks, in training. Their sum over tasks and ranks ÷ rows of the global batch is the step's loss.
        vectors: Vectors from one tower of the model (worker.step.Head), float32 [B, width]; None: no tower.
    """

    tasks: dict[str, TaskOutputs]
    rows: torch.Tensor
    loss: torch.Tensor
    is_skipped: Callable[[], object] | None = None
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    vectors: torch.Tensor | None = None

    def __getitem__(self, task: str) -> TaskOutputs:
        return self.tasks[task]

    def masked(self, mask: torch.Tensor, is_skipped: Callable[[], object]) -> StepOutputs:
        """Return the outputs, which are replaced by zeros if the step is skipped, because they may then be NaN.

        Args:
            mask: Bool scalar on the step's device; True if the step is skipped.
            is_skipped: Function that returns the same value on the host.
        """

        def mask_values(values: torch.Tensor) -> torch.Tensor:
            return values.masked_fill(mask, 0)

        tasks = {
            task: replace(outputs, **{name: mask_values(getattr(outputs, name)) for name in ROW_TENSORS})
            for task, outputs in self.tasks.items()
        }
        losses = {name: mask_values(part) for name, part in self.losses.items()}
        rows, loss = mask_values(self.rows), mask_values(self.loss)
        return replace(self, tasks=tasks, rows=rows, loss=loss, losses=losses, is_skipped=is_skipped)

    @property
    def skipped(self) -> bool:
        """Return True if the step is skipped on all ranks, after waiting for the forward pass."""
        return self.is_skipped is not None and bool(self.is_skipped())
