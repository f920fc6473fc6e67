"""Log loss and normalised entropy, by TorchRec's formulas."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import TYPE_CHECKING

from raytrec.metrics.registry import SumMetric, metric

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


@metric(
    "logloss", title="log loss (nats)", label="log loss", better="lower", takes=("probability", "classes")
)
class LogLoss(SumMetric):
    """The mean cross-entropy of a row, in nats: -Σ w (y ln p + (1 - y) ln (1 - p)) ÷ Σ w, or of classes,
    -Σ w ln p_label ÷ Σ w.

    Source: torchrec.metrics.ne.compute_logloss, which is in bits.
    """

    sums = staticmethod(entropy_sums)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> float:
        from torchrec.metrics.ne import compute_logloss

        positive, negative = sums["pos_labels"], sums["neg_labels"]
        return float(compute_logloss(sums["cross_entropy_sum"], positive, negative, ETA)) * log(2)


@metric("ne", title="NE (normalised entropy)", label="NE", better="lower", takes=("probability",))
class NE(SumMetric):
    """The cross-entropy ÷ that of always predicting the mean label; NaN where all labels are equal.

    Source: X. He et al., Practical Lessons from Predicting Clicks on Ads at Facebook, ADKDD 2014, section 3.
    """

    sums = staticmethod(entropy_sums)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> float:
        from torchrec.metrics.ne import compute_ne

        positive, negative = sums["pos_labels"], sums["neg_labels"]
        if positive <= 0 or negative <= 0:
            return float("nan")
        rows = sums["weighted_num_samples"]
        return float(compute_ne(sums["cross_entropy_sum"], rows, positive, negative, ETA))
