"""Models that read sequences in relation to a target: `sequence`, DIN and BST."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear

from raytrec.config.models.sequences import BstSection, DinSection, SequenceSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import Sequence
from raytrec.models.interactions import DLRM
from raytrec.models.parts.layers import ConcatInputs, SequenceModules, mlp, mlp_and_linear


class SequenceModel(nn.Module):
    """Model that pools each sequence into one vector by attention to a target feature, followed by DLRM.

    The attention follows DIN (Zhou et al. 2018, arXiv:1706.06978).

    Args:
        schema: Schema accepted by DLRM, with at least one feature with pooling: sequence.
        config: Target, layer sizes and dropout.
        outputs: Number of logits per row; all layers except the last are shared.

    Raises:
        ConfigError: The tables have different dims, the schema has no sequence, or the target does not exist or is
            ambiguous.
    """

    def __init__(self, schema: Schema, config: SequenceSection, outputs: int = 1):
        super().__init__()
        self.dlrm = DLRM(schema, config, outputs)
        length, sizes = config.max_length, config.attention_mlp
        targets = config.targets(schema)
        self.attention = SequenceModules(schema, targets, lambda dim, _: TargetAttention(dim, length, sizes))

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, outputs] if there are several outputs."""
        return self.dlrm(dense, {**pooled, **self.attention(pooled)})


class DIN(nn.Module):
    """Model that pools each sequence into one vector by an ActivationUnit, followed by an MLP.

    Zhou et al. 2018, arXiv:1706.06978. Each sequence has its own unit. The MLP reads the concatenation of the
    dense columns, the sequences' vectors and all other features, including the target.

    Activations are PReLU. The paper's Dice shifts PReLU's threshold by the mean and variance of the batch, so
    a row's logit would depend on other rows. With mean 0 and variance 0, Dice equals PReLU.

    Args:
        schema: Schema with any dense columns and sparse features of any dims, at least one with pooling:
            sequence; each sequence has the dim of its target.
        config: Target, layer sizes and dropout.
        outputs: Number of logits per row; all layers except the last are shared.

    Raises:
        ConfigError: The schema has no sequence, or the target does not exist or is ambiguous.
    """

    def __init__(self, schema: Schema, config: DinSection, outputs: int = 1):
        super().__init__()
        sizes, targets = config.attention_mlp, config.targets(schema)
        self.attention = SequenceModules(schema, targets, lambda dim, _: ActivationUnit(dim, sizes))
        self.concat_inputs = ConcatInputs(schema)
        width = self.concat_inputs.width
        self.top, self.logit = mlp_and_linear(width, config.top_mlp, outputs, config.dropout, nn.PReLU)

    def forward(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, outputs] if there are several outputs."""
        encoded = {**inputs, **self.attention(inputs)}
        return self.logit(self.top(self.concat_inputs(dense, encoded))).squeeze(1)


class TargetAttention(nn.Module):
    """Layer that averages a sequence's vectors, weighted by their relevance to a target.

    The score of id k with vector e_k for a target t is s_k = MLP(e_k, t, e_k − t, e_k ⊙ t) + r_k, where r_k
    is a learned bias for the id's recency. The output is Σ σ(s_k) · e_k ÷ n over the n ids of the sequence, and 0
    for an empty sequence. As in DIN, weights do not add up to 1, so a sequence that is more relevant to the
    target has a larger output. Softmax is not used: the gradients of its inputs add up to 0, so the gradient of
    a bias common to all scores would consist of rounding errors. The MLP's activations are sigmoids, as in
    DIN's code.

    Args:
        dim: Width of the vectors.
        length: Maximum number of ids in a sequence.
        sizes: Hidden sizes of the MLP.
    """

    def __init__(self, dim: int, length: int, sizes: list[int]):
        super().__init__()
        self.score = build_score_layers(dim, sizes, lambda _: nn.Sigmoid(), bias=False)  # recency is the bias
        self.recency = nn.Parameter(torch.zeros(length))

    def forward(self, sequence: Sequence, target_BD: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean of the vectors in each sequence, float32 [B, dim]."""
        scores_BL = compute_id_scores(self.score, sequence, target_BD) + self.recency
        count_B1 = sequence.present.sum(1, keepdim=True).clamp(min=1)
        weights_BL = scores_BL.sigmoid() * sequence.present / count_B1
        return torch.einsum("bl,bld->bd", weights_BL, sequence.vectors)


class ActivationUnit(nn.Module):
    """DIN's local activation unit, which returns Σ w_k · e_k over a sequence's ids; 0 for an empty sequence.

    The weight of id k with vector e_k for a target t is w_k = MLP(e_k, t, e_k − t, e_k ⊙ t). Weights are neither
    bounded nor normalized, so their sum expresses the strength of the interest (section 4.3). The MLP's
    activations are PReLU with one slope per hidden unit.

    Args:
        dim: Width of the vectors.
        sizes: Hidden sizes of the MLP.
    """

    def __init__(self, dim: int, sizes: list[int]):
        super().__init__()
        self.score = build_score_layers(dim, sizes, nn.PReLU)

    def forward(self, sequence: Sequence, target_BD: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the vectors in each sequence, float32 [B, dim]."""
        weights_BL = compute_id_scores(self.score, sequence, target_BD) * sequence.present
        return torch.einsum("bl,bld->bd", weights_BL, sequence.vectors)


def build_score_layers(
    dim: int, sizes: list[int], activation: Callable[[int], nn.Module], bias: bool = True
) -> nn.Sequential:
    """Return the MLP that scores an id's vector e for a target's vector t: (e, t, e − t, e ⊙ t), [N, 4 · dim] → [N, 1].

    Args:
        dim: Width of the vectors.
        sizes: Hidden sizes.
        activation: Function from a hidden size to the activation of that layer.
        bias: True if the last layer has a bias.
    """
    hidden = mlp([4 * dim, *sizes], activation=activation)
    return nn.Sequential(*hidden, nn.Linear((sizes or [4 * dim])[-1], 1, bias=bias))


def compute_id_scores(layers: nn.Sequential, sequence: Sequence, target_BD: torch.Tensor) -> torch.Tensor:
    """Return the score of each id in a sequence, [B, L]. Scores at positions without an id are undefined.

    `layers` is the result of `build_score_layers`. Its first layer is linear in e, t, e − t and e ⊙ t, so the
    contribution of the target t is computed once for all ids.
    """
    first, vectors_BLD = layers[0], sequence.vectors
    of_id, of_target, of_difference, of_product = first.weight.chunk(4, dim=1)  # [H, D] each
    products_BLD = vectors_BLD * target_BD.unsqueeze(1)
    ids_BLH = linear(vectors_BLD, of_id + of_difference) + linear(products_BLD, of_product)
    target_BH = linear(target_BD, of_target - of_difference, first.bias)
    hidden_NH = (ids_BLH + target_BH.unsqueeze(1)).flatten(0, 1)
    return layers[1:](hidden_NH).view(vectors_BLD.shape[:2])


INITIAL_NORM_GAIN = 0.02  # initial gain of the last layer norm


class BST(nn.Module):
    """Model that passes each sequence, preceded by its target, through transformer layers, followed by an MLP.

    Chen et al. 2019, arXiv:1905.06874. The MLP reads the concatenation of the dense columns, the transformer's
    outputs for the target and each id, and all other features. As in the paper, these include the target's
    embedding, because layer norm removes most of its magnitude.

    Positions express recency: 0 is the target, and 1 is the most recent id; the paper uses time instead.
    Learned position vectors are added to the ids' vectors. At positions without an id, the MLP reads 0.
    Activations are LeakyReLU.

    Args:
        schema: Schema with any dense columns and sparse features of any dims, at least one with pooling:
            sequence; each sequence has the dim of its target.
        config: Target, layer sizes, heads and dropout.
        outputs: Number of logits per row; all layers except the last are shared.

    Raises:
        ConfigError: The schema has no sequence, or the target does not exist or is ambiguous.
    """

    def __init__(self, schema: Schema, config: BstSection, outputs: int = 1):
        super().__init__()
        target_of = config.targets(schema)
        self.others = [feature for feature in schema.sparse if feature not in target_of]
        self.transformers = SequenceModules(schema, target_of, lambda dim, _: Transformer(dim, config))
        width = len(schema.dense) + sum(schema.get_feature_dim(f) for f in self.others)
        width += (config.max_length + 1) * sum(schema.get_feature_dim(f) for f in target_of)
        self.top, self.logit = mlp_and_linear(width, config.top_mlp, outputs, config.dropout, lambda _: nn.LeakyReLU())

    def forward(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, outputs] if there are several outputs."""
        encoded = [states.flatten(1) for states in self.transformers(inputs).values()]
        vectors = [inputs[feature] for feature in self.others]
        return self.logit(self.top(torch.cat([dense, *vectors, *encoded], dim=1))).squeeze(1)


class Transformer(nn.Module):
    """Transformer layers over a target and a sequence of up to L ids.

    The gain of the last layer norm is initialized to INITIAL_NORM_GAIN, so that outputs are as small as
    embeddings. With 1 + L output vectors of norm √dim, the model would memorize ids with untrained embeddings.

    Args:
        dim: Width of the vectors.
        config: Section with max_length (L), blocks, heads, feedforward and attention_dropout.
    """

    def __init__(self, dim: int, config: BstSection):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1 + config.max_length, dim) * 0.02)
        self.layers = nn.ModuleList(Layer(dim, config) for _ in range(config.blocks))
        nn.init.constant_(self.layers[-1].norms[1].weight, INITIAL_NORM_GAIN)

    def forward(self, sequence: Sequence, target_BD: torch.Tensor) -> torch.Tensor:
        """Return the output for the target and then each id, float [B, 1 + L, dim]; 0 at positions without an id."""
        x_BND = torch.cat([target_BD.unsqueeze(1), sequence.vectors], dim=1) + self.position
        present_BN = nn.functional.pad(sequence.present, (1, 0), value=True)
        for layer in self.layers:
            x_BND = layer(x_BND, ~present_BN)
        return x_BND * present_BN.unsqueeze(2)


class Layer(nn.Module):
    """Transformer layer: x ← LN(x + MH(x)), x ← LN(x + W₂ LeakyReLU(W₁ x + b₁) + b₂), float [B, N, dim].

    LN is layer norm, and MH is multi-head attention without biases. Dropout is applied to both terms that are
    added to x.
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
        """Return the output of the layer, float [B, N, dim]; vectors where `absent_BN` is True are not attended to."""
        attended_BND = self.attention(x_BND, x_BND, x_BND, key_padding_mask=absent_BN, need_weights=False)[0]
        x_BND = self.norms[0](x_BND + self.dropout(attended_BND))
        return self.norms[1](x_BND + self.dropout(self.feedforward(x_BND)))
