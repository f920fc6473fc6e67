"""Metrics computed from sums over single rows: log loss, NE, MAE, MSE, RMSE, accuracy, calibration and ECE."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import TYPE_CHECKING

from raytrec.metrics.registry import POSITIVES, SumMetric, metric
from raytrec.tasks.losses import Kind

if TYPE_CHECKING:
    import torch

    from raytrec.metrics.ranked import RankedRows
    from raytrec.tasks.outputs import TaskOutputs

ETA = 1e-12  # TorchRec's bound on probabilities inside logarithms


def sum_entropy(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
    """Return the weighted sums over rows of the cross-entropy in bits, 1, the label, and 1 - label.

    Their names are cross_entropy_sum, weighted_num_samples, pos_labels and neg_labels. For class predictions, the last
    two sums are the total weight and 0. In the cross-entropy, probabilities are clamped to [ETA, 1 - ETA].

    Source: torchrec.metrics.ne.get_ne_states.
    """
    if outputs.predictions.dim() == 2:
        return _sum_class_entropy(outputs)
    from torchrec.metrics.ne import get_ne_states

    return get_ne_states(outputs.labels, outputs.predictions, outputs.weights, ETA)


def _sum_class_entropy(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
    weights_B = outputs.weights.double()
    of_labels_B = outputs.predictions.double().gather(1, outputs.labels.long().unsqueeze(1)).squeeze(1)
    rows = weights_B.sum()
    return {
        "cross_entropy_sum": -(weights_B * of_labels_B.clamp(min=ETA).log2()).sum(),
        "weighted_num_samples": rows,
        "pos_labels": rows,
        "neg_labels": rows.new_zeros(()),
    }


@metric("logloss", title="log loss (nats)", label="log loss", better="lower", takes=("probability", "classes"))
class LogLoss(SumMetric):
    """Mean cross-entropy per row in nats: -Σ w (y ln p + (1 - y) ln (1 - p)) ÷ Σ w.

    w is the weight of a row, y the label and p the prediction. For class predictions: -Σ w ln p_label ÷ Σ w, where
    p_label is the probability of the row's class. Probabilities are clamped as in `sum_entropy`.

    Source: torchrec.metrics.ne.compute_logloss, converted from bits to nats, without its bound on small Σ w.
    """

    sums = staticmethod(sum_entropy)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> float:
        """Return the mean cross-entropy in nats."""
        return float(sums["cross_entropy_sum"] / (sums["pos_labels"] + sums["neg_labels"])) * log(2)


@metric("ne", title="NE (normalized entropy)", label="NE", better="lower", takes=("probability",))
class NE(SumMetric):
    """Cross-entropy ÷ the cross-entropy of always predicting the mean label; NaN if all labels are 0 or all are 1.

    Source: X. He et al., Practical Lessons from Predicting Clicks on Ads at Facebook, ADKDD 2014, section 2.
    """

    sums = staticmethod(sum_entropy)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> float:
        """Return the normalized entropy."""
        from torchrec.metrics.ne import compute_ne

        positive, negative = sums["pos_labels"], sums["neg_labels"]
        if positive <= 0 or negative <= 0:
            return float("nan")
        rows = sums["weighted_num_samples"]
        # compute_ne replaces a sum of weights below ETA by ETA, so it gets sums that are divided by it.
        shares = (sums["cross_entropy_sum"] / rows, rows / rows, positive / rows, negative / rows)
        return float(compute_ne(*shares, ETA))


NUMBERS: tuple[Kind, ...] = ("probability", "number")
HALF = 0.5


class _Mean(SumMetric):
    """Base class of metrics whose method `sums` returns two sums, and whose value is the first ÷ the second."""

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the first sum ÷ the second."""
        total, weight = sums.values()
        return total / weight


@metric("mae", title="MAE (mean absolute error)", label="MAE", better="lower", format="{:.4g}", takes=NUMBERS)
class MAE(_Mean):
    """Mean absolute error Σ w |p - y| ÷ Σ w (symbols as in LogLoss), in units of the label; NaN without rows.

    Source: torchrec.metrics.mae, which sums in the same way.
    """

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        """Return the weighted sum of absolute errors and the sum of weights."""
        errors_B = outputs.predictions.double() - outputs.labels
        return {"errors": (outputs.weights * errors_B.abs()).sum(), "weight": outputs.weights.sum()}


@metric("mse", title="MSE (mean squared error)", label="MSE", better="lower", format="{:.4g}", takes=NUMBERS)
class MSE(_Mean):
    """Mean squared error Σ w (p - y)² ÷ Σ w (symbols as in LogLoss), in squared units of the label; NaN without rows.

    Source: torchrec.metrics.mse, which sums in the same way.
    """

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        """Return the weighted sum of squared errors and the sum of weights."""
        errors_B = outputs.predictions.double() - outputs.labels
        return {"squares": (outputs.weights * errors_B.square()).sum(), "weight": outputs.weights.sum()}


@metric(
    "rmse", title="RMSE (root of the mean squared error)", label="RMSE", better="lower", format="{:.4g}", takes=NUMBERS
)
class RMSE(SumMetric):
    """Root of the mean squared error (MSE), √(Σ w (p - y)² ÷ Σ w), in units of the label; NaN without rows."""

    sums = staticmethod(MSE.sums)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the root of the mean squared error."""
        return MSE.figure(sums).sqrt()


@metric("accuracy", better="higher", takes=("probability", "classes"))
class Accuracy(_Mean):
    """Weighted share of correct predictions: sum of the weights of correct rows ÷ sum of all weights; NaN without rows.

    A probability is correct if prediction and label are both above 0.5, or neither is. A class prediction is
    correct if the class with the highest probability is the label; among ties, the first class counts.
    """

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        """Return the weight of correctly predicted rows and the sum of weights."""
        if outputs.predictions.dim() == 2:
            right_B = outputs.predictions.argmax(1) == outputs.labels
        else:
            right_B = (outputs.predictions > HALF) == (outputs.labels > HALF)
        return {"right": (right_B * outputs.weights).double().sum(), "weight": outputs.weights.double().sum()}


NUM_ECE_BINS = 15  # bins of equal width in the ECE
NUM_RELIABILITY_BINS = 20  # bins of the reliability diagram, with about equal numbers of rows


def reliability(ranked: RankedRows) -> dict[str, list] | None:
    """Return the reliability diagram over at most NUM_RELIABILITY_BINS bins of about equal numbers of rows.

    The keys are predicted, actual and rows: the weighted mean prediction, weighted mean label and number of rows of
    each bin. The result is None if a prediction is NaN or unless the labels contain 0 and 1 and no other value. This is
    a collective operation: every rank must call it.
    """
    import torch

    if not ranked.both_classes:
        return None
    ties = ranked.ties
    places = (ranked.sum_below(2) / ranked.total[2] * NUM_RELIABILITY_BINS).long().clamp(max=NUM_RELIABILITY_BINS - 1)
    weights = ties.positive + ties.negative
    values = torch.stack([ties.predictions * weights, ties.positive, weights, ties.rows], 1)
    sums = ranked.peers.sum(values.new_zeros(NUM_RELIABILITY_BINS, 4).index_add_(0, places, values))
    predicted, positive, weights, rows = sums[sums[:, 3] > 0].T
    return {
        "predicted": (predicted / weights).tolist(),
        "actual": (positive / weights).tolist(),
        "rows": rows.long().tolist(),
    }


@metric("calibration", title="calibration (predicted ÷ real)", better="closer to 1", takes=("probability", "number"))
class Calibration(SumMetric):
    """Weighted sum of predictions ÷ weighted sum of labels; NaN if the sum of labels is 0.

    Source: He et al. 2014 (see NE), section 2, and torchrec.metrics.calibration, which returns 0 unless the sum of
    labels is above 0.
    """

    ranked_curve = staticmethod(reliability)

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        """Return the weighted sums of predictions and of labels."""
        from torchrec.metrics.calibration import get_calibration_states

        return get_calibration_states(outputs.labels, outputs.predictions, outputs.weights)

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> float:
        """Return the sum of predictions ÷ the sum of labels."""
        labels = sums["calibration_denom"]
        return float(sums["calibration_num"] / labels) if labels else float("nan")

    @staticmethod
    def counts(sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return {POSITIVES: n}, the weighted sum of labels; the ratio is less reliable the smaller n is."""
        return {POSITIVES: sums["calibration_denom"]}


@metric("ece", title="ECE (expected calibration error)", label="ECE", better="lower", takes=("probability",))
class ECE(SumMetric):
    """Expected calibration error: Σ over 15 bins of |Σ w p - Σ w y|, divided by the total weight; NaN without rows.

    The inner sums are over the rows of a bin, with the symbols of LogLoss. The value is the mean over bins, weighted by
    row weights, of the distance between mean prediction and mean label. Bin b contains predictions in
    [b/15, (b+1)/15); the last bin includes 1.

    Source: M. P. Naeini et al., Obtaining Well Calibrated Probabilities Using Bayesian Binning, AAAI 2015; 15
    bins as in C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017.
    """

    @staticmethod
    def sums(outputs: TaskOutputs) -> dict[str, torch.Tensor]:
        """Return weight, the sum of weights, and bin<i>, the weighted sum of prediction - label in bin i from 0."""
        places_B = (outputs.predictions * NUM_ECE_BINS).long().clamp(0, NUM_ECE_BINS - 1)
        weights_B = outputs.weights.double()
        off_B = weights_B * (outputs.predictions.double() - outputs.labels)
        bins = off_B.new_zeros(NUM_ECE_BINS).index_add_(0, places_B, off_B)
        return {"weight": weights_B.sum(), **{f"bin{i}": each for i, each in enumerate(bins.unbind())}}

    @staticmethod
    def figure(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the expected calibration error."""
        return sum(sums[f"bin{i}"].abs() for i in range(NUM_ECE_BINS)) / sums["weight"]
