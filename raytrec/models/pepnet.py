"""PEPNet: embeddings and task towers that are scaled by gates of domain and personal features."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

from raytrec.config.models.multitask import PEPNetSection
from raytrec.config.schema import Schema
from raytrec.models.gates import Gate
from raytrec.models.multitask import TaskTowers
from raytrec.models.parts.layers import ConcatInputs, mlp


class PEPNet(nn.Module):
    """Task towers over gated inputs, with a gate for the hidden units of each layer.

    Chang et al. 2023, arXiv:2302.01115. e is the concatenation of dense columns and embeddings. EPNet: the
    towers read o = gate(domain, sg(e)) ⊙ e, where sg stops gradients; without domain features, o = e. PPNet:
    the hidden units of layer l of all towers are multiplied by gateₗ(personal, sg(o)). Gates are
    2 σ(MLP(inputs)). Domain and personal features are also part of e.

    Args:
        schema: Schema with any dense columns and sparse features of any dims.
        config: Features of the gates, layer sizes and dropout.
        tasks: Task → number of its logit columns.

    Raises:
        ConfigError: A pattern matches no feature.
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
