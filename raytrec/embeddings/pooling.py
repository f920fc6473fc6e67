"""Pooled embeddings: mean = global sum ÷ global bag length, whatever the sharding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from raytrec.common.errors import RunError
from raytrec.compat.torch_ import FixedDtype
from raytrec.compat.torchrec_ import is_pipelined
from raytrec.config.schema import Schema
from raytrec.embeddings.bags import embedding_bags


class PooledEmbeddings(FixedDtype):
    """Looks every sparse feature up and pools its bag.

    Sequence features give the mean of their bag; those that a model reads id by id are looked up as features
    of one id each (raytrec/config/features.py).

    Args:
        schema: the features, their pooling and their tables.
        dtypes: table → fp32 or fp16; default: all fp32. They are fixed: a cast later would part what is
            read from what is trained, so `.to(dtype)`, `.half()`, `.bfloat16()` and the like raise.

    Returns (forward):
        dict of feature → float32 [B, dim of its table]. With bag ids i and weights wᵢ (1 when there are
        none): sum is Σ wᵢ·eᵢ, mean is Σ wᵢ·eᵢ ÷ Σ wᵢ, and an empty bag (or Σ wᵢ = 0) is 0.
    """

    def __init__(self, schema: Schema, dtypes: dict[str, str] | None = None):
        super().__init__()
        self.bags = embedding_bags(schema, dtypes)
        self._dtypes = {table.dtype for table in self.bags.parameters()}
        self.means = BagMeans([spec.pooling != "sum" for spec in schema.sparse.values()])

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        # TorchRec's pipeline traces this with a Proxy, and later has exchanged copies of the ids before.
        if is_pipelined(self.bags, sparse):
            return self.means(self.bags(sparse), sparse)
        return self.means(self.bags(own_copy(sparse)), sparse)

    def before_cast(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        refuse_cast(fn, self._dtypes)


def own_copy(sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A copy for FBGEMM and TorchRec to change: they clamp ids in place, and put other weights into it."""
    weights = sparse.weights_or_none()
    return KeyedJaggedTensor(
        sparse.keys(),
        sparse.values().clone(),
        None if weights is None else weights.clone(),
        lengths=sparse.lengths(),
        stride=sparse.stride(),
        length_per_key=sparse.length_per_key_or_none(),  # else TorchRec reads it from the device
    )


def refuse_cast(fn: Callable, dtypes: set[torch.dtype]) -> None:
    """Raises if a function that nn.Module applies to its tensors would change one of these dtypes of tables.

    Raises:
        RunError: says what to do instead.
    """
    for dtype in dtypes:
        after = fn(torch.empty(0, dtype=dtype)).dtype
        if after != dtype:
            raise RunError(
                f"a cast of embedding tables from {dtype} to {after}",
                where="model.to(dtype), .float(), .half(), .bfloat16(), .double() or .type(dtype)",
                expected="a dtype chosen before sharding: a cast parts what is read from what is trained",
                do="set plan.tables.TABLE.dtype to fp32 or fp16; cast dense layers by themselves",
            )


class BagMeans(nn.Module):
    """Turns the sums of mean-pooled features into means.

    It divides after the sharded lookup, where the sum is already global: that is exact in value and gradient
    for every sharding type. It is a module of its own so that TorchRec's pipeline, which traces the model to
    find sharded modules, takes it as one step.

    Args:
        is_mean: for each key of the KeyedJaggedTensor, in its order, whether its bags are averaged.
    """

    def __init__(self, is_mean: list[bool]):
        super().__init__()
        self.is_mean = is_mean

    def forward(self, sums: KeyedTensor, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        pooled = sums.to_dict()
        if not any(self.is_mean):
            return pooled
        totals_FB = bag_totals(sparse)
        for index, feature in enumerate(sparse.keys()):
            if self.is_mean[index]:
                pooled[feature] = pooled[feature] / totals_FB[index].unsqueeze(1)
        return pooled


def bag_totals(sparse: KeyedJaggedTensor) -> torch.Tensor:
    """Σ wᵢ of each bag (its length when there are no weights), 1 where that is 0: float32 [F, B]."""
    lengths = sparse.lengths()
    weights = sparse.weights_or_none()
    if weights is None:
        return lengths.clamp(min=1).float().view(len(sparse.keys()), -1)
    totals = torch.segment_reduce(weights, "sum", lengths=lengths.long(), unsafe=True)
    return torch.where(totals == 0, 1.0, totals).view(len(sparse.keys()), -1)
