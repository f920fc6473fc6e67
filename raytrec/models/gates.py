"""Models with gates, which weight inputs differently for each row: FinalMLP, MaskNet and PEPNet."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

from raytrec.config.models.multitask import PEPNetSection
from raytrec.config.models.ranking import FinalMLPSection, MaskNetSection
from raytrec.config.schema import Schema
from raytrec.models.multitask import TaskTowers
from raytrec.models.parts.layers import ConcatInputs, FieldVectors, mlp, mlp_and_linear


class FinalMLP(nn.Module):
    """FinalMLP: logit = b + w₁ᵀ o₁ + w₂ᵀ o₂ + Σ over heads of o₁ₕᵀ Wₕ o₂ₕ, where stream s is oₛ = MLPₛ(gateₛ ⊙ e).

    Mao et al. 2023, arXiv:2304.00902. b, the vectors w and the matrices W are learned. e is the concatenation of dense
    columns and embeddings. gateₛ = 2 σ(MLP(features of the stream's gate)), so each stream emphasizes different
    features. A gate without features reads a learned vector; without `gating`, all weights are 1. o₁ and o₂ are each
    cut into equal parts, one per head; head h reads part h of both.

    Args:
        schema: Schema with any dense columns and sparse features of any dims.
        config: Layer sizes, gates, heads and dropout.
        outputs: Number of logits per row; all outputs share both streams.

    Raises:
        ConfigError: A pattern in model.gate1 or model.gate2 matches no feature.
    """

    def __init__(self, schema: Schema, config: FinalMLPSection, outputs: int = 1):
        super().__init__()
        self.concat_inputs = ConcatInputs(schema)
        width, self.heads = self.concat_inputs.width, config.heads
        self.streams = nn.ModuleList(mlp([width, *sizes], config.dropout) for sizes in (config.mlp1, config.mlp2))
        self.gates = nn.ModuleList(
            Gate(schema, config.context(schema, stream), config.gate_mlp, width)
            for stream in (("gate1", "gate2") if config.gating else ())
        )
        one, two = config.mlp1[-1], config.mlp2[-1]
        self.logit = nn.Linear(one + two, outputs)
        self.bilinear = nn.Parameter(torch.empty(outputs, config.heads, one // config.heads, two // config.heads))
        nn.init.xavier_normal_(self.bilinear)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, outputs] if there are several outputs."""
        e_BN = self.concat_inputs(dense, pooled)
        gated = [gate(dense, pooled) * e_BN for gate in self.gates] or [e_BN, e_BN]
        one, two = (stream(x_BN) for stream, x_BN in zip(self.streams, gated, strict=True))
        heads = (o.view(-1, self.heads, o.shape[1] // self.heads) for o in (one, two))
        products_BT = torch.einsum("bhi,thij,bhj->bt", next(heads), self.bilinear, next(heads))
        return (self.logit(torch.cat([one, two], dim=1)) + products_BT).squeeze(1)


class Gate(nn.Module):
    """Gate 2 σ(MLP(context)), which computes a weight in (0, 2) for each of `width` values from a context.

    Args:
        schema: Schema of the data.
        members: Features and dense columns of the context; if empty, the context is a learned vector.
        sizes: Hidden sizes of the MLP.
        width: Number of weights.
        more: Width of the argument `more_BM` of `forward`; 0 if this argument is not passed.
    """

    def __init__(self, schema: Schema, members: set[str], sizes: list[int], width: int, more: int = 0):
        super().__init__()
        self.context = ConcatInputs(schema, members) if members else None
        inputs = self.context.width if self.context is not None else (sizes or [width])[0]
        self.vector = nn.Parameter(torch.zeros(1, inputs)) if self.context is None else None
        self.hidden, self.last = mlp_and_linear(inputs + more, sizes, width)

    def forward(
        self, dense: torch.Tensor, pooled: dict[str, torch.Tensor], more_BM: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the weights, float32 [B, width]; [1, width] without members and `more_BM`.

        Args:
            dense: Dense columns, float32 [B, n].
            pooled: Feature → its embeddings.
            more_BM: Values that are appended to the context of a gate with members, float [B, more]; default: none.
        """
        context = self.vector if self.context is None else self.context(dense, pooled)
        context = context if more_BM is None else torch.cat([context, more_BM], dim=1)
        return 2 * self.last(self.hidden(context)).sigmoid()


class MaskNet(nn.Module):
    """MaskNet: mask blocks over normalized embeddings, arranged in parallel or in series, followed by an MLP.

    Wang et al. 2021, arXiv:2102.07619. V is the concatenation of a row's F vectors, [F·D]. N contains the layer
    norms of these vectors, each with a separate gain and bias. The masks of all blocks are computed from V. In
    parallel, all blocks read N, and the MLP reads their concatenated outputs. In series, the first block reads N,
    every later block reads the output of the previous block, and the MLP reads the last output.

    Args:
        schema: Schema with any dense columns; all tables have the same dim.
        config: Arrangement, layer sizes and dropout.
        outputs: Number of logits per row; all layers except the last are shared.

    Raises:
        ConfigError: The tables have different dims.
    """

    def __init__(self, schema: Schema, config: MaskNetSection, outputs: int = 1):
        super().__init__()
        self.fields = FieldVectors(schema, config.name)
        width = self.fields.width
        self.gain = nn.Parameter(torch.ones(self.fields.count, self.fields.dim))
        self.bias = nn.Parameter(torch.zeros(self.fields.count, self.fields.dim))
        self.serial = config.arrangement == "serial"
        inputs = [width, *config.blocks[:-1]] if self.serial else [width] * len(config.blocks)
        self.blocks = nn.ModuleList(
            MaskBlock(width, input_size, size, config.reduction)
            for input_size, size in zip(inputs, config.blocks, strict=True)
        )
        top_inputs = config.blocks[-1] if self.serial else sum(config.blocks)
        self.top, self.logit = mlp_and_linear(top_inputs, config.top_mlp, outputs, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, outputs] if there are several outputs."""
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
    """Mask block ReLU(LN(W (mask ⊙ h))), where mask = W₂ ReLU(W₁ V + b₁) + b₂ (equations 4, 7 and 8).

    V and h are the arguments of `forward`; LN is layer norm.

    Args:
        embeddings: Width of V.
        inputs: Width of h and of the mask.
        size: Width of the output.
        reduction: Width of the hidden layer that computes the mask, as a multiple of `inputs`.
    """

    def __init__(self, embeddings: int, inputs: int, size: int, reduction: float):
        super().__init__()
        hidden = max(1, round(reduction * inputs))
        self.mask = nn.Sequential(nn.Linear(embeddings, hidden), nn.ReLU(), nn.Linear(hidden, inputs))
        self.layer = nn.Linear(inputs, size, bias=False)
        self.norm, self.relu = nn.LayerNorm(size), nn.ReLU()

    def forward(self, embeddings_BN: torch.Tensor, hidden_BI: torch.Tensor) -> torch.Tensor:
        """Return the output of the block, float [B, size], from V [B, embeddings] and h [B, inputs]."""
        return self.relu(self.norm(self.layer(self.mask(embeddings_BN) * hidden_BI)))


class PEPNet(nn.Module):
    """PEPNet: one MLP (tower) per task over gated inputs, with a gate for the hidden units of each layer.

    Chang et al. 2023, arXiv:2302.01115. e is the concatenation of dense columns and embeddings, including the
    domain and personal features. In EPNet, the towers read o = gate(domain, sg(e)) ⊙ e, where sg stops
    gradients; without domain features, o = e. In PPNet, the hidden units in layer l of all towers are
    multiplied by gateₗ(personal, sg(o)). Gates are 2 σ(MLP(inputs)). Each tower ends in a linear layer.

    Args:
        schema: Schema with any dense columns and sparse features of any dims.
        config: Features of the gates, layer sizes and dropout.
        tasks: Task → number of its logit columns.

    Raises:
        ConfigError: A pattern in model.domain or model.personal matches no feature.
    """

    def __init__(self, schema: Schema, config: PEPNetSection, tasks: Mapping[str, int]):
        super().__init__()
        self.concat_inputs, self.count = ConcatInputs(schema), len(tasks)
        width, members = self.concat_inputs.width, config.members(schema)

        def make_gate(kind: str, outputs: int) -> Gate:
            return Gate(schema, members[kind], config.gate_mlp, outputs, width)

        self.domain_gate = make_gate("domain", width) if members["domain"] else None
        self.gates = nn.ModuleList(make_gate("personal", size * len(tasks)) for size in config.tower_mlp)
        self.layers = nn.ModuleList(
            nn.ModuleList(mlp([*sizes], config.dropout) for _ in tasks)
            for sizes in pairwise([width, *config.tower_mlp])
        )
        self.towers = TaskTowers(config.tower_mlp[-1], [], tasks, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of all tasks in order, float32 [B, columns]; [B] if there is a single column."""
        e_BN = self.concat_inputs(dense, pooled)
        if self.domain_gate is not None:
            e_BN = self.domain_gate(dense, pooled, e_BN.detach()) * e_BN
        of_tasks = [e_BN] * self.count
        for layers, gate in zip(self.layers, self.gates, strict=True):
            scales = gate(dense, pooled, e_BN.detach()).chunk(self.count, dim=1)
            of_tasks = [layer(x_BN) * scale for layer, x_BN, scale in zip(layers, of_tasks, scales, strict=True)]
        return self.towers(of_tasks)
