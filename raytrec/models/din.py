"""Sequences read for a target: `sequence`, and DIN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear

from raytrec.config.models.sequences import DinSection, SequenceSection
from raytrec.config.schema import Schema
from raytrec.models.dlrm import DLRM
from raytrec.models.inputs import Sequence
from raytrec.models.parts.layers import dim_of, mlp, mlp_and_linear


class SequenceModel(nn.Module):
    """Each sequence becomes one vector, by attention for a target feature (as in DIN: Zhou et al. 2018,
    arXiv:1706.06978); then DLRM.

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
        # A feature's name cannot name a module: it may have dots.
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


class DIN(nn.Module):
    """Each sequence becomes one vector for its target, by its own local activation unit; then an MLP
    over the dense columns, those vectors and all other features side by side, the target among them (Zhou et
    al. 2018, arXiv:1706.06978).

    Activations are PReLU. The paper's Dice shifts PReLU's kink by the mean and variance of the batch, so that
    a row would depend on other rows; with a mean of 0 and no variance it is PReLU.

    Args:
        schema: any dense columns, sparse features of any dims, at least one of pooling: sequence, whose dim
            is its target's.
        config: the target; sizes and dropout.
        outputs: logits of a row, which share all layers but the last.

    Returns (forward):
        float32 [B]: the logit of each row; [B, outputs] for several.

    Raises:
        ConfigError: no sequence; a target that there is not, that has to be named, or of another dim.
    """

    def __init__(self, schema: Schema, config: DinSection, outputs: int = 1):
        super().__init__()
        config.check(schema)
        self.features, self.target_of = list(schema.sparse), config.targets(schema)
        # A feature's name cannot name a module: it may have dots.
        self.attention = nn.ModuleList(
            ActivationUnit(dim_of(schema, feature), config.attention_mlp) for feature in self.target_of
        )
        sizes = [len(schema.dense) + sum(dim_of(schema, f) for f in self.features), *config.top_mlp]
        self.top, self.logit = mlp_and_linear(sizes, outputs, config.dropout, nn.PReLU)

    def forward(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        read = {
            feature: unit(inputs[feature], inputs[target])
            for (feature, target), unit in zip(self.target_of.items(), self.attention, strict=True)
        }
        vectors = [read[f] if f in read else inputs[f] for f in self.features]
        return self.logit(self.top(torch.cat([dense, *vectors], dim=1))).squeeze(1)


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
    hidden = mlp([4 * dim, *sizes], activation=activation)
    return nn.Sequential(*hidden, nn.Linear((sizes or [4 * dim])[-1], 1, bias=bias))


def scores_of(layers: nn.Sequential, sequence: Sequence, target_BD: torch.Tensor) -> torch.Tensor:
    """What such layers give for each id of a sequence: [B, L]; where there is none, some number.

    The first is linear in e, t, e - t and e ⊙ t, so that its part of t is computed once for all ids.
    """
    first, vectors_BLD = layers[0], sequence.vectors
    of_id, of_target, of_difference, of_product = first.weight.chunk(4, dim=1)  # [H, D] each
    products_BLD = vectors_BLD * target_BD.unsqueeze(1)
    ids_BLH = linear(vectors_BLD, of_id + of_difference) + linear(products_BLD, of_product)
    target_BH = linear(target_BD, of_target - of_difference, first.bias)
    hidden_NH = (ids_BLH + target_BH.unsqueeze(1)).flatten(0, 1)
    return layers[1:](hidden_NH).view(vectors_BLD.shape[:2])
