"""Layers of models with several tasks: experts, gates, and each task's own tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from raytrec.models.inputs import mlp


class TaskTowers(nn.Module):
    """An MLP with a linear last layer for each task, which nobody else reads.

    Args:
        inputs: width of what each tower reads. sizes: hidden sizes.
        tasks: task → its columns of logits.

    Returns (forward):
        Of one float [B, inputs] for each task: float32 [B, columns of all tasks]; [B] of one column.
    """

    def __init__(self, inputs: int, sizes: list[int], tasks: Mapping[str, int], dropout: float):
        super().__init__()
        # Tasks are no names of modules: they may be called as methods of nn.Module are.
        self.towers = nn.ModuleList(mlp([inputs, *sizes], dropout) for _ in tasks)
        last = (sizes or [inputs])[-1]
        self.logits = nn.ModuleList(nn.Linear(last, columns) for columns in tasks.values())

    def forward(self, of_tasks: Sequence[torch.Tensor]) -> torch.Tensor:
        layers = zip(self.towers, self.logits, of_tasks, strict=True)
        return torch.cat([logit(tower(x_BN)) for tower, logit, x_BN in layers], dim=1).squeeze(1)


class Experts(nn.Module):
    """Equal MLPs over one input: float [B, inputs] → [B, count, sizes[-1]]."""

    def __init__(self, count: int, inputs: int, sizes: list[int], dropout: float):
        super().__init__()
        self.experts = nn.ModuleList(mlp([inputs, *sizes], dropout) for _ in range(count))

    def forward(self, x_BN: torch.Tensor) -> torch.Tensor:
        return torch.stack([expert(x_BN) for expert in self.experts], dim=1)


class Gate(nn.Module):
    """Σₑ softmax(W x)ₑ · expert e: a mean of experts, weighted by what x says.

    Args:
        inputs: width of x. experts: how many there are.
    """

    def __init__(self, inputs: int, experts: int):
        super().__init__()
        self.scores = nn.Linear(inputs, experts, bias=False)

    def forward(self, x_BN: torch.Tensor, experts_BEM: torch.Tensor) -> torch.Tensor:
        """float [B, inputs] and [B, experts, M] → [B, M]."""
        weights_BE = self.scores(x_BN).softmax(dim=1)
        return torch.einsum("be,bem->bm", weights_BE, experts_BEM)
