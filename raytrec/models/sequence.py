"""Sequences read for the item in question (attention as in DIN: Zhou et al. 2018, arXiv:1706.06978)."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.sequence import SequenceSection
from raytrec.config.schema import Schema
from raytrec.models.attention import TargetAttention
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
