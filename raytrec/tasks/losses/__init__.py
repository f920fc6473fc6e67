"""The registry of losses; a loss is one class.

One of yours is a class in a module of yours.

    @loss("bce")                                            # not needed for one of yours
    class BinaryCrossEntropy(Loss):
        label_range = (0, 1)
        metrics = ("auc", "ne", "logloss", "calibration")
        predicts = "probability"

        def predict(self, logits_B): ...
        def of_rows(self, logits_B, labels_B): ...

The configuration names it: `tasks: [{loss: bce}]`, or `loss: "my.module:MyLoss"`, which is made with the
task's `options` as keyword arguments. The driver asks losses for their labels and metrics: a file here
imports torch in its methods. A loss of a row that depends on other rows is a BatchLoss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, NamedTuple

from raytrec.common.registry import Registry

if TYPE_CHECKING:
    import torch

# What a prediction is: of the label 1, in the label's units, one for each class, or an order alone.
Kind = Literal["probability", "number", "classes", "score"]


class Loss(ABC):
    """What a task minimises, row by row; how rows add up is the objective's (tasks/objective.py).

    Attributes:
        label_range: the least and the greatest label that it takes; None: any finite number.
        whole_labels: whether it takes whole numbers alone.
        metrics: names of the metrics that its tasks have by default.
        predicts: what its predictions are, which metrics have to take (Metric.takes); None: any metric may be
            asked for.
        log_odds: whether logits are the log-odds of the label 1, so that `negatives_kept` can shift them.
        outputs: how many logits a row has: the number of classes, or 1.
        reads_vectors: whether it is given the query's and the item's vector in place of logits; see `scores`.
        from_model: whether what is learned is the loss that the model gives itself, for the task's rows.
    """

    label_range: tuple[float, float] | None = None
    whole_labels: bool = False
    metrics: tuple[str, ...] = ()
    predicts: Kind | None = None
    log_odds: bool = False
    outputs: int = 1
    reads_vectors: bool = False
    from_model: bool = False

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """What metrics are given as logits of what the model gives for this task: by default, just that.

        With `reads_vectors` the model gives float32 [B, 2·D], the vectors of query and item side by side, and
        this is one number a row, [B].
        """
        return logits

    def predict(self, logits_B: torch.Tensor) -> torch.Tensor:
        """What logits mean in the label's units: float32 [B] → float32 [B]; by default, themselves.

        With several outputs, [B, outputs] → [B, outputs].
        """
        return logits_B

    @abstractmethod
    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """The loss of each row, from that row alone: float32 [B], with a gradient for the logits.

        It must be finite for padding, too, whose labels are 0 (or the nearest that the loss takes). With
        several outputs, logits are [B, outputs].
        """


class Rows(NamedTuple):
    """All rows of a global batch, those of one rank after those of another; some are padding.

    Attributes:
        logits: float32 [N], or [N, C] for a loss with several outputs or vectors.
        labels: float32 [N].
        weights: float32 [N], of each row in the task: 0 for padding and rows that do not count.
        keys: int64 [N], of the column that the loss is `by`; None where the task names none.
        counts: int64 [N], of the task's item_frequency; None where it names none, or the loss reads none.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor | None = None
    counts: torch.Tensor | None = None


class BatchLoss(Loss):
    """A loss that holds rows against others of the global batch, whichever rank they are on.

    Attributes:
        by: which of the task's columns groups its rows: group or item; None: neither.
        needs_column: whether the task must name that column.
        reads_counts: whether it is given how often a row's item occurs (the task's item_frequency).
    """

    by: Literal["group", "item"] | None = None
    needs_column: bool = False
    reads_counts: bool = False

    @abstractmethod
    def of_batch(self, batch: Rows, rows: slice) -> torch.Tensor:
        """The losses of some rows of a global batch: float32 [rows], with a gradient for batch.logits.

        Rows whose weight is 0 must change no other row's loss, and have a finite one, which does not count.
        """

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Those of a batch that is all here, in which every row counts and none has a key."""
        import torch

        return self.of_batch(Rows(logits_B, labels_B, torch.ones_like(labels_B)), slice(0, len(labels_B)))


loss: Registry[type[Loss]] = Registry("loss", __name__)


def in_range(name: str, value: object, low: float, high: float, *, exclusive: bool = False) -> float:
    """An option of a loss, which is a number.

    Args:
        low, high: the least and the greatest; exclusive: neither of them itself.

    Raises:
        ValueError: it is none, or out of range.
    """
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
    if not (low < number < high if exclusive else low <= number <= high):
        border = "between" if exclusive else "from"
        raise ValueError(
            f"{name} is {value!r}, not a number {border} {low:g} {'and' if exclusive else 'to'} {high:g}"
        )
    return float(number)
