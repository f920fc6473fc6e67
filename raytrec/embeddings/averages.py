"""Averages of the dense weights over steps. (Not of tables: that would be another copy of each.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

from raytrec.compat.torchrec_ import layers
from raytrec.embeddings.bags import table_of


class DenseAverage(OptimizerWrapper):
    """Keeps the exponential moving average of the dense weights beside them.

    With decay d and the weights w₁ … w_t after each step it is

        Σ d^(t−i) · w_i ÷ Σ d^(t−i)        over i = 1 … t

    so that the initial weights have no part in it, however few steps there were. A step that is skipped
    (nonfinite.SkipBad, which is outside of this) does not count.

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
