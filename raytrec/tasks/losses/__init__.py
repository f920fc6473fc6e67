"""Registry and base classes of losses. A loss is a class in this folder or in a user's module.

    @loss("bce")                                            # not needed in a user's module
    class BinaryCrossEntropy(Loss):
        label_range = (0, 1)
        metrics = ("auc", "ne", "logloss", "calibration")
        predicts = "probability"

        def predict(self, logits_B): ...
        def of_rows(self, logits_B, labels_B): ...

The configuration names a loss as in `tasks: [{loss: bce}]` or `loss: "my.module:MyLoss"`. The class is called
with the task's `options` as keyword arguments. Files in this folder import torch only inside methods, because
the driver reads the attributes of losses without importing torch. A loss that compares rows with each other is a
BatchLoss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, NamedTuple

from raytrec.common.registry import Registry

if TYPE_CHECKING:
    import torch

# Meaning of predictions: probability of label 1, number in the label's units, probability of each class, or score,
# of which only the order is meaningful.
Kind = Literal["probability", "number", "classes", "score"]


class Loss(ABC):
    """Loss of single rows. The objective sums the rows' losses (tasks/objective.py).

    Attributes:
        label_range: Smallest and largest allowed label; None: any finite number.
        whole_labels: True if labels must be whole numbers.
        metrics: Names of the default metrics for tasks with this loss.
        predicts: Meaning of the predictions, which metrics must support (Metric.takes); None: all metrics are
            allowed.
        log_odds: True if logits are the log-odds of label 1, which a task's `negatives_kept` can correct.
        outputs: Number of logits per row: the number of classes, or 1.
        reads_vectors: True if the loss takes the vectors of query and item instead of logits; see `scores`.
        from_model: True if the task minimizes the loss that the model computes for the task's rows.
        learns_temperature: True to divide the logits by a learned temperature in the loss, but not in metrics and
            predictions. The logarithm of the temperature is a dense parameter that is initially 0.
    """

    label_range: tuple[float, float] | None = None
    whole_labels: bool = False
    metrics: tuple[str, ...] = ()
    predicts: Kind | None = None
    log_odds: bool = False
    outputs: int = 1
    reads_vectors: bool = False
    from_model: bool = False
    learns_temperature: bool = False

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits for metrics and predictions from the model's output for this task; default: the output.

        With `reads_vectors`, the model's output contains the vectors of query and item side by side, float32
        [B, 2·D]. The result must contain one number per row, float32 [B].
        """
        return logits

    def predict(self, logits_B: torch.Tensor) -> torch.Tensor:
        """Return the predictions in the label's units, float32 [B] → float32 [B]; default: unchanged logits.

        With several outputs, the shape is [B, outputs] → [B, outputs].
        """
        return logits_B

    @abstractmethod
    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Return the loss of each row, computed from that row alone: float32 [B].

        The losses must be differentiable in the logits, and finite even for padding. The labels of padding
        are 0, or the allowed label nearest to 0. With several outputs, logits are [B, outputs].
        """


class Rows(NamedTuple):
    """Rows that a BatchLoss compares, including padding: the global batch in the order of ranks, or some requests.

    Attributes:
        logits: Logits, float32 [N]; [N, C] for a loss with several outputs or vectors.
        labels: Labels, float32 [N].
        weights: Weight of each row in the task, float32 [N]; 0 for padding and rows that the task ignores.
        keys: Keys of the column that BatchLoss.by selects, or requests of candidates, int64 [N]; None without a column.
        counts: Values of the task's item_frequency, int64 [N]; None if the task does not set item_frequency.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor | None = None
    counts: torch.Tensor | None = None


class BatchLoss(Loss):
    """Loss that compares rows of the global batch across ranks.

    Attributes:
        by: Task key, group or item, that names the column by which rows are grouped; None: no grouping. If rows
            are requests, losses with `by` group compare only candidates of the same request.
        needs_column: True if the task must set the key in `by`.
        reads_counts: True if the loss reads the frequency of each row's item (the task's item_frequency).
        is_linear: True if `of_batch` takes time and memory proportional to the number of rows. Otherwise, it is called
            for a limited number of rows at a time.
    """

    by: Literal["group", "item"] | None = None
    needs_column: bool = False
    reads_counts: bool = False
    is_linear: bool = False

    @abstractmethod
    def of_batch(self, batch: Rows, rows: slice) -> torch.Tensor:
        """Return the losses of batch[rows], compared with all rows of the batch: float32 [rows].

        The losses must be differentiable with respect to batch.logits. Rows with weight 0 must not affect the losses
        of other rows; their own losses must be finite and are ignored.
        """

    def of_rows(self, logits_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Return the losses of a batch in a single process, in which every row has weight 1 and no key."""
        import torch

        return self.of_batch(Rows(logits_B, labels_B, torch.ones_like(labels_B)), slice(0, len(labels_B)))


loss: Registry[type[Loss]] = Registry("loss", __name__)


def check_in_range(name: str, value: object, low: float, high: float, *, exclusive: bool = False) -> float:
    """Return a loss option as a float if it is an int or float within a range.

    Args:
        name: Name of the option.
        value: Value of the option.
        low: Smallest allowed value.
        high: Largest allowed value.
        exclusive: True if `low` and `high` themselves are not allowed.

    Raises:
        ValueError: The value is not an int or float, is NaN, or is out of range.
    """
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
    if not (low < number < high if exclusive else low <= number <= high):
        border = "between" if exclusive else "from"
        raise ValueError(f"{name} is {value!r}, not a number {border} {low:g} {'and' if exclusive else 'to'} {high:g}")
    return float(number)
