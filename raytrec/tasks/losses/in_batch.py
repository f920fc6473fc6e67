"""Losses that compare rows of the global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import BatchLoss, Rows, check_in_range, loss

if TYPE_CHECKING:
    import torch


@loss("bpr")
class BayesianPersonalizedRanking(BatchLoss):
    """Bayesian personalized ranking: mean of −ln sigmoid(s − s') over the group's rows with a lower label.

    s is the score of the row, and s' is the score of a row with a lower label. The mean is weighted by the weights
    of the rows with a lower label. If these are all 0, the loss is 0. Rows of the global batch with the same value
    of the task's `group` form a group; without `group`, the global batch is one group. If rows are requests, the
    candidates of a request form a group. Rows in different batches are not compared. Source: Rendle et al. 2009,
    arXiv:1205.2618. Predictions are scores of which only the order is meaningful.
    """

    metrics = ("auc",)
    predicts = "score"
    by = "group"

    def of_batch(self, batch: Rows, rows: slice) -> torch.Tensor:
        """Return the ranking losses of some rows of a global batch: float32 [rows]."""
        import torch
        from torch.nn.functional import softplus

        places_B = torch.arange(len(batch.labels), device=batch.labels.device)[rows]
        if places_B.is_cpu:  # rows with the lowest label have no loss; on a GPU, omitting them would block the host
            compared_B = batch.labels[rows] > batch.labels.min()
            places_B = places_B[compared_B]
        lower_BN = batch.labels[places_B].unsqueeze(1) > batch.labels.unsqueeze(0)
        if batch.keys is not None:
            lower_BN = lower_BN & (batch.keys[places_B].unsqueeze(1) == batch.keys.unsqueeze(0))
        weights_BN = lower_BN * batch.weights
        pairs_BN = softplus(batch.logits.unsqueeze(0) - batch.logits[places_B].unsqueeze(1))
        total_B = weights_BN.sum(1)
        losses_B = (pairs_BN * weights_BN).sum(1) / total_B.masked_fill(total_B == 0, 1)
        return losses_B.new_zeros(len(compared_B)).masked_scatter(compared_B, losses_B) if places_B.is_cpu else losses_B


class _Softmax(BatchLoss):
    """Base class of losses −y · ln softmax(score ÷ temperature) with the label y; subclasses define the scores.

    Raises:
        ValueError: An option of the constructor has the wrong type or is out of range.
    """

    label_range = (0.0, 1.0)
    metrics = ("auc",)
    predicts = "score"

    def __init__(self, temperature: float = 1.0, learn_temperature: bool = False):
        self.temperature = check_in_range("temperature", temperature, 0.0, 1e6, exclusive=True)
        if not isinstance(learn_temperature, bool):
            raise ValueError(f"learn_temperature is {learn_temperature!r}, not true or false")
        self.learns_temperature = learn_temperature


@loss("listwise_softmax")
class ListwiseSoftmax(_Softmax):
    """Listwise softmax loss (InfoNCE), −y · ln of the softmax of score ÷ temperature over the row's group.

    The softmax is over the rows of the group with a weight > 0. Rows of the global batch with the same value of
    the task's `group` form a group; without `group`, the global batch is one group. If rows are requests, the
    candidates of a request form a group. Rows with label 0 have no loss, but are negatives for other rows.
    Sources: Cao et al. 2007, https://doi.org/10.1145/1273496.1273513 (top-one ListNet); van den Oord et al. 2018,
    arXiv:1807.03748. Predictions are scores of which only the order is meaningful.

    Args:
        temperature: Divisor of scores, between 0 and 10⁶ (exclusive).
        learn_temperature: True to train the temperature, starting from `temperature`.

    Raises:
        ValueError: An option has the wrong type or is out of range.
    """

    by = "group"
    is_linear = True

    def of_batch(self, batch: Rows, rows: slice) -> torch.Tensor:
        """Return the listwise softmax losses of some rows of a global batch: float32 [rows]."""
        import torch

        scores_N, ignored_N = batch.logits / self.temperature, batch.weights <= 0
        keys_N = torch.zeros_like(batch.labels) if batch.keys is None else batch.keys
        group_N = torch.searchsorted(keys_N.sort().values, keys_N)
        valid_N = scores_N.masked_fill(ignored_N, float("-inf"))
        highest_G = torch.full_like(valid_N, float("-inf")).scatter_reduce(0, group_N, valid_N.detach(), "amax")
        highest_N = highest_G.masked_fill(highest_G == float("-inf"), 0)[group_N]
        # Each sum of exponentials contains exp(0), unless all rows of the group are ignored.
        sums_G = torch.zeros_like(scores_N).index_add(0, group_N, (valid_N - highest_N).exp()).clamp(min=1)
        losses_N = batch.labels * (sums_G.log()[group_N] + highest_N - scores_N)
        return losses_N.masked_fill(ignored_N, 0)[rows]


@loss("in_batch_softmax")
class InBatchSoftmax(_Softmax):
    """In-batch softmax loss, −y · ln of the softmax of ⟨query, item⟩ ÷ temperature at the row's item.

    The softmax is over the row's item and those of all rows of the global batch with a weight > 0. Rows with label 0
    have no loss, but their items are negatives for other rows. If the task sets `item`, other rows with the same item
    are excluded. If the task sets `item_frequency`, the logarithm of an item's frequency is subtracted from the item's
    scores, but not from predictions. Frequent items occur in more batches and would otherwise be penalized (log-Q
    correction; Yi et al. 2019, https://doi.org/10.1145/3298689.3346996). Frequencies below 1 are replaced with 1. The
    model must output vectors, as two_tower does. A row's prediction is the dot product of its query and item vectors.

    Args:
        temperature: Divisor of scores, between 0 and 10⁶ (exclusive).
        learn_temperature: True to train the temperature, starting from `temperature`.

    Raises:
        ValueError: An option has the wrong type or is out of range.
    """

    reads_vectors = True
    by = "item"
    reads_counts = True

    def scores(self, vectors_BV: torch.Tensor) -> torch.Tensor:
        """Return the dot product ⟨query, item⟩ of each row: float32 [B, 2·D] → [B]."""
        query_BD, item_BD = vectors_BV.chunk(2, dim=1)
        return (query_BD * item_BD).sum(1)

    def of_batch(self, batch: Rows, rows: slice) -> torch.Tensor:
        """Return the in-batch softmax losses of some rows of a global batch: float32 [rows]."""
        import torch

        query_ND, item_ND = batch.logits.chunk(2, dim=1)
        scores_BN = query_ND[rows] @ item_ND.T / self.temperature
        if batch.counts is not None:
            scores_BN = scores_BN - batch.counts.clamp(min=1).to(scores_BN.dtype).log()
        places_N = torch.arange(len(batch.labels), device=scores_BN.device)
        places_B1 = places_N[rows].unsqueeze(1)
        valid_BN = (batch.weights > 0).unsqueeze(0)
        if batch.keys is not None:
            valid_BN = valid_BN & (batch.keys[rows].unsqueeze(1) != batch.keys)
        valid_BN = valid_BN | (places_B1 == places_N)
        target_B = scores_BN.gather(1, places_B1).squeeze(1)
        return batch.labels[rows] * (scores_BN.masked_fill(~valid_BN, float("-inf")).logsumexp(1) - target_B)
