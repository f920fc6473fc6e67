"""Expected calibration error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.registry import SumMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.tasks.outputs import TaskOutputs

BINS = 15  # of equal width


@metric("ece", title="ECE (expected calibration error)", label="ECE", better="lower", takes=("probability",))
class ECE(SumMetric):
    """Σ_b |Σ w p - Σ w y| ÷ Σ w: over 15 bins of equal width, the distance of the mean prediction from the
    mean label, weighted by the bins' rows. Bin b holds predictions in [b/15, (b+1)/15), the last one 1, too.
    NaN without rows.

    Source: M. P. Naeini et al., Obtaining Well Calibrated Probabilities Using Bayesian Binning, AAAI 2015; 15
    bins as in C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017.
    """

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        places_B = (outputs.predictions * BINS).long().clamp(0, BINS - 1)
        weights_B = outputs.weights.double()
        off_B = weights_B * (outputs.predictions.double() - outputs.labels)
        bins = off_B.new_zeros(BINS).index_add_(0, places_B, off_B)
        return {"weight": weights_B.sum(), **{f"bin{i}": each for i, each in enumerate(bins.unbind())}}

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sum(sums[f"bin{i}"].abs() for i in range(BINS)) / sums["weight"]
