"""Calibration, its reliability diagram, and ECE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raytrec.metrics.registry import POSITIVES, SumMetric, metric

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.over_ranks.ranked import Ranked
    from raytrec.tasks.outputs import TaskOutputs


BINS = 15  # of equal width, of the ECE
DRAWN = 20  # bins of the reliability diagram, of about equally many rows


def reliability(ranked: Ranked) -> dict[str, list] | None:
    """Of each bin of predictions the mean prediction (predicted), the mean label (actual), both weighted, and
    the rows; None when labels are not both 0 and 1. A collective."""
    import torch

    if not ranked.both_classes:
        return None
    ties = ranked.ties
    places = (ranked.before(2) / ranked.total[2] * DRAWN).long().clamp(max=DRAWN - 1)
    weights = ties.positive + ties.negative
    values = torch.stack([ties.predictions * weights, ties.positive, weights, ties.rows], 1)
    sums = ranked.peers.sum(values.new_zeros(DRAWN, 4).index_add_(0, places, values))
    predicted, positive, weights, rows = sums[sums[:, 3] > 0].T
    return {
        "predicted": (predicted / weights).tolist(),
        "actual": (positive / weights).tolist(),
        "rows": rows.long().tolist(),
    }


@metric(
    "calibration",
    title="calibration (predicted ÷ real)",
    better="closer to 1",
    takes=("probability", "number"),
)
class Calibration(SumMetric):
    """The sum of predictions ÷ the sum of labels, both weighted; NaN where the labels' sum is 0.

    Source: torchrec.metrics.calibration, which is 0 where the labels' sum is not above 0; He et al. 2014
    (entropy.NE), section 3.
    """

    ranked_curve = staticmethod(reliability)

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        from torchrec.metrics.calibration import get_calibration_states

        return get_calibration_states(outputs.labels, outputs.predictions, outputs.weights)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> float:
        labels = sums["calibration_denom"]
        return float(sums["calibration_num"] / labels) if labels else float("nan")

    @staticmethod
    def counts(sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The positives: the ratio varies by about 1 ÷ √positives by chance."""
        return {POSITIVES: sums["calibration_denom"]}


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
