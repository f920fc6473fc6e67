"""A run's optimizers, clipping, and averages of dense weights. Tables are updated in backward (fused), dense
layers after it.

Tables that are updated in backward are fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.compat.torch_ import apply_optimizer_in_backward, multiply_
from raytrec.compat.torchrec_ import layers, sharded_kernels
from raytrec.config.tables import DenseOptim, EmbeddingOptim
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.embeddings.pooling import Collection, table_of, tables_in
from raytrec.embeddings.tables import tables
from raytrec.embeddings.taps import row_gradients_squared


def _settings(config: EmbeddingOptim | DenseOptim) -> dict:
    return {"lr": config.lr} | {key: getattr(config, key) for key in optimizer_of(config.name).settings}


def fuse(collections: Iterable[Collection], optimizers: Mapping[str, EmbeddingOptim], device: str) -> None:
    """Marks the tables, before sharding, to be updated in backward, where there is a kernel for that.

    TorchRec (1.8.0, group_tables) then puts tables of one collection, optimizer and learning rate into one
    kernel.

    Args:
        collections: PooledEmbeddings.collections.
        optimizers: of every table (constraints.table_optimizers).
        device: cpu or cuda.
    """
    for collection in collections:
        for table, module in tables_in(collection).items():
            known = optimizer_of(optimizers[table].name)
            if device in known.devices:
                # No weight decay: validation.check_decay has refused it for these kernels.
                settings = _settings(optimizers[table])
                apply_optimizer_in_backward(known.torch_class(), module.parameters(), settings)


class RunOptimizer(CombinedOptimizer):
    """Every optimizer of a run as one.

    Attributes:
        names: table → the name of its optimizer in the configuration.
    """

    def __init__(self, parts: list[tuple[str, KeyedOptimizer]], names: dict[str, str]):
        super().__init__(parts)
        self.names = names


def combine(model: nn.Module, optimizers: Mapping[str, EmbeddingOptim], of_dense: DenseOptim) -> RunOptimizer:
    """One optimizer over everything, after sharding.

    It holds the fused ones, one for each optimizer and learning rate of tables that are not updated in
    backward (data-parallel ones, those with a dense kernel, those of an optimizer without a kernel), and the
    dense layers' one.

    Args:
        model: the DistributedModelParallel.
        optimizers: of every table (constraints.table_optimizers).
        of_dense: of the dense layers.
    """
    # A row-wise table with fewer rows than ranks leaves some ranks an empty shard, with nothing to train.
    rest = {n: p for n, p in in_backward_optimizer_filter(model.named_parameters()) if p.numel()}
    parts = [("fused", model.fused_optimizer)]
    every = list(optimizers.values())
    for optimizer in [each for i, each in enumerate(every) if each not in every[:i]]:
        weights = {n: p for n, p in rest.items() if (table := table_of(n)) and optimizers[table] == optimizer}
        if weights:
            parts.append(("tables", _wrap(weights, optimizer, **_in_one_pass(optimizer, weights.values()))))
    if dense := {name: p for name, p in rest.items() if not table_of(name)}:
        parts.append(("dense", _wrap(dense, of_dense, fused=in_one_kernel(dense.values()))))
    return RunOptimizer(parts, {table: optimizer.name for table, optimizer in optimizers.items()})


def in_one_kernel(weights: Iterable[torch.Tensor]) -> bool | None:
    """Whether one kernel updates all of these weights: on GPUs, where there are several for each otherwise.
    None: as torch chooses."""
    return all(weight.is_cuda for weight in weights) or None


def _in_one_pass(config: EmbeddingOptim, weights: Iterable[torch.Tensor]) -> dict[str, bool]:
    """What has torch update tables on CPU in one pass over weights, gradients and state, instead of Adam's 6,
    where FBGEMM has no kernel there for them, however large they are."""
    known = optimizer_of(config.name)
    takes_it = "cpu" not in known.devices and "fused" in signature(known.torch_class()).parameters
    fits = all(weight.is_cpu and weight.dtype == torch.float32 for weight in weights)
    return {"fused": True} if takes_it and fits else {}


def _wrap(
    parameters: dict[str, nn.Parameter], config: EmbeddingOptim | DenseOptim, **more: Any
) -> KeyedOptimizerWrapper:
    settings = _settings(config) | {"weight_decay": config.weight_decay} | more
    make = optimizer_of(config.name).torch_class()
    return KeyedOptimizerWrapper(parameters, lambda params: make(params, **settings))


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
    sharded tables (each once, its gradient being the sum over the global batch).

    Tables that FBGEMM updates in backward have no gradient, and clipping them must come before that backward.
    So the graph is cut where a rank's lookup hands its embeddings on: backward ends there, with the gradients
    of the whole global batch for this rank's shards. From them and the ids follows the gradient of each
    touched row; its norm joins that of the dense layers; then the cut gradients, scaled, enter the tables.
    This works for every way of sharding and every kernel.

    Args:
        optimizer: steps everything (optim.combine).
        model: the DistributedModelParallel; its lookups are cut from now on while gradients are recorded.
        max_norm: the largest norm.

    Attributes:
        last_norm: of the last gradient before it was scaled: float64 scalar on the device; None before the
            first step.
    """

    def __init__(self, optimizer: KeyedOptimizer, model: DistributedModelParallel, max_norm: float):
        super().__init__(optimizer)
        self.max_norm = max_norm
        self.last_norm: torch.Tensor | None = None
        self._device = model.device
        self._cuts: list[_Cut] = []
        # Of dense parameters and data-parallel tables every rank holds a copy, with the same gradient.
        copies = {name for name, table in tables(model).items() if table.weight.replicated}
        self._replicated = [p for name, p in model.named_parameters() if table_of(name) in {None, *copies}]
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


class DenseAverage(OptimizerWrapper):
    """Keeps the exponential moving average of the dense weights. (Of tables it would be a copy of each.)

    With decay d and the weights w₁ … w_t after each step it is

        Σ d^(t−i) · w_i ÷ Σ d^(t−i)        over i = 1 … t

    so that the initial weights have no part in it, however few steps there were. A step that is skipped
    (worker.nonfinite.SkipBad, which is outside of this) does not count.

    Args:
        optimizer: steps everything (optim.combine, perhaps clipped).
        model: the DistributedModelParallel.
        decay: d, between 0 and 1.

    Attributes:
        values: parameter of the dense layers → its average, on its device; the same on all ranks.
        count: t, as float32 scalar in host memory.
    """

    def __init__(self, optimizer: KeyedOptimizer, model: DistributedModelParallel, decay: float):
        super().__init__(optimizer)
        self._decay = decay
        self._weights = {
            name: weight.detach()
            for name, weight in model.named_parameters()
            if table_of(name) is None and weight.is_floating_point()
        }
        self.values = {name: weight.clone() for name, weight in self._weights.items()}
        self.count = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.count += 1
        share = (1 - self._decay) / (1 - self._decay ** int(self.count))  # of these weights in the average
        get_ema_multi_avg_fn(1 - share)([*self.values.values()], [*self._weights.values()], None)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A block in which the model has the averages in the place of its dense weights."""
        if not self.count:
            yield
            return
        before = {name: weight.clone() for name, weight in self._weights.items()}
        self._write(self.values)
        try:
            yield
        finally:
            self._write(before)

    @torch.no_grad()
    def _write(self, values: dict[str, torch.Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])


def average_of(optimizer: KeyedOptimizer) -> DenseAverage | None:
    """The one among an optimizer's wrappers, if it has one."""
    return next((layer for layer in layers(optimizer) if isinstance(layer, DenseAverage)), None)
