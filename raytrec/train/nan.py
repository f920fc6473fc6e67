"""Losses that are not finite numbers: steps left out, batches kept to look at."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.data.batch import Batch
from raytrec.schema import Schema

FOLDER = "nan"
KEPT = 6  # batches: the pipeline has read two ahead, and bad losses are heard of up to two steps later


def bad_anywhere(loss: torch.Tensor) -> bool:
    """Whether the loss of any rank is not finite; a collective that is waited for."""
    bad = (~torch.isfinite(loss.detach())).float()
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    return bool(bad)


class Gate(torch.autograd.Function):
    """The values themselves; their gradient, unless the step is left out, in which case zeros.

    A zero loss would not do: 0 × NaN is NaN on the way back.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, head: nn.Module) -> torch.Tensor:
        ctx.head = head
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (torch.zeros_like(grad) if ctx.head.left_out else grad), None


class SkipBad(OptimizerWrapper):
    """An optimizer that does nothing at the end of a step that is left out.

    Tables that are updated in backward have got zero gradients, which change nothing under SGD and Adagrad;
    under fused Adam (on GPUs) their momentum moves on.
    """

    def __init__(self, optimizer: KeyedOptimizer, head: nn.Module):
        super().__init__(optimizer)
        self._head = head

    def step(self, closure: Any = None) -> None:
        if not self._head.left_out:
            super().step(closure)


class Recent:
    """An iterator over batches that remembers the last few, with their steps.

    Args:
        first_step: of the first batch.
    """

    def __init__(self, batches: Iterator[Batch], first_step: int):
        self._batches, self._step = batches, first_step
        self._kept: deque[tuple[int, Batch]] = deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._kept.append((self._step, batch))
        self._step += 1
        return batch

    def at(self, step: int) -> Batch | None:
        """The batch of a step, if it is still known."""
        return dict(self._kept).get(step)


def dump(batch: Batch, schema: Schema, folder: str, step: int, rank: int) -> str:
    """Writes a rank's part of a batch as Parquet, in the columns of the schema; its path.

    Ids are those that the tables see, after hashing and clamping; padded rows are left out.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    batch = batch.to(torch.device("cpu"))
    real = batch.weights > 0
    columns: dict[str, Any] = {n: batch.labels[real, i].numpy() for i, n in enumerate(schema.labels)}
    columns |= {name: batch.dense[real, i].numpy() for i, name in enumerate(schema.dense)}
    for name in schema.sparse:
        rows = [ids for ids, good in zip(_ids(batch.sparse, name), real.tolist(), strict=True) if good]
        columns[name] = pa.array(rows, pa.list_(pa.int64()))
    place = Path(folder) / FOLDER / f"step-{step:010d}-rank-{rank}.parquet"
    place.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), place)
    return str(place)


def _ids(sparse: KeyedJaggedTensor, feature: str) -> list[list[int]]:
    """The ids of each row; those of a sequence that was looked up id by id with the oldest first again."""
    out: list[list[int]] = [[] for _ in range(sparse.stride())]
    for key in reversed([k for k in sparse.to_dict() if feature in (k, k.rpartition("@")[0])]):
        ids, ends = sparse[key].values().tolist(), sparse[key].lengths().cumsum(0).tolist()
        for row, start, end in zip(out, [0, *ends[:-1]], ends, strict=True):
            row += ids[start:end]
    return out
