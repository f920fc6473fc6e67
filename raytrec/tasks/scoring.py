"""What becomes of logits where nothing is learned: scores, without labels and without a loss."""

from __future__ import annotations

from typing import Any

import torch

from raytrec.tasks.objective import Objective
from raytrec.tasks.outputs import Outputs


class Scoring(Objective):
    """The tasks' predictions alone. There are no labels, and so no loss; no part of it is a collective."""

    def losses(self, logits: torch.Tensor, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        """0."""
        return {self.tasks[0].name: logits.new_zeros(())}

    def outputs(
        self,
        loss: torch.Tensor,
        logits: torch.Tensor,
        labels_BL: Any,
        weights_B: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> Outputs:
        """Labels are 0, and every row counts in every task."""
        labels = 1 + max(task.column for task in self.tasks)
        return super().outputs(loss, logits, weights_B.new_zeros(len(weights_B), labels), weights_B)
