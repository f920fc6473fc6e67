"""Sums that metrics of probabilities share; TorchRec's formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from raytrec.tasks.outputs import TaskOutputs

ETA = 1e-12  # TorchRec's bound on probabilities inside logarithms


def entropy_sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
    """Cross-entropy in bits, rows, and the sums of labels and of 1 - labels, all weighted.

    Source: torchrec.metrics.ne.get_ne_states.
    """
    from torchrec.metrics.ne import get_ne_states

    return get_ne_states(outputs.labels, outputs.predictions, outputs.weights, ETA)
