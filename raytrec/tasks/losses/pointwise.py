"""Losses of single rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import Loss, in_range, loss

if TYPE_CHECKING:
    import torch


@loss("bce")
class BinaryCrossEntropy(Loss):
    """−y · ln p − (1 − y) · ln(1 − p) with p = sigmoid(logit), in nats; labels may be rates."""

    label_range = (0.0, 1.0)
    metrics = ("auc", "ne", "logloss", "calibration")
    predicts = "probability"
    log_odds = True

    def predict(self, logits_B: torch.Tensor) -> torch.Tensor:
        """Return the probability of the label 1: float32 [B]."""
        return logits_B.sigmoid()

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")


@loss("focal")
class Focal(BinaryCrossEntropy):
    """−α·y · (1 − p)^γ · ln p − (1 − α)·(1 − y) · p^γ · ln(1 − p) with p = sigmoid(logit), in nats.

    Without alpha, both factors are 1. Source: Lin et al. 2017, arXiv:1708.02002. The factor makes predictions
    less certain than they should be: their order is what to use, unless they are calibrated afterwards.

    Args:
        gamma: Exponent γ, ≥ 0; 0 gives binary cross-entropy.
        alpha: Factor of positives, in (0, 1); the factor of negatives is 1 − alpha. None: both are 1.

    Raises:
        ValueError: An option is out of range.
    """

    def __init__(self, gamma: float = 2.0, alpha: float | None = None):
        self.gamma = in_range("gamma", gamma, 0.0, 100.0)
        self.alpha = None if alpha is None else in_range("alpha", alpha, 0.0, 1.0, exclusive=True)

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import logsigmoid

        log_p_B, log_not_p_B = logsigmoid(logits_B), logsigmoid(-logits_B)
        positive, negative = (1.0, 1.0) if self.alpha is None else (self.alpha, 1 - self.alpha)
        of_positives_B = positive * labels_B * (self.gamma * log_not_p_B).exp() * log_p_B
        return -of_positives_B - negative * (1 - labels_B) * (self.gamma * log_p_B).exp() * log_not_p_B


@loss("cross_entropy")
class CrossEntropy(Loss):
    """−ln of the softmax of the logits at the label's class, in nats; labels are 0 to classes − 1.

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
        from torch.nn.functional import cross_entropy

        return cross_entropy(logits_BC, labels_B.long(), reduction="none")


@loss("mse")
class SquaredError(Loss):
    """(logit − y)² of any finite label. Large labels give large gradients: scale them with a transform."""

    metrics = ("mse", "mae")
    predicts = "number"

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        return (logits_B - labels_B).square()


@loss("huber")
class Huber(Loss):
    """e² ÷ 2 for errors e = logit − y of at most delta, delta · (|e| − delta ÷ 2) for others (Huber 1964).

    Args:
        delta: Error from which on the loss is linear, > 0, in the label's units.

    Raises:
        ValueError: `delta` is out of range.
    """

    metrics = ("mse", "mae")
    predicts = "number"

    def __init__(self, delta: float = 1.0):
        self.delta = in_range("delta", delta, 0.0, 1e9, exclusive=True)

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import huber_loss

        return huber_loss(logits_B, labels_B, reduction="none", delta=self.delta)


@loss("poisson")
class Poisson(Loss):
    """exp(logit) − y · logit: −ln of the Poisson density of y, without ln y!, which no weight changes."""

    label_range = (0.0, float("inf"))
    metrics = ("mse", "mae")
    predicts = "number"

    def predict(self, logits_B: torch.Tensor) -> torch.Tensor:
        """Return the expected count of each row: float32 [B]."""
        return logits_B.exp()

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        return logits_B.exp() - labels_B * logits_B


@loss("from_model")
class FromModel(Loss):
    """y · the loss of the row that the model computes, such as of its item against sampled negatives.

    Rows of label 0 have no loss. Metrics and predictions use the model's score. The objective adds up the
    model's loss (tasks/objective.py); the loss of the score is 0.
    """

    label_range = (0.0, 1.0)
    metrics = ("auc",)
    predicts = "score"
    from_model = True

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        return logits_B.new_zeros(logits_B.shape)
