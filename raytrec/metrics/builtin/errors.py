"""Metrics of single rows: log loss, NE, MAE, MSE, RMSE, accuracy, calibration, ECE."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import TYPE_CHECKING

from raytrec.metrics.registry import POSITIVES, SumMetric, metric
from raytrec.tasks.losses import Kind

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.ranked import Ranked
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


NUMBERS: tuple[Kind, ...] = ("probability", "number")
HALF = 0.5


@metric("mae", title="MAE (mean absolute error)", label="MAE", better="lower", format="{:.4g}", takes=NUMBERS)
class MAE(SumMetric):
    """Σ w |p - y| ÷ Σ w, in units of the label; NaN without rows.

    Source: torchrec.metrics.mae, which sums in the same way.
    """

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        errors_B = outputs.predictions.double() - outputs.labels
        return {"errors": (outputs.weights * errors_B.abs()).sum(), "weight": outputs.weights.sum()}

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sums["errors"] / sums["weight"]


@metric("mse", title="MSE (mean squared error)", label="MSE", better="lower", format="{:.4g}", takes=NUMBERS)
class MSE(SumMetric):
    """Σ w (p - y)² ÷ Σ w, in squared units of the label; NaN without rows.

    Source: torchrec.metrics.mse, which sums in the same way.
    """

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        errors_B = outputs.predictions.double() - outputs.labels
        return {"squares": (outputs.weights * errors_B.square()).sum(), "weight": outputs.weights.sum()}

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sums["squares"] / sums["weight"]


@metric(
    "rmse",
    title="RMSE (root of the mean squared error)",
    label="RMSE",
    better="lower",
    format="{:.4g}",
    takes=NUMBERS,
)
class RMSE(SumMetric):
    """√(Σ w (p - y)² ÷ Σ w), in units of the label; NaN without rows."""

    sums = staticmethod(MSE.sums)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return MSE.figure(sums).sqrt()


@metric("accuracy", better="higher", takes=("probability", "classes"))
class Accuracy(SumMetric):
    """Σ w [right] ÷ Σ w; NaN without rows.

    Of probabilities: right where prediction and label are on one side of 0.5 (above it, or not). Of classes:
    right where the class with the highest prediction, the first of equal ones, is the label.
    """

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        if outputs.predictions.dim() == 2:
            right_B = outputs.predictions.argmax(1) == outputs.labels
        else:
            right_B = (outputs.predictions > HALF) == (outputs.labels > HALF)
        return {"right": (right_B * outputs.weights).double().sum(), "weight": outputs.weights.double().sum()}

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sums["right"] / sums["weight"]


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
    (NE), section 3.
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
