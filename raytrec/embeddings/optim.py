"""Combine the optimizers of a run, clip gradients, and average dense weights.

FBGEMM's fused kernels update tables during backward; other weights are updated after backward.
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
from raytrec.compat.torchrec_ import iterate_sharded_kernels, iterate_wrappers
from raytrec.config.tables import DenseOptim, EmbeddingOptim
from raytrec.embeddings.optimizers import find_optimizer
from raytrec.embeddings.pooling import Collection, find_table_modules, find_table_name
from raytrec.embeddings.tables import tables
from raytrec.embeddings.taps import sum_squared_row_gradients


def _make_settings(config: EmbeddingOptim | DenseOptim) -> dict:
    if isinstance(config, DenseOptim):
        return {"lr": config.lr} | config.settings
    return {"lr": config.lr} | {key: getattr(config, key) for key in find_optimizer(config.name).settings}


def mark_fused(collections: Iterable[Collection], optimizers: Mapping[str, EmbeddingOptim], device: str) -> None:
    """Mark the tables for whose optimizer FBGEMM has a fused kernel on the device. Call before sharding.

    TorchRec (1.8.0, group_tables) then puts tables into one lookup only if they have the same optimizer settings,
    collection, sharding type, kernel and dtype.

    Args:
        collections: Collections of PooledEmbeddings.
        optimizers: Optimizer of every table (constraints.resolve_optimizers).
        device: cpu or cuda.
    """
    for collection in collections:
        for table, module in find_table_modules(collection).items():
            optimizer = find_optimizer(optimizers[table].name)
            if device in optimizer.devices:
                # No weight decay: validation.check_decay rejects weight decay for these kernels.
                settings = _make_settings(optimizers[table])
                apply_optimizer_in_backward(optimizer.torch_class(), module.parameters(), settings)


class RunOptimizer(CombinedOptimizer):
    """Optimizer that combines all optimizers of a run.

    Attributes:
        names: Table → name of its optimizer in the configuration, such as rowwise_adagrad.
    """

    def __init__(self, parts: list[tuple[str, KeyedOptimizer]], names: dict[str, str]):
        super().__init__(parts)
        self.names = names


def combine_optimizers(
    model: nn.Module, optimizers: Mapping[str, EmbeddingOptim], dense_config: DenseOptim
) -> RunOptimizer:
    """Return one optimizer for all weights of a sharded model.

    The result combines the fused optimizers, the dense layers' optimizer, and one optimizer for each distinct
    EmbeddingOptim of tables that are not updated in backward. Such tables are data-parallel, have a dense
    kernel, or have an optimizer without a fused kernel on this device.

    Args:
        model: DistributedModelParallel.
        optimizers: Optimizer of every table (constraints.resolve_optimizers).
        dense_config: Optimizer of the dense layers.
    """
    # A row-wise table with fewer rows than ranks has empty shards on some ranks, with nothing to train.
    rest = {n: p for n, p in in_backward_optimizer_filter(model.named_parameters()) if p.numel()}
    parts = [("fused", model.fused_optimizer)]
    configs = list(optimizers.values())
    for optimizer in [config for i, config in enumerate(configs) if config not in configs[:i]]:
        weights = {n: p for n, p in rest.items() if (table := find_table_name(n)) and optimizers[table] == optimizer}
        if weights:
            parts.append(
                ("tables", _make_keyed_optimizer(weights, optimizer, **_choose_one_pass(optimizer, weights.values())))
            )
    if dense := {name: p for name, p in rest.items() if not find_table_name(name)}:
        parts.append(("dense", _make_keyed_optimizer(dense, dense_config, fused=choose_fused_option(dense.values()))))
    return RunOptimizer(parts, {table: optimizer.name for table, optimizer in optimizers.items()})


def choose_fused_option(weights: Iterable[torch.Tensor]) -> bool | None:
    """Return the value of a torch optimizer's option `fused`: True if all weights are on GPUs, else None.

    With True, torch updates many weights with one kernel. With None, an update takes several operations. Without
    weights, the result is True.
    """
    return all(weight.is_cuda for weight in weights) or None


def _choose_one_pass(config: EmbeddingOptim, weights: Iterable[torch.Tensor]) -> dict[str, bool]:
    """Return {"fused": True}, with which torch updates tables on CPU in one pass, or {} if unsupported.

    The option is supported for float32 tables on CPU if the torch class has it and FBGEMM has no CPU kernel for the
    optimizer. One pass reads and writes weights, gradients and state together; otherwise, Adam takes 6 passes.
    """
    optimizer = find_optimizer(config.name)
    is_supported = "cpu" not in optimizer.devices and "fused" in signature(optimizer.torch_class()).parameters
    fits = all(weight.is_cpu and weight.dtype == torch.float32 for weight in weights)
    return {"fused": True} if is_supported and fits else {}


def _make_keyed_optimizer(
    parameters: dict[str, nn.Parameter], config: EmbeddingOptim | DenseOptim, **options: Any
) -> KeyedOptimizerWrapper:
    settings = _make_settings(config) | {"weight_decay": config.weight_decay} | options
    optimizer_class = find_optimizer(config.name).torch_class()
    return KeyedOptimizerWrapper(parameters, lambda params: optimizer_class(params, **settings))


@dataclass
class _LookupCut:
    """Lookup of one step, at whose output GlobalNormClip cuts the autograd graph.

    Attributes:
        kernel: Module of the lookup.
        features: Ids that were looked up.
        output: Output of the lookup, from which the second backward starts.
        leaf: Detached output, which shares its memory; the rest of the model reads it and gives it a gradient.
    """

    kernel: nn.Module
    features: KeyedJaggedTensor
    output: torch.Tensor
    leaf: torch.Tensor


class GlobalNormClip(OptimizerWrapper):
    """Optimizer wrapper that scales the whole gradient to an L2 norm of at most `max_norm` before each step.

    The factor is min(1, max_norm ÷ (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_. norm² sums squares
    over dense parameters, data-parallel tables and the looked-up rows of all sharded tables. Dense parameters
    and data-parallel tables count once rather than once per rank. Each looked-up row counts once, with its
    gradient summed over the global batch.

    Tables that FBGEMM updates in backward have no gradient, and clipping must precede that backward. The
    graph is therefore cut at the output of each rank's lookups. Backward ends there, with the gradients of
    the whole global batch for this rank's shards. These gradients and the ids determine the gradient of each
    looked-up row. Its squared norm is added to that of the dense layers. A second backward then passes the
    scaled gradients to the tables. This procedure works for every sharding type and kernel.

    Args:
        optimizer: Optimizer of all weights (`combine_optimizers`).
        model: DistributedModelParallel; the constructor adds hooks that cut the graph while gradients are recorded.
        max_norm: Maximum L2 norm of the gradient.
        with_tables: False to measure and scale only the gradient of the dense layers.

    Attributes:
        last_norm: L2 norm of the last gradient before scaling, a float64 scalar on the model's device; None
            before the first step.
    """

    def __init__(
        self, optimizer: KeyedOptimizer, model: DistributedModelParallel, max_norm: float, with_tables: bool = True
    ):
        super().__init__(optimizer)
        self.max_norm = max_norm
        self.last_norm: torch.Tensor | None = None
        self._device = model.device
        self._cuts: list[_LookupCut] = []
        # Every rank has a copy of dense parameters and data-parallel tables, with the same gradient.
        copies = {name for name, table in tables(model).items() if with_tables and table.weight.replicated}
        self._replicated = [p for name, p in model.named_parameters() if find_table_name(name) in {None, *copies}]
        for kernel in iterate_sharded_kernels(model) if with_tables else ():
            kernel.register_forward_hook(self._cut)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Reset the gradients, and discard the lookups at which the graph was cut since the last step."""
        self._cuts.clear()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Clip the gradient, run the second backward into the tables, and update all weights.

        This is a collective operation: every rank must call it. If the norm is not finite, gradients become 0 or NaN.
        """
        gradients = [p.grad for p in self._replicated if p.grad is not None]
        shards = torch.zeros((), dtype=torch.float64, device=self._device)
        cuts = [cut for cut in self._cuts if cut.leaf.grad is not None]
        for cut in cuts:
            shards += sum_squared_row_gradients(cut.kernel, cut.features, cut.leaf.grad)
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
        self._cuts.append(_LookupCut(kernel, inputs[0], output, leaf))
        return leaf


class DenseAverage(OptimizerWrapper):
    """Optimizer wrapper that keeps an exponential moving average of the dense weights.

    Tables are not averaged, because averaging would require a copy of each table.
    With decay d and the weights w₁ … w_t after each of t steps, the average is

        Σ d^(t−i) · w_i ÷ Σ d^(t−i)        over i = 1 … t

    The initial weights therefore never contribute. Steps that worker.nonfinite.SkipNonfiniteOptimizer, which
    wraps this optimizer, skips are not counted.

    Args:
        optimizer: Optimizer of all weights (`combine_optimizers`), possibly wrapped for clipping.
        model: DistributedModelParallel.
        decay: Decay d, between 0 and 1 (both excluded).

    Attributes:
        values: Name of a floating-point dense parameter → average (before the first step: initial value), on the
            parameter's device; the same on all ranks.
        count: Number of steps t, a float32 scalar tensor in host memory.
    """

    def __init__(self, optimizer: KeyedOptimizer, model: DistributedModelParallel, decay: float):
        super().__init__(optimizer)
        self._decay = decay
        self._weights = {
            name: weight.detach()
            for name, weight in model.named_parameters()
            if find_table_name(name) is None and weight.is_floating_point()
        }
        self.values = {name: weight.clone() for name, weight in self._weights.items()}
        self.count = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the weights, then the averages."""
        super().step(closure)
        self.count += 1
        share = (1 - self._decay) / (1 - self._decay ** int(self.count))  # of the current weights
        get_ema_multi_avg_fn(1 - share)([*self.values.values()], [*self._weights.values()], None)

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Replace the dense weights with their averages inside the `with` block; before the first step, do nothing.

        Weights that the block changes are reset to their values before the block.
        """
        if not self.count:
            yield
            return
        saved = {name: weight.clone() for name, weight in self._weights.items()}
        self._write(self.values)
        try:
            yield
        finally:
            self._write(saved)

    @torch.no_grad()
    def _write(self, values: dict[str, torch.Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])


def find_dense_average(optimizer: KeyedOptimizer) -> DenseAverage | None:
    """Return the DenseAverage among an optimizer's wrappers, or None if there is none."""
    return next((layer for layer in iterate_wrappers(optimizer) if isinstance(layer, DenseAverage)), None)
