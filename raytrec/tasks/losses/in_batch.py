"""Losses that compare rows of the global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import BatchLoss, Rows, in_range, loss

if TYPE_CHECKING:
    import torch


@loss("bpr")
class BayesianPersonalizedRanking(BatchLoss):
    """The mean of −ln sigmoid(s − s') over the rows of the same group whose label is lower, weighted by their
    weights; 0 for a row without any.

    Groups are the values of the task's `group`, wherever in the global batch its rows are; without one, the
    global batch is one group. A group that is spread over several batches is compared within each of them.
    Source: Rendle et al. 2009, arXiv:1205.2618. Predictions are scores: only their order has a meaning.
    """

    metrics = ("auc",)
    predicts = "score"
    by = "group"

    def of_batch(self, batch: Rows, rows: slice) -> torch.Tensor:
        from torch.nn.functional import softplus

        lower_BN = batch.labels[rows].unsqueeze(1) > batch.labels.unsqueeze(0)
        if batch.keys is not None:
            lower_BN = lower_BN & (batch.keys[rows].unsqueeze(1) == batch.keys.unsqueeze(0))
        weights_BN = lower_BN * batch.weights
        pairs_BN = softplus(batch.logits.unsqueeze(0) - batch.logits[rows].unsqueeze(1))
        total_B = weights_BN.sum(1)
        return (pairs_BN * weights_BN).sum(1) / total_B.masked_fill(total_B == 0, 1)


@loss("in_batch_softmax")
class InBatchSoftmax(BatchLoss):
    """−y · ln of the softmax of ⟨query, item⟩ ÷ temperature at the row's own item, over the items of all rows
    of the global batch that count.

    Rows of label 0 have no loss, but their items are among those that others are held against.
    With the task's `item`, other rows of the same item are not held against a row. With its `item_frequency`,
    ln of it is subtracted from the scores of every item (not from predictions): an item stands in a batch as
    often as it occurs in the data, and without this, frequent items would be held down (log-Q correction; Yi
    et al. 2019, https://doi.org/10.1145/3298689.3346996). Counts below 1 are taken for 1. The model gives
    vectors (two_tower does); a row's score is the product of these two.

    Args:
        temperature: Divisor of scores, > 0.

    Raises:
        ValueError: `temperature` is out of range.
    """

    label_range = (0.0, 1.0)
    metrics = ("auc",)
    predicts = "score"
    reads_vectors = True
    by = "item"
    reads_counts = True

    def __init__(self, temperature: float = 1.0):
        self.temperature = in_range("temperature", temperature, 0.0, 1e6, exclusive=True)

    def scores(self, vectors_BV: torch.Tensor) -> torch.Tensor:
        """Return ⟨query, item⟩ of each row: float32 [B, 2·D] → [B]."""
        query_BD, item_BD = vectors_BV.chunk(2, dim=1)
        return (query_BD * item_BD).sum(1)

    def of_batch(self, batch: Rows, rows: slice) -> torch.Tensor:
        import torch

        query_ND, item_ND = batch.logits.chunk(2, dim=1)
        scores_BN = query_ND[rows] @ item_ND.T / self.temperature
        if batch.counts is not None:
            scores_BN = scores_BN - batch.counts.clamp(min=1).to(scores_BN.dtype).log()
        places_N = torch.arange(len(batch.labels), device=scores_BN.device)
        places_B1 = places_N[rows].unsqueeze(1)
        held_BN = (batch.weights > 0).unsqueeze(0)
        if batch.keys is not None:
            held_BN = held_BN & (batch.keys[rows].unsqueeze(1) != batch.keys)
        held_BN = held_BN | (places_B1 == places_N)
        own_B = scores_BN.gather(1, places_B1).squeeze(1)
        return batch.labels[rows] * (scores_BN.masked_fill(~held_BN, float("-inf")).logsumexp(1) - own_B)
