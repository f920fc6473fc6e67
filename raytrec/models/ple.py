"""PLE: experts of each task beside shared ones, level over level (Tang et al. 2020,
doi:10.1145/3383313.3412236)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from raytrec.config.models.ple import PLESection
from raytrec.config.schema import Schema
from raytrec.models.fields import SideBySide
from raytrec.models.towers import Experts, Gate, TaskTowers


class PLE(nn.Module):
    """Progressive layered extraction: levels of experts and gates, then a tower for each task.

    The first level reads x, the dense columns and embeddings side by side; each other one reads what the
    level before gives each task, and what it gives all. Of a single level this is CGC.

    Args:
        schema: any dense columns, sparse features of any dims.
        config: levels, experts, sizes and dropout.
        tasks: task → its columns of logits.

    Returns (forward):
        float32 [B, columns of all tasks], in their order; [B] of one column.
    """

    def __init__(self, schema: Schema, config: PLESection, tasks: Mapping[str, int]):
        super().__init__()
        self.beside, self.count = SideBySide(schema), len(tasks)
        widths = [self.beside.width, *[config.expert_mlp[-1]] * (config.levels - 1)]
        self.levels = nn.ModuleList(
            Level(width, self.count, config, last=place == config.levels - 1)
            for place, width in enumerate(widths)
        )
        self.towers = TaskTowers(config.expert_mlp[-1], config.tower_mlp, tasks, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = [self.beside(dense, pooled)] * (self.count + 1)
        for level in self.levels:
            inputs = level(inputs)
        return self.towers(inputs)


class Level(nn.Module):
    """Task k is given Σₑ softmax(Wₖ xₖ)ₑ · expert e of its own experts, which read xₖ, and the shared ones,
    which read x of all; all are given the same of every expert, weighted by softmax(W x), but at the last
    level (equations 4 to 7).

    Args:
        inputs: width of what it reads. tasks: how many. last: whether there is nothing for all.

    Returns (forward):
        Of xₖ of each task and x of all, float [B, inputs] each: float [B, expert_mlp[-1]], likewise.
    """

    def __init__(self, inputs: int, tasks: int, config: PLESection, last: bool):
        super().__init__()
        own, shared = config.task_experts, config.shared_experts
        counts = [own] * tasks + [shared]
        self.experts = nn.ModuleList(
            Experts(count, inputs, config.expert_mlp, config.dropout) for count in counts
        )
        read = [own + shared] * tasks + [sum(counts)] * (not last)
        self.gates = nn.ModuleList(Gate(inputs, count) for count in read)

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        *own, shared_BEM = (experts(x_BN) for experts, x_BN in zip(self.experts, inputs, strict=True))
        read = [torch.cat([of_task_BEM, shared_BEM], dim=1) for of_task_BEM in own]
        read.append(torch.cat([*own, shared_BEM], dim=1))
        # Without a gate for all, zip leaves the last of both out.
        return [gate(x_BN, experts) for gate, x_BN, experts in zip(self.gates, inputs, read, strict=False)]
