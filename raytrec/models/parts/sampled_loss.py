"""Losses that compare items with drawn negatives, and the query vectors that score the items."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import softplus

from raytrec.models.inputs import Sequence

ABSENT = -1e30  # score of a missing negative, which contributes neither to losses nor to gradients


@dataclass(frozen=True)
class SampledLoss:
    """Loss that compares the score s of a query's item with the scores sₖ of its K negatives, i.e. other items.

        softmax  −ln(eˢ ÷ (eˢ + Σₖ eˢᵏ)), 0 without negatives
        bce      −b · ln σ(s) − Σₖ ln(1 − σ(sₖ)), i.e. one example with label 1 and K with label 0 (He et al.
                 2017), where b = 1 − t · (1 − min(1, K ÷ (items − 1))). With t = 1, s is the item's log-odds
                 among all items (gBCE: Petrov and Macdonald 2023, arXiv:2308.07192, equations 10 and 21)
        bpr      mean over k of −ln σ(s − sₖ), 0 without negatives (Rendle et al. 2009, arXiv:1205.2618)

    Attributes:
        kind: softmax, bce or bpr.
        gbce: t, from 0 (plain bce) to 1; only used by bce.
        items: Total number of items, i.e. rows of the item table.
    """

    kind: str
    gbce: float = 0.0
    items: int = 2

    def reduce(self, own: torch.Tensor, scores_K: torch.Tensor) -> torch.Tensor:
        """Return the contribution of negatives to the loss, float32 [...], as an argument for `join` or `finish`.

        Args:
            own: Scores of the items, float32 [...].
            scores_K: Scores of negatives, float32 [..., K]; ABSENT for missing negatives.
        """
        if self.kind == "softmax":
            return scores_K.logsumexp(-1)
        return softplus(scores_K if self.kind == "bce" else scores_K - own.unsqueeze(-1)).sum(-1)

    def join(self, parts_W: torch.Tensor) -> torch.Tensor:
        """Return the combined contribution of W disjoint sets of negatives (`reduce`): float32 [W, ...] → [...]."""
        return parts_W.logsumexp(0) if self.kind == "softmax" else parts_W.sum(0)

    def finish(self, own: torch.Tensor, added: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the loss from the combined contribution of all negatives, float32 [...].

        Args:
            own: Scores of the items, float32 [...].
            added: Combined contribution of all negatives, float32 [...] (`reduce`, `join`).
            count: Number of negatives of each item, without missing negatives, int or float [...].
        """
        if self.kind == "softmax":
            return softplus(added - own)
        if self.kind == "bpr":
            return added / count.clamp(min=1)
        weight = 1.0
        if self.gbce:
            weight = 1 - self.gbce * (1 - (count / max(1, self.items - 1)).clamp(max=1))
        return weight * softplus(-own) + added

    def __call__(self, own: torch.Tensor, scores_K: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the loss, float32 [...], from the scores of all negatives (see `reduce` and `finish`)."""
        return self.finish(own, self.reduce(own, scores_K), count)

    def remove_canceling_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return `bias`, which is added to all scores of a query, or 0 if the bias has no effect on the loss.

        softmax and bpr depend only on differences of scores, in which the bias cancels. Rounding would
        nevertheless leave a small gradient, which Adam would amplify to a full step.
        """
        return bias if self.kind == "bce" else 0 * bias

    def loss_of_vectors(
        self, query_BLD: torch.Tensor, item_BLD: torch.Tensor, negatives: Sequence, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss of each of the L queries in a row, float32 [B, L].

        Each query has one item; the queries of a row share its negatives. A score is a dot product.

        Args:
            query_BLD: Query vectors, float [B, L, D].
            item_BLD: Item vectors, float [B, L, D].
            negatives: Negatives of each row, with vectors [B, K, D].
            bias: Bias added to all scores of a row, [B, 1] or [1, 1]; see `remove_canceling_bias`.
        """
        own_BL = (query_BLD * item_BLD).sum(2).float()
        absent_B1K = mask_absent(negatives.present, query_BLD.dtype).unsqueeze(1)
        if bias is not None:
            bias = self.remove_canceling_bias(bias)
            own_BL, absent_B1K = own_BL + bias, (absent_B1K + bias.unsqueeze(2)).to(query_BLD.dtype)
        scores_BLK = torch.baddbmm(absent_B1K, query_BLD, negatives.vectors.transpose(1, 2)).float()
        return self(own_BL, scores_BLK, negatives.present.sum(1, keepdim=True))


def mask_absent(present: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the terms to add to the scores of negatives: 0, or ABSENT where `present` is False."""
    return torch.zeros(present.shape, dtype=dtype, device=present.device).masked_fill_(~present, ABSENT)


class Queries(nn.Module):
    """Layer that derives one query vector per output from the model's single vector for each row.

    A single query vector is the model's vector. Each of several query vectors is the elementwise product of the
    model's vector and learned weights (as in the GMF of He et al. 2017), so that one index of items serves all
    tasks.

    Args:
        outputs: Number of logits per row.
        vectors: True to append a query vector for losses that compare the rows of a batch.
        width: Width D of a vector.

    Attributes:
        own_loss_index: Index of the query vector for the model's own loss. This is the vector of the last
            output or, without outputs, the vector for losses that compare rows.
    """

    def __init__(self, outputs: int, vectors: bool, width: int):
        super().__init__()
        self.own_loss_index = max(outputs, 1) - 1
        self.weights = nn.Parameter(torch.ones(outputs + vectors, width)) if outputs + vectors > 1 else None

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """Return the query vectors: float [B, D] → [B, D], or [B, outputs + vectors, D] if there are several."""
        return query if self.weights is None else query.unsqueeze(-2) * self.weights

    def own_loss_query(self, query: torch.Tensor) -> torch.Tensor:
        """Return the query vector for the model's own loss: float [..., D] → [..., D]."""
        return query if self.weights is None else query * self.weights[self.own_loss_index]


def combine_outputs(
    query: torch.Tensor,
    item_BD: torch.Tensor,
    outputs: int,
    vectors: bool = False,
    own_B: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of a model's forward (see models/__init__.py), computed from query and item vectors.

    The columns are the logits, the own loss if any, and with `vectors`, the last query vector and the item vector.

    Args:
        query: Query vectors, float [B, D]; [B, outputs + vectors, D] if there are several.
        item_BD: Item vectors, float [B, D].
        outputs: Number of logits per row.
        vectors: True to include query and item vectors.
        own_B: The model's own loss for each row, float32 [B]; None if the model has no own loss.
        bias: Bias of the logits, [outputs] or [B, outputs]; default: 0.

    Returns:
        float32 [B, columns], or [B] if there is only a single logit.
    """
    query_BQD = query if query.dim() == 3 else query.unsqueeze(1)
    parts = []
    if outputs:
        logits_BT = (query_BQD[:, :outputs] * item_BD.unsqueeze(1)).sum(2)
        parts.append(logits_BT if bias is None else logits_BT + bias)
    if own_B is not None:
        parts.append(own_B.unsqueeze(1))
    if vectors:
        parts += [query_BQD[:, -1], item_BD]
    return parts[0].squeeze(1) if len(parts) == 1 and outputs == 1 else torch.cat(parts, dim=1)
