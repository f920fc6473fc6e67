"""Sequences read for a target: `sequence`, DIN and BST."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear

from raytrec.config.models.sequences import BstSection, DinSection, SequenceSection
from raytrec.config.schema import Schema
from raytrec.models.dlrm import DLRM
from raytrec.models.inputs import Sequence
from raytrec.models.parts.layers import PerSequence, dim_of, mlp, mlp_and_linear


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
        self.dlrm = DLRM(schema, config, outputs)
        length, sizes = config.max_length, config.attention_mlp
        self.attention = PerSequence(
            config.targets(schema), lambda feature: TargetAttention(dim_of(schema, feature), length, sizes)
        )

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        return self.dlrm(dense, {**pooled, **self.attention(pooled)})


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
        self.features = list(schema.sparse)
        self.attention = PerSequence(
            config.targets(schema),
            lambda feature: ActivationUnit(dim_of(schema, feature), config.attention_mlp),
        )
        sizes = [len(schema.dense) + sum(dim_of(schema, f) for f in self.features), *config.top_mlp]
        self.top, self.logit = mlp_and_linear(sizes, outputs, config.dropout, nn.PReLU)

    def forward(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        read = {**inputs, **self.attention(inputs)}
        vectors = [read[feature] for feature in self.features]
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


GAIN = 0.02  # of the last layer norm, at the beginning


class BST(nn.Module):
    """Each sequence, and its target before it, pass through transformer layers; then an MLP over the dense
    columns, what these gave for the target and each id, and all other features side by side, the target among
    them: it is one of the paper's other features, too, and layer norm leaves little of how strong it is.

    Positions count how long ago an id was: 0 is the target's, 1 that of the most recent id; the paper's are
    of time. Their learned vectors are added to the ids'. Where a sequence has no id, the MLP gets 0.
    Activations are LeakyReLU.

    Args:
        schema: any dense columns, sparse features of any dims, at least one of pooling: sequence, whose dim
            is its target's.
        config: the target; sizes, heads and dropout.
        outputs: logits of a row, which share all layers but the last.

    Returns (forward):
        float32 [B]: the logit of each row; [B, outputs] for several.

    Raises:
        ConfigError: no sequence; a target that there is not, that has to be named, or of another dim; heads
            that do not share out a dim.
    """

    def __init__(self, schema: Schema, config: BstSection, outputs: int = 1):
        super().__init__()
        config.check(schema)
        target_of = config.targets(schema)
        self.others = [feature for feature in schema.sparse if feature not in target_of]
        self.transformers = PerSequence(target_of, lambda f: Transformer(dim_of(schema, f), config))
        width = len(schema.dense) + sum(dim_of(schema, f) for f in self.others)
        width += (config.max_length + 1) * sum(dim_of(schema, f) for f in target_of)
        sizes = [width, *config.top_mlp]
        self.top, self.logit = mlp_and_linear(sizes, outputs, config.dropout, lambda _: nn.LeakyReLU())

    def forward(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        read = [states.flatten(1) for states in self.transformers(inputs).values()]
        vectors = [inputs[feature] for feature in self.others]
        return self.logit(self.top(torch.cat([dense, *vectors, *read], dim=1))).squeeze(1)


class Transformer(nn.Module):
    """Transformer layers over a target and a sequence of up to L ids.

    What they give begins as small as embeddings are, by the last layer norm's gain: 1 + L vectors of length
    √dim, of ids that nothing is known of yet, would be learned by heart.

    Args:
        dim: of their vectors.
        config: max_length (L), blocks, heads, feedforward, attention_dropout.

    Returns (forward):
        float [B, 1 + L, dim]: what has become of the target, then of each id, 0 where there is none.
    """

    def __init__(self, dim: int, config: BstSection):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1 + config.max_length, dim) * 0.02)
        self.layers = nn.ModuleList(Layer(dim, config) for _ in range(config.blocks))
        nn.init.constant_(self.layers[-1].norms[1].weight, GAIN)

    def forward(self, sequence: Sequence, target_BD: torch.Tensor) -> torch.Tensor:
        x_BND = torch.cat([target_BD.unsqueeze(1), sequence.vectors], dim=1) + self.position
        there_BN = nn.functional.pad(sequence.present, (1, 0), value=True)
        for layer in self.layers:
            x_BND = layer(x_BND, ~there_BN)
        return x_BND * there_BN.unsqueeze(2)


class Layer(nn.Module):
    """x ← LayerNorm(x + MH(x)), then x ← LayerNorm(x + W₂ LeakyReLU(W₁ x + b₁) + b₂); float [B, N, dim].

    MH is attention of several heads without biases. What is added passes dropout.
    """

    def __init__(self, dim: int, config: BstSection):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, config.heads, bias=False, batch_first=True)
        self.feedforward = nn.Sequential(
            nn.Linear(dim, config.feedforward), nn.LeakyReLU(), nn.Linear(config.feedforward, dim)
        )
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(self, x_BND: torch.Tensor, absent_BN: torch.Tensor) -> torch.Tensor:
        attended_BND = self.attention(x_BND, x_BND, x_BND, key_padding_mask=absent_BN, need_weights=False)[0]
        x_BND = self.norms[0](x_BND + self.dropout(attended_BND))
        return self.norms[1](x_BND + self.dropout(self.feedforward(x_BND)))
