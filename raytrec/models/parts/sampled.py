"""Losses of drawn negatives, and query vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import softplus

from raytrec.models.inputs import Sequence

ABSENT = -1e30  # the score of a negative that is not there: no loss sees it, and none has a gradient for it


def sampled_loss(
    kind: str,
    query_BLD: torch.Tensor,
    item_BLD: torch.Tensor,
    negatives: Sequence,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of each of L queries of a row, with one item each, and negatives that they share.

    Args:
        kind: bce, softmax or bpr; see `LOSSES`.
        query_BLD, item_BLD: float [B, L, D]; a score is their dot product.
        negatives: vectors [B, K, D].
        bias: [B, 1] or [1, 1], added to all scores of a row; see `bias_of`.

    Returns:
        float32 [B, L].
    """
    own_BL = (query_BLD * item_BLD).sum(2).float()
    absent_B1K = absence(negatives.present, query_BLD.dtype).unsqueeze(1)
    if bias is not None:
        bias = bias_of(kind, bias)
        own_BL, absent_B1K = own_BL + bias, (absent_B1K + bias.unsqueeze(2)).to(query_BLD.dtype)
    scores_BLK = torch.baddbmm(absent_B1K, query_BLD, negatives.vectors.transpose(1, 2)).float()
    return LOSSES[kind](own_BL, scores_BLK, negatives.present.sum(1, keepdim=True))


def absence(present: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What is added to the scores of negatives: 0, or ABSENT where there is none."""
    return torch.zeros(present.shape, dtype=dtype, device=present.device).masked_fill_(~present, ABSENT)


def bias_of(kind: str, bias: torch.Tensor) -> torch.Tensor:
    """What a bias adds to all scores of a loss. In differences of scores it cancels: 0 there, with a gradient
    of exactly 0 where rounding would leave some other number, of which Adam makes a step."""
    return bias if kind == "bce" else 0 * bias


def _bce(own: torch.Tensor, scores_K: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return softplus(-own) + softplus(scores_K).sum(-1)


def _softmax(own: torch.Tensor, scores_K: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return softplus(scores_K.logsumexp(-1) - own)


def _bpr(own: torch.Tensor, scores_K: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return softplus(scores_K - own.unsqueeze(-1)).sum(-1) / count.clamp(min=1)


# Each takes own [...], the score of a row's own item; scores [..., K] of its negatives, ABSENT where there is
# none; and how many there are. float32 [...]:
#   bce      −ln σ(s) − Σₖ ln(1 − σ(sₖ)): one example of label 1, K of label 0 (He et al. 2017)
#   softmax  −ln(eˢ ÷ (eˢ + Σₖ eˢᵏ)), 0 without negatives
#   bpr      the mean over k of −ln σ(s − sₖ), 0 without negatives (Rendle et al. 2009, arXiv:1205.2618)
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bce": _bce,
    "softmax": _softmax,
    "bpr": _bpr,
}


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
