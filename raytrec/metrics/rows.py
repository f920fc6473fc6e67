"""All rows of an evaluation, as metrics that need them at once take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rows:
    """One task's rows on rank 0, without padding and what the task's weights mask.

    Attributes:
        logits, labels: float32 [N], on one device, the CPU or a GPU; logits [N, C] for C classes.
        predict: of the task: logits → predictions.
        weights: float32 [N], above 0; None: all 1.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    predict: Callable[[torch.Tensor], torch.Tensor]
    weights: torch.Tensor | None = None

    @cached_property
    def predictions(self) -> torch.Tensor:
        """In the label's units, float64 [N] (or [N, C])."""
        return self.predict(self.logits.double())

    @cached_property
    def binary_labels(self) -> torch.Tensor | None:
        """Labels as int64 [N] where they are 0 and 1, and there are both; else None."""
        binary = self.labels.round()
        if not binary.numel() or not binary.equal(self.labels) or binary.min() == binary.max():
            return None
        return binary.long() if binary.min() >= 0 and binary.max() <= 1 else None
