"""Batches of recent steps, and their dumps to Parquet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.worker.nonfinite import LATE

NAN_FOLDER = "nan"
TASK_WEIGHTS = "task_weights"  # the column of each row's factors
# Batches. A bad loss is known at most LATE steps later, and acted on one step after that, or two
# (StepConsensus.lag); by then a pipeline has read up to three batches more.
KEPT = LATE + 6


class RecentBatches:
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


def dump(
    batch: Batch, schema: Schema, folder: str, step: int, rank: int, sequences: Collection[str] = ()
) -> str:
    """Writes a rank's part of a batch as Parquet, in the columns of the schema; its path.

    Ids are those that the tables see, after hashing and clamping; padded rows are skipped. Where tasks weigh
    rows, `task_weights` holds each row's factor in each task.

    Args:
        sequences: features that are looked up id by id, the most recent one first.
    """
    batch = batch.to(torch.device("cpu"))
    real = batch.weights > 0
    beside = iter([] if batch.dense_of_candidates is None else batch.dense_of_candidates.unbind(1))
    columns: dict[str, Any] = {n: _values(batch, batch.labels[:, i]) for i, n in enumerate(schema.labels)}
    for i, name in enumerate(schema.dense):
        of_candidates = name in schema.candidates
        columns[name] = _values(batch, next(beside)) if of_candidates else batch.dense[real, i].numpy()
    if batch.task_weights is not None:  # a label of factor 0 may be none
        columns[TASK_WEIGHTS] = _values(batch, batch.task_weights)
    for name in schema.sparse:
        rows = [ids for ids, good in zip(_ids(batch.sparse, name), real.tolist(), strict=True) if good]
        if name in sequences:  # the oldest first again
            rows = [ids[::-1] for ids in rows]
        columns[name] = pa.array(rows, pa.list_(pa.int64()))
    place = Path(folder) / NAN_FOLDER / f"step-{step:010d}-rank-{rank}.parquet"
    place.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), place)
    return str(place)


def _values(batch: Batch, values: torch.Tensor) -> list:
    """Of each row that there is, its part of [B, ...]; of requests a list of their candidates' [N, ...]."""
    if batch.requests is None:
        return list(values[batch.weights > 0].numpy())
    of_rows = values.split(torch.bincount(batch.requests, minlength=len(batch.weights)).tolist())
    return [list(row.numpy()) for row, there in zip(of_rows, batch.weights > 0, strict=True) if there]


def _ids(sparse: KeyedJaggedTensor, feature: str) -> list[list[int]]:
    """The ids of each row."""
    ids, ends = sparse[feature].values().tolist(), sparse[feature].lengths().cumsum(0).tolist()
    return [ids[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
