"""DIN: sequences summed by their relevance to the item in question (Zhou et al. 2018, arXiv:1706.06978)."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.sequences import DinSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import Sequence, dim_of, mlp
from raytrec.models.parts.attention import ActivationUnit


class DIN(nn.Module):
    """Each sequence becomes one vector for its target, by its own local activation unit; then an MLP
    over the dense columns, those vectors and all other features side by side, the target among them.

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
        self.top = mlp(sizes, config.dropout, nn.PReLU)
        self.logit = nn.Linear(sizes[-1], outputs)

    def forward(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor | Sequence]) -> torch.Tensor:
        read = {
            feature: unit(inputs[feature], inputs[target])
            for (feature, target), unit in zip(self.target_of.items(), self.attention, strict=True)
        }
        vectors = [read[f] if f in read else inputs[f] for f in self.features]
        return self.logit(self.top(torch.cat([dense, *vectors], dim=1))).squeeze(1)
