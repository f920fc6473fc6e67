"""Sequences read for the item in question (attention as in DIN: Zhou et al. 2018, arXiv:1706.06978)."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.sequence import SequenceSection
from raytrec.config.schema import Schema
from raytrec.models.dlrm import DLRM
from raytrec.models.inputs import Sequence, dim_of


class SequenceModel(nn.Module):
    """Each sequence becomes one vector, by attention for a target feature; then DLRM (dlrm.py).

    Args:
        schema: what DLRM takes, with at least one feature of pooling: sequence.
        config: the target; sizes and dropout.
        outputs: logits of a row, which share all layers but the last.

    Returns (forward):
        float32 [B]: the logit of each row; [B, outputs] for several.

    Raises:
        ConfigError: what DLRM refuses; no sequence; a target that there is not, or that has to be named.
    """

    def __init__(self, schema: Schema, config: SequenceSection, outputs: int = 1):
        super().__init__()
        self.target_of = config.targets(schema)
        self.dlrm = DLRM(schema, config, outputs)
        # Features are no names of modules: they may have dots.
        self.attention = nn.ModuleList(
            TargetAttention(dim_of(schema, feature), config.max_length, config.attention_mlp)
            for feature in self.target_of
        )

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        read = {
            feature: attention(pooled[feature], pooled[target])
            for (feature, target), attention in zip(self.target_of.items(), self.attention, strict=True)
        }
        return self.dlrm(dense, {**pooled, **read})


class TargetAttention(nn.Module):
    """The mean of a sequence's vectors, each weighted by how much it says about a target.

    Id k with vector e scores s = MLP(e, t, e − t, e ⊙ t) + r_k for the target t, with a learned r_k for how
    long ago it was. The result is Σ σ(s_k) · e_k ÷ n over the n ids that are present, 0 if there are none. As
    in DIN, weights do not add up to 1, so that a sequence which says much about the target says it louder;
    and a softmax, whose gradients add up to 0, would leave those of the MLP's biases to rounding. The MLP's
    activations are sigmoids, as in DIN's code.

    Args:
        dim: of the vectors.
        length: the most ids of a sequence.
        sizes: hidden sizes of the MLP.
    """

    def __init__(self, dim: int, length: int, sizes: list[int]):
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 4 * dim
        for size in sizes:
            layers += [nn.Linear(inputs, size), nn.Sigmoid()]
            inputs = size
        self.score = nn.Sequential(*layers, nn.Linear(inputs, 1, bias=False))  # recency has the biases
        self.recency = nn.Parameter(torch.zeros(length))

    def forward(self, sequence: Sequence, target_BD: torch.Tensor) -> torch.Tensor:
        vectors_BLD, present_BL = sequence
        target_BLD = target_BD.unsqueeze(1).expand_as(vectors_BLD)
        beside = [vectors_BLD, target_BLD, vectors_BLD - target_BLD, vectors_BLD * target_BLD]
        scores_BL = self.score(torch.cat(beside, dim=2)).squeeze(2) + self.recency
        count_B1 = present_BL.sum(1, keepdim=True).clamp(min=1)
        weights_BL = scores_BL.sigmoid() * present_BL / count_B1
        return torch.einsum("bl,bld->bd", weights_BL, vectors_BLD)
