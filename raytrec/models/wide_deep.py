"""Wide & Deep: a linear model and an MLP.

Cheng et al. 2016, arXiv:1606.07792.
"""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.ranking import WideDeepSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import mlp
from raytrec.models.parts.fields import SideBySide


class WideDeep(nn.Module):
    """logit = Σ of the wide part's weights + wᵀ MLP(the deep part side by side) + b.

    The wide part is linear in ids and dense columns. An id's weight is a separate number: the first of its
    row of the table, which the MLP does not read; with T outputs the first T, one for each. So a pooled
    embedding has Σ of its ids' weights (or their mean, as it is pooled). A feature that is deep alone enters
    the MLP with its whole row. Products of columns, φ(x) in the paper, are features that the data has.

    Args:
        schema: any dense columns, sparse features of any dims larger than T.
        config: which features belong to which part; sizes and dropout.
        outputs: T, logits of a row; each has its own weights, and they share all of the MLP but its last
            layer.

    Returns (forward):
        float32 [B]: the logit of each row; [B, T] for several.

    Raises:
        ConfigError: a feature in neither part, or a pattern that matches nothing.
    """

    def __init__(self, schema: Schema, config: WideDeepSection, outputs: int = 1):
        super().__init__()
        parts, self.outputs = config.parts(schema), outputs
        self.wide = [feature for feature in schema.sparse if feature in parts["wide"]]
        columns = [place for place, name in enumerate(schema.dense) if name in parts["wide"]]
        self.register_buffer("columns", torch.tensor(columns, dtype=torch.long), persistent=False)
        self.slopes = nn.Linear(len(columns), outputs, bias=False) if columns else None
        self.beside = SideBySide(schema, parts["deep"], dict.fromkeys(self.wide, outputs))
        self.deep = mlp([self.beside.width, *config.top_mlp], config.dropout)
        self.logit = nn.Linear((config.top_mlp or [self.beside.width])[-1], outputs)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        logits_BT = self.logit(self.deep(self.beside(dense, pooled)))
        for feature in self.wide:
            logits_BT = logits_BT + pooled[feature][:, : self.outputs]
        if self.slopes is not None:
            logits_BT = logits_BT + self.slopes(dense.index_select(1, self.columns))
        return logits_BT.squeeze(1)
