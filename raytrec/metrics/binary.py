"""Sums that metrics of probabilities share; TorchRec's formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from raytrec.tasks.outputs import TaskOutputs

ETA = 1e-12  # TorchRec's bound on probabilities inside logarithms


def entropy_sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
    """Cross-entropy in bits, rows, and the sums of labels and of 1 - labels, all weighted; where predictions
    are of classes, the last two are all rows, and none.

    Source: torchrec.metrics.ne.get_ne_states.
    """
    if outputs.predictions.dim() == 2:
        return _entropy_of_classes(outputs)
    from torchrec.metrics.ne import get_ne_states

    return get_ne_states(outputs.labels, outputs.predictions, outputs.weights, ETA)


def _entropy_of_classes(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
    weights_B = outputs.weights.double()
    of_labels_B = outputs.predictions.double().gather(1, outputs.labels.long().unsqueeze(1)).squeeze(1)
    rows = weights_B.sum()
    return {
        "cross_entropy_sum": -(weights_B * of_labels_B.clamp(min=ETA).log2()).sum(),
        "weighted_num_samples": rows,
        "pos_labels": rows,
        "neg_labels": rows.new_zeros(()),
    }
