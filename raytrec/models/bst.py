"""BST: attention between a sequence and its target.

Chen et al. 2019, arXiv:1905.06874.
"""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.sequences import BstSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import Sequence
from raytrec.models.parts.layers import dim_of, mlp_and_linear

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
        self.target_of = config.targets(schema)
        self.others = [feature for feature in schema.sparse if feature not in self.target_of]
        # A feature's name cannot name a module: it may have dots.
        self.transformers = nn.ModuleList(
            Transformer(dim_of(schema, feature), config) for feature in self.target_of
        )
        width = len(schema.dense) + sum(dim_of(schema, f) for f in self.others)
        width += (config.max_length + 1) * sum(dim_of(schema, f) for f in self.target_of)
        sizes = [width, *config.top_mlp]
        self.top, self.logit = mlp_and_linear(sizes, outputs, config.dropout, lambda _: nn.LeakyReLU())

    def forward(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        read = [
            transformer(inputs[feature], inputs[target]).flatten(1)
            for (feature, target), transformer in zip(self.target_of.items(), self.transformers, strict=True)
        ]
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
