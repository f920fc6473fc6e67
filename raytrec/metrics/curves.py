"""Curves of an evaluation, as few points to draw: they travel to the driver and into metrics.jsonl."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytrec.metrics.rows import Rows

POINTS = 200  # of the ROC curve
BINS = 20  # of equally many rows


def roc(rows: Rows) -> dict[str, list] | None:
    """The ROC curve: fpr, tpr, from (0, 0) to (1, 1); None when labels are not both 0 and 1."""
    import torch
    from torchmetrics.functional.classification import binary_roc

    if (labels := rows.binary_labels) is None:
        return None
    fpr, tpr, _ = binary_roc(rows.predictions, labels)
    some = torch.linspace(0, len(fpr) - 1, min(POINTS, len(fpr)), device=fpr.device).long()
    return {"fpr": fpr[some].tolist(), "tpr": tpr[some].tolist()}


def reliability(rows: Rows) -> dict[str, list] | None:
    """Of each bin of predictions the mean prediction (predicted), the mean label (actual) and the rows; None
    when labels are not both 0 and 1."""
    if rows.binary_labels is None:
        return None
    order = rows.predictions.argsort()
    bins = [part for part in order.tensor_split(BINS) if len(part)]
    return {
        "predicted": [float(rows.predictions[part].mean()) for part in bins],
        "actual": [float(rows.labels[part].double().mean()) for part in bins],
        "rows": [len(part) for part in bins],
    }
