"""Losses of drawn negatives, and query vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import softplus

from raytrec.config.models.retrieval import SampledSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import Sequence

ABSENT = -1e30  # the score of a negative that is not there: no loss sees it, and none has a gradient for it


@dataclass(frozen=True)
class SampledLoss:
    """What is learned from an item's score s and the scores sₖ of its K negatives.

        softmax  −ln(eˢ ÷ (eˢ + Σₖ eˢᵏ)), 0 without negatives
        bce      −b · ln σ(s) − Σₖ ln(1 − σ(sₖ)): label 1 once, and label 0 K times (He et al. 2017), where
                 b = 1 − t · (1 − K ÷ (items − 1)). With t = 1 the scores are log-odds of the item among all
                 (gBCE: Petrov and Macdonald 2023, arXiv:2308.07192, equations 10 and 21)
        bpr      the mean over k of −ln σ(s − sₖ), 0 without negatives (Rendle et al. 2009, arXiv:1205.2618)

    Attributes:
        kind: one of these. gbce: t, from 0 to 1. items: that there are.
    """

    kind: str
    gbce: float = 0.0
    items: int = 2

    @classmethod
    def of(cls, schema: Schema, config: SampledSection, item: str) -> SampledLoss:
        """The configuration's, of the feature that the item is."""
        return cls(config.loss, config.gbce, schema.tables[schema.sparse[item].table].rows)

    def reduce(self, own: torch.Tensor, scores_K: torch.Tensor) -> torch.Tensor:
        """What some of the negatives add: float32 [...].

        Args:
            own: float32 [...]. scores_K: float32 [..., K], ABSENT where there is no negative.
        """
        if self.kind == "softmax":
            return scores_K.logsumexp(-1)
        return softplus(scores_K if self.kind == "bce" else scores_K - own.unsqueeze(-1)).sum(-1)

    def join(self, parts_W: torch.Tensor) -> torch.Tensor:
        """What all negatives add, of parts of them: [W, ...] → [...]."""
        return parts_W.logsumexp(0) if self.kind == "softmax" else parts_W.sum(0)

    def finish(self, own: torch.Tensor, added: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """The loss, float32 [...].

        Args:
            added: what all of them add. count: how many there are.
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
        return self.finish(own, self.reduce(own, scores_K), count)

    def bias_of(self, bias: torch.Tensor) -> torch.Tensor:
        """What a bias adds to all scores. In differences of scores it cancels: 0 there, with a gradient of
        exactly 0 where rounding would leave some other number, of which Adam makes a step."""
        return bias if self.kind == "bce" else 0 * bias

    def of_vectors(
        self,
        query_BLD: torch.Tensor,
        item_BLD: torch.Tensor,
        negatives: Sequence,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """That of each of L queries of a row, with one item each, and negatives that they share: float32
        [B, L].

        Args:
            query_BLD, item_BLD: float [B, L, D]; a score is their dot product.
            negatives: vectors [B, K, D].
            bias: [B, 1] or [1, 1], added to all scores of a row; see `bias_of`.
        """
        own_BL = (query_BLD * item_BLD).sum(2).float()
        absent_B1K = absence(negatives.present, query_BLD.dtype).unsqueeze(1)
        if bias is not None:
            bias = self.bias_of(bias)
            own_BL, absent_B1K = own_BL + bias, (absent_B1K + bias.unsqueeze(2)).to(query_BLD.dtype)
        scores_BLK = torch.baddbmm(absent_B1K, query_BLD, negatives.vectors.transpose(1, 2)).float()
        return self(own_BL, scores_BLK, negatives.present.sum(1, keepdim=True))


def absence(present: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What is added to the scores of negatives: 0, or ABSENT where there is none."""
    return torch.zeros(present.shape, dtype=dtype, device=present.device).masked_fill_(~present, ABSENT)


class Queries(nn.Module):
    """The query vectors of a model that makes one for each row: one for each output.

    A single one is the model's own. Of several, each is the model's times a learned weight for every
    dimension (as GMF weighs products: He et al. 2017), so that one index of items serves all tasks.

    Args:
        outputs: logits of a row. vectors: whether losses that compare rows have one more, the last.
        width: of a vector.

    Attributes:
        count: how many vectors there are. own: which of them the model's own loss is of: the last output's;
            without outputs, the one for losses that compare rows.
    """

    def __init__(self, outputs: int, vectors: bool, width: int):
        super().__init__()
        self.outputs, self.vectors, self.count = outputs, vectors, outputs + vectors
        self.own = max(outputs, 1) - 1
        self.weights = nn.Parameter(torch.ones(self.count, width)) if self.count > 1 else None

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """float [B, D] → [B, D], or [B, count, D] if there are several."""
        return query if self.weights is None else query.unsqueeze(-2) * self.weights

    def of_own_loss(self, query: torch.Tensor) -> torch.Tensor:
        """The one that the own loss is of: float [..., D] → [..., D]."""
        return query if self.weights is None else query * self.weights[self.own]


def result(
    query: torch.Tensor,
    item_BD: torch.Tensor,
    outputs: int,
    vectors: bool = False,
    own_B: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a model with query and item vectors gives: [B, outputs | own loss | query's D, item's D].

    Args:
        query: float [B, D], or [B, outputs + vectors, D] for several. item_BD: of the rows.
        own_B: the model's own loss of each row; None: it has none.
        bias: [outputs] or [B, outputs], of the logits; default: 0.

    Returns:
        float32 [B] for one output alone.
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
