"""Sequences read for a target: how relevant each of their ids is to it (Zhou et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from raytrec.models.inputs import Sequence


class TargetAttention(nn.Module):
    """The mean of a sequence's vectors, each weighted by its relevance to a target.

    Id k with vector e scores s = MLP(e, t, e − t, e ⊙ t) + r_k for the target t, with a learned r_k for how
    long ago it was. The result is Σ σ(s_k) · e_k ÷ n over the n ids that are present, 0 if there are none. As
    in DIN, weights do not add up to 1, so that a sequence which is more relevant to the target counts more;
    and a softmax, whose gradients add up to 0, would leave those of the MLP's biases to rounding. The MLP's
    activations are sigmoids, as in DIN's code.

    Args:
        dim: of the vectors.
        length: the most ids of a sequence.
        sizes: hidden sizes of the MLP.
    """

    def __init__(self, dim: int, length: int, sizes: list[int]):
        super().__init__()
        self.score = score_layers(dim, sizes, lambda _: nn.Sigmoid(), bias=False)  # recency has the biases
        self.recency = nn.Parameter(torch.zeros(length))

    def forward(self, sequence: Sequence, target_BD: torch.Tensor) -> torch.Tensor:
        scores_BL = scores_of(self.score, sequence, target_BD) + self.recency
        count_B1 = sequence.present.sum(1, keepdim=True).clamp(min=1)
        weights_BL = scores_BL.sigmoid() * sequence.present / count_B1
        return torch.einsum("bl,bld->bd", weights_BL, sequence.vectors)


class ActivationUnit(nn.Module):
    """DIN's local activation unit: Σ w_k · e_k over the ids that are present, 0 if there are none, with
    w = MLP(e, t, e − t, e ⊙ t) for the target t.

    Weights are any numbers, and not normalised: their sum is how strong the interest is (section 4.3). The
    MLP's activations are PReLU, with a slope for each unit.

    Args:
        dim: of the vectors.
        sizes: hidden sizes of the MLP.
    """

    def __init__(self, dim: int, sizes: list[int]):
        super().__init__()
        self.score = score_layers(dim, sizes, nn.PReLU)

    def forward(self, sequence: Sequence, target_BD: torch.Tensor) -> torch.Tensor:
        weights_BL = scores_of(self.score, sequence, target_BD) * sequence.present
        return torch.einsum("bl,bld->bd", weights_BL, sequence.vectors)


def score_layers(
    dim: int, sizes: list[int], activation: Callable[[int], nn.Module], bias: bool = True
) -> nn.Sequential:
    """The MLP from an id's vector next to a target's to one number: [N, 4 · dim] → [N, 1].

    Args:
        activation: hidden size → what follows that layer. bias: of the last layer.
    """
    layers: list[nn.Module] = []
    inputs = 4 * dim
    for size in sizes:
        layers += [nn.Linear(inputs, size), activation(size)]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, 1, bias=bias))


def scores_of(layers: nn.Module, sequence: Sequence, target_BD: torch.Tensor) -> torch.Tensor:
    """What such layers give for each id of a sequence: [B, L]; where there is none, some number."""
    vectors_BLD = sequence.vectors
    target_BLD = target_BD.unsqueeze(1).expand_as(vectors_BLD)
    beside = [vectors_BLD, target_BLD, vectors_BLD - target_BLD, vectors_BLD * target_BLD]
    return layers(torch.cat(beside, dim=2).flatten(0, 1)).view(vectors_BLD.shape[:2])
