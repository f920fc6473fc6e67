"""Pairwise ranking (BPR)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.tasks.losses import BatchLoss, Rows, loss

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
