"""Losses of single rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import Loss, check_in_range, loss

if TYPE_CHECKING:
    import torch


@loss("bce")
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy −y · ln p − (1 − y) · ln(1 − p) in nats, with p = sigmoid(logit) and label y in [0, 1]."""

    label_range = (0.0, 1.0)
    metrics = ("auc", "ne", "logloss", "calibration")
    predicts = "probability"
    log_odds = True

    def predict(self, logits_B: torch.Tensor) -> torch.Tensor:
        """Return the probability of label 1: float32 [B]."""
        return logits_B.sigmoid()

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Return the binary cross-entropy of each row: float32 [B]."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")


@loss("focal")
class Focal(BinaryCrossEntropy):
    """Focal loss −α·y · (1 − p)^γ · ln p − (1 − α)·(1 − y) · p^γ · ln(1 − p) in nats, with p = sigmoid(logit).

    y is the label, in [0, 1]. Source: Lin et al. 2017, arXiv:1708.02002. The factors (1 − p)^γ and p^γ make predictions
    underconfident. Use only the order of predictions, or calibrate them after training.

    Args:
        gamma: Exponent γ, 0 to 100; without alpha, γ = 0 is binary cross-entropy.
        alpha: Factor α of positives, in (0, 1); the factor of negatives is 1 − α. None: both factors are 1.

    Raises:
        ValueError: An option is not a number or is out of range.
    """

    def __init__(self, gamma: float = 2.0, alpha: float | None = None):
        self.gamma = check_in_range("gamma", gamma, 0.0, 100.0)
        self.alpha = None if alpha is None else check_in_range("alpha", alpha, 0.0, 1.0, exclusive=True)

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Return the focal loss of each row: float32 [B]."""
        from torch.nn.functional import logsigmoid

        log_p_B, log_not_p_B = logsigmoid(logits_B), logsigmoid(-logits_B)
        positive, negative = (1.0, 1.0) if self.alpha is None else (self.alpha, 1 - self.alpha)
        of_positives_B = positive * labels_B * (self.gamma * log_not_p_B).exp() * log_p_B
        return -of_positives_B - negative * (1 - labels_B) * (self.gamma * log_p_B).exp() * log_not_p_B


@loss("cross_entropy")
class CrossEntropy(Loss):
    """Cross-entropy −ln softmax(logits)[label] in nats, for labels from 0 to classes − 1.

    Args:
        classes: Number of classes, 2 to 65,536.

    Raises:
        ValueError: `classes` is out of range or not a whole number.
    """

    whole_labels = True
    metrics = ("accuracy", "logloss")
    predicts = "classes"

    def __init__(self, classes: int = 2):
        if isinstance(classes, bool) or not isinstance(classes, int) or not 2 <= classes <= 2**16:
            raise ValueError(f"classes is {classes!r}, not a whole number from 2 to 65536")
        self.outputs, self.label_range = classes, (0.0, classes - 1.0)

    def predict(self, logits_BC: torch.Tensor) -> torch.Tensor:
        """Return the probability of each class: float32 [B, C]."""
        return logits_BC.softmax(1)

    def of_rows(self, logits_BC: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each row: float32 [B, C] → [B]."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(logits_BC, labels_B.long(), reduction="none")


@loss("mse")
class SquaredError(Loss):
    """Squared error (logit − y)² for label y. Large labels cause large gradients; a transform should scale them."""

    metrics = ("mse", "mae")
    predicts = "number"

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Return the squared error of each row: float32 [B]."""
        return (logits_B - labels_B).square()


@loss("huber")
class Huber(Loss):
    """Huber loss: e² ÷ 2 if |e| ≤ delta for e = logit − y, else delta · (|e| − delta ÷ 2) (Huber 1964); y: label.

    Args:
        delta: Absolute error, in the label's units, above which the loss is linear; between 0 and 10⁹ (exclusive).

    Raises:
        ValueError: `delta` is not a number or is out of range.
    """

    metrics = ("mse", "mae")
    predicts = "number"

    def __init__(self, delta: float = 1.0):
        self.delta = check_in_range("delta", delta, 0.0, 1e9, exclusive=True)

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Return the Huber loss of each row: float32 [B]."""
        from torch.nn.functional import huber_loss

        return huber_loss(logits_B, labels_B, reduction="none", delta=self.delta)


@loss("poisson")
class Poisson(Loss):
    """Poisson loss exp(logit) − y · logit: the negative log-likelihood of label y ≥ 0 without the constant ln(y!)."""

    label_range = (0.0, float("inf"))
    metrics = ("mse", "mae")
    predicts = "number"

    def predict(self, logits_B: torch.Tensor) -> torch.Tensor:
        """Return the expected count of each row: float32 [B]."""
        return logits_B.exp()

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Return the Poisson loss of each row: float32 [B]."""
        return logits_B.exp() - labels_B * logits_B


@loss("from_model")
class FromModel(Loss):
    """Label, from 0 to 1, times the loss that the model computes for the row, e.g. from its item and sampled negatives.

    Rows with label 0 have no loss. Metrics and predictions use the model's logits. The objective adds the
    model's loss (tasks/objective.py), so this class returns 0.
    """

    label_range = (0.0, 1.0)
    metrics = ("auc",)
    predicts = "score"
    from_model = True

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Return 0 for each row, because the objective adds the model's loss: float32 [B]."""
        return logits_B.new_zeros(logits_B.shape)
