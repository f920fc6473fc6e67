"""MaskNet: layers behind masks that follow from the row.

Wang et al. 2021, arXiv:2102.07619.
"""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.ranking import MaskNetSection
from raytrec.config.schema import Schema
from raytrec.models.parts.layers import Fields, mlp_and_linear


class MaskNet(nn.Module):
    """Mask blocks over normalised embeddings, side by side or one after the other; then an MLP.

    With V the F vectors of a row side by side, [F·D], and N their layer norms, each with a gain and a bias of
    its own: parallel blocks all read N, and the MLP reads what they give side by side; of serial ones the
    first reads N and each other one what the one before it gives, and the MLP reads the last. Every
    block's mask follows from V.

    Args:
        schema: any dense columns, sparse features whose tables all have one dim.
        config: arrangement, sizes and dropout.
        outputs: logits of a row, which share all layers but the last.

    Returns (forward):
        float32 [B]: the logit of each row; [B, outputs] for several.

    Raises:
        ConfigError: tables of different dims.
    """

    def __init__(self, schema: Schema, config: MaskNetSection, outputs: int = 1):
        super().__init__()
        self.fields = Fields(schema, config.name)
        width = self.fields.count * self.fields.dim
        self.gain = nn.Parameter(torch.ones(self.fields.count, self.fields.dim))
        self.bias = nn.Parameter(torch.zeros(self.fields.count, self.fields.dim))
        self.serial = config.arrangement == "serial"
        inputs = [width, *config.blocks[:-1]] if self.serial else [width] * len(config.blocks)
        self.blocks = nn.ModuleList(
            MaskBlock(width, before, size, config.reduction)
            for before, size in zip(inputs, config.blocks, strict=True)
        )
        given = config.blocks[-1] if self.serial else sum(config.blocks)
        self.top, self.logit = mlp_and_linear([given, *config.top_mlp], outputs, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        _, vectors_BFD = self.fields(dense, pooled)
        normal_BFD = nn.functional.layer_norm(vectors_BFD, vectors_BFD.shape[2:])
        embeddings_BN, normal_BN = vectors_BFD.flatten(1), (normal_BFD * self.gain + self.bias).flatten(1)
        if self.serial:
            hidden_BM = normal_BN
            for block in self.blocks:
                hidden_BM = block(embeddings_BN, hidden_BM)
        else:
            hidden_BM = torch.cat([block(embeddings_BN, normal_BN) for block in self.blocks], dim=1)
        return self.logit(self.top(hidden_BM)).squeeze(1)


class MaskBlock(nn.Module):
    """ReLU(LN(W (mask ⊙ h))), where mask = W₂ ReLU(W₁ V + b₁) + b₂ (equations 4, 7 and 8).

    Args:
        embeddings: width of V. inputs: width of h, and of the mask. size: width of what it gives.
        reduction: width of the mask's hidden layer ÷ that of the mask.
    """

    def __init__(self, embeddings: int, inputs: int, size: int, reduction: float):
        super().__init__()
        hidden = max(1, round(reduction * inputs))
        self.mask = nn.Sequential(nn.Linear(embeddings, hidden), nn.ReLU(), nn.Linear(hidden, inputs))
        self.layer = nn.Linear(inputs, size, bias=False)
        self.norm, self.relu = nn.LayerNorm(size), nn.ReLU()

    def forward(self, embeddings_BN: torch.Tensor, hidden_BI: torch.Tensor) -> torch.Tensor:
        return self.relu(self.norm(self.layer(self.mask(embeddings_BN) * hidden_BI)))
