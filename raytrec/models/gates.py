"""Models that weigh their inputs by the row: FinalMLP and MaskNet."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.ranking import FinalMLPSection, MaskNetSection
from raytrec.config.schema import Schema
from raytrec.models.parts.layers import Fields, SideBySide, mlp, mlp_and_linear


class FinalMLP(nn.Module):
    """logit = b + w₁ᵀ o₁ + w₂ᵀ o₂ + Σ over heads of o₁ₕᵀ Wₕ o₂ₕ, with oₛ = MLPₛ(gateₛ ⊙ e).

    e has the dense columns and embeddings side by side. gateₛ = 2 σ(MLP(the features that the stream's gate
    reads)), so that each stream looks at other features; without such features it reads one learned vector.
    Heads cut o₁ and o₂ into equal parts; head h has parts h of both.

    Args:
        schema: any dense columns, sparse features of any dims.
        config: sizes, gates, heads and dropout.
        outputs: logits of a row, which share both streams.

    Returns (forward):
        float32 [B]: the logit of each row; [B, outputs] for several.

    Raises:
        ConfigError: gates without gating, or of features that there are not; streams that cannot be cut.
    """

    def __init__(self, schema: Schema, config: FinalMLPSection, outputs: int = 1):
        super().__init__()
        self.beside = SideBySide(schema)
        width, self.heads = self.beside.width, config.heads
        self.streams = nn.ModuleList(
            mlp([width, *sizes], config.dropout) for sizes in (config.mlp1, config.mlp2)
        )
        self.gates = nn.ModuleList(
            Gate(schema, config.context(schema, stream), config.gate_mlp, width)
            for stream in (("gate1", "gate2") if config.gating else ())
        )
        one, two = config.mlp1[-1], config.mlp2[-1]
        self.logit = nn.Linear(one + two, outputs)
        self.bilinear = nn.Parameter(
            torch.empty(outputs, config.heads, one // config.heads, two // config.heads)
        )
        nn.init.xavier_normal_(self.bilinear)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        e_BN = self.beside(dense, pooled)
        gated = [gate(dense, pooled) * e_BN for gate in self.gates] or [e_BN, e_BN]
        one, two = (stream(x_BN) for stream, x_BN in zip(self.streams, gated, strict=True))
        heads = (o.view(-1, self.heads, o.shape[1] // self.heads) for o in (one, two))
        products_BT = torch.einsum("bhi,thij,bhj->bt", next(heads), self.bilinear, next(heads))
        return (self.logit(torch.cat([one, two], dim=1)) + products_BT).squeeze(1)


class Gate(nn.Module):
    """2 σ(MLP(context)): a weight in (0, 2) for each of `width` inputs, float32 [B, width].

    Args:
        members: features and dense columns that it reads; none: a learned vector takes their place.
        sizes: hidden sizes.
    """

    def __init__(self, schema: Schema, members: set[str], sizes: list[int], width: int):
        super().__init__()
        self.context = SideBySide(schema, members) if members else None
        inputs = self.context.width if self.context is not None else (sizes or [width])[0]
        self.vector = nn.Parameter(torch.zeros(1, inputs)) if self.context is None else None
        self.hidden, self.last = mlp_and_linear([inputs, *sizes], width)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        context = self.vector if self.context is None else self.context(dense, pooled)
        return 2 * self.last(self.hidden(context)).sigmoid()


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
