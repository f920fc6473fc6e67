"""ROC curve and reliability of predictions, as few points to draw."""

from __future__ import annotations

import torch

POINTS = 200  # of the ROC curve
BINS = 20  # of equally many rows


def curves(logits: torch.Tensor, labels: torch.Tensor) -> dict | None:
    """The ROC curve and the calibration by predicted rate.

    Args:
        logits, labels: float32 [rows].

    Returns:
        roc: fpr, tpr, from (0, 0) to (1, 1); calibration: of each bin of predictions its mean prediction, its
        mean label and its rows. None when labels are not both 0 and 1.
    """
    from torchmetrics.functional.classification import binary_roc

    binary = labels.round()
    if not torch.equal(binary, labels) or binary.numel() == 0 or binary.min() == binary.max():
        return None
    predicted = torch.sigmoid(logits.double())
    fpr, tpr, _ = binary_roc(predicted, binary.long())
    some = torch.linspace(0, len(fpr) - 1, min(POINTS, len(fpr)), device=fpr.device).long()
    order = predicted.argsort()
    bins = [part for part in order.tensor_split(BINS) if len(part)]
    return {
        "roc": {"fpr": fpr[some].tolist(), "tpr": tpr[some].tolist()},
        "calibration": {
            "predicted": [float(predicted[part].mean()) for part in bins],
            "actual": [float(labels[part].double().mean()) for part in bins],
            "rows": [len(part) for part in bins],
        },
    }
