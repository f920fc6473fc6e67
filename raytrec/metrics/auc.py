"""Area under the ROC curve, and the curve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.metrics.curves import roc
from raytrec.metrics.registry import RowMetric, metric

if TYPE_CHECKING:
    from raytrec.metrics.rows import Rows


@metric("auc", title="AUC", label="AUC", better="higher")
class AUC(RowMetric):
    """The share of pairs of a positive and a negative row in which the positive one is predicted higher, ties
    counted half; exact, of all rows at once. None when labels are not both 0 and 1.

    Source: torchmetrics.functional.classification.binary_auroc. TorchRec's own AUC ignores ties.
    """

    curve = staticmethod(roc)

    @staticmethod
    def figure(rows: Rows) -> float | None:
        from torchmetrics.functional.classification import binary_auroc

        labels = rows.binary_labels
        return None if labels is None else float(binary_auroc(rows.predictions, labels))
