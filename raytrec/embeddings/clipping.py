"""Clipping by the global norm: one L2 norm over the gradients of all dense layers and all tables.

Tables that FBGEMM updates in backward have no gradient to look at, and clipping them must come before that
backward. So the graph is cut where a rank's lookup hands its embeddings on: backward ends there, with the
gradients of the whole global batch for this rank's shards. From them and the ids follows the gradient of each
touched row; its norm joins that of the dense layers; then the cut gradients, scaled, enter the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.compat.torch_ import multiply_
from raytrec.compat.torchrec_ import sharded_kernels
from raytrec.embeddings.bags import table_of
from raytrec.embeddings.row_gradients import row_gradients_squared
from raytrec.embeddings.tables import tables


@dataclass
class _Cut:
    """One lookup of one step: what went in, what came out, and the leaf that took its place downstream."""

    kernel: nn.Module
    features: KeyedJaggedTensor
    output: torch.Tensor
    leaf: torch.Tensor


class GlobalNormClip(OptimizerWrapper):
    """Scales the whole gradient so that its L2 norm is at most `max_norm`, then steps.

    The factor is min(1, max_norm ÷ (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_, and norm² is the sum
    over dense parameters and data-parallel tables (once, not once a rank) and over the touched rows of all
    sharded tables (each once, its gradient being the sum over the global batch). It works for every way of
    sharding and every kernel, because it takes the gradients before the kernel does.

    Args:
        optimizer: steps everything (optim.combine).
        model: the DistributedModelParallel; its lookups are cut from now on while gradients are recorded.
        max_norm: the largest norm.

    Attributes:
        last_norm: of the last gradient before it was scaled: float64 scalar on the device, which nobody
            waits for; None before the first step.
    """

    def __init__(self, optimizer: KeyedOptimizer, model: DistributedModelParallel, max_norm: float):
        super().__init__(optimizer)
        self.max_norm = max_norm
        self.last_norm: torch.Tensor | None = None
        self._device = model.device
        self._cuts: list[_Cut] = []
        self._replicated = replicated_parameters(model)
        for kernel in sharded_kernels(model):
            kernel.register_forward_hook(self._cut)

    def zero_grad(self, set_to_none: bool = False) -> None:
        self._cuts.clear()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for p in self._replicated if p.grad is not None]
        shards = torch.zeros((), dtype=torch.float64, device=self._device)
        cuts = [cut for cut in self._cuts if cut.leaf.grad is not None]
        for cut in cuts:
            shards += row_gradients_squared(cut.kernel, cut.features, cut.leaf.grad)
        dist.all_reduce(shards)
        norm = (shards + sum(g.double().square().sum() for g in gradients)).sqrt()
        scale = (self.max_norm / (norm + 1e-6)).clamp(max=1).float()
        multiply_(gradients, scale)
        with torch.enable_grad():
            torch.autograd.backward([c.output for c in cuts], [c.leaf.grad * scale for c in cuts])
        self._cuts.clear()
        self.last_norm = norm
        super().step(closure)

    def _cut(self, kernel: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor | None:
        if not (torch.is_grad_enabled() and output.requires_grad):
            return None
        leaf = output.detach().requires_grad_()
        self._cuts.append(_Cut(kernel, inputs[0], output, leaf))
        return leaf


def replicated_parameters(model: DistributedModelParallel) -> list[nn.Parameter]:
    """Dense parameters and data-parallel tables: every rank holds a copy, with the same gradient."""
    copies = {name for name, table in tables(model).items() if table.weight.replicated}
    return [p for name, p in model.named_parameters() if table_of(name) in {None, *copies}]
