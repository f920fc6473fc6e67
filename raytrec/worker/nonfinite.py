"""Detect NaN or infinite losses; skip such steps, or record their batches and advise the user."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

from raytrec.checkpoint.files import get_step_folder
from raytrec.checkpoint.save import NonfiniteStateError
from raytrec.common.errors import RunError, get_first_line
from raytrec.common.storage import quote_for_shell
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch

MAX_STEPS_IN_FLIGHT = 2  # steps that the host may be ahead of a GPU, to keep it busy with few batches in flight
# Number of batches kept. A bad loss is known at most two steps later, and ranks act on it one or two steps
# after that (StepConsensus.lag). By then, the pipeline has read up to three more batches.
MAX_RECENT_BATCHES = MAX_STEPS_IN_FLIGHT + 6
NAN_FOLDER = "nan"
TASK_WEIGHTS_COLUMN = "task_weights"  # column with the factors of each row


class AsyncHostCopy:
    """Asynchronous copy of a tensor's current values to host memory.

    On CPU, the tensor itself is used. On a GPU, the values are copied to pinned memory after all work that is already
    queued on the current stream. Work queued later does not delay the copy.

    Args:
        values: Tensor of any shape and dtype; on CPU, it must not be modified before it has been read.
    """

    def __init__(self, values: torch.Tensor):
        self._values, self._event = values.detach(), None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = pinned.copy_(values.detach(), non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # waiting threads sleep, because readers need the core
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Return True if `wait` would return immediately; can be called from any thread."""
        event = self._event
        return event is None or event.query()

    def wait(self) -> torch.Tensor:
        """Wait for the copy, and return the values in host memory."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


class LossStatus(NamedTuple):
    """Status of this rank's losses that have already been copied to the host.

    Attributes:
        through: Last step, counted from 1 over the run, up to which all losses have been checked.
        bad: First step whose loss was not finite; None if all losses up to `through` are finite.
    """

    through: int
    bad: int | None


class LossMonitor:
    """Monitor that checks whether this rank's losses are finite.

    On CPU, the result is known immediately. A GPU computes losses later than the host requests them. The host
    only waits if it is more than two steps ahead; the GPU then still has work for two steps.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[int, AsyncHostCopy]] = deque()
        self._status = LossStatus(0, None)

    def add(self, step: int, loss: torch.Tensor) -> None:
        """Start checking a step's loss, a scalar tensor; steps are counted from 1 and added in order."""
        if not self._pending:
            self._status = self._status._replace(through=step - 1)
        self._pending.append((step, AsyncHostCopy(~torch.isfinite(loss))))

    def poll_status(self, wait: bool = False) -> LossStatus:
        """Return the current status, which includes at least all steps except the last two.

        If `wait` is True, the status includes all steps.
        """
        pending = self._pending
        while pending and (wait or len(pending) > MAX_STEPS_IN_FLIGHT or pending[0][1].arrived):
            step, is_bad = pending[0]
            bad = self._status.bad
            self._status = LossStatus(step, step if is_bad.wait() and bad is None else bad)
            pending.popleft()  # only after the wait, so that `unfinished` returns this step during the wait
        return self._status

    @property
    def unfinished(self) -> int | None:
        """Return the first added step that the device has not finished, or None; can be called from any thread."""
        return next((step for step, bad in list(self._pending) if not bad.arrived), None)


class SkipNonfiniteOptimizer(OptimizerWrapper):
    """Optimizer wrapper that skips steps whose loss is NaN or infinite on at least one rank (train.on_nan: skip).

    Tables that are updated in backward get zero gradients, which change nothing with SGD and Adagrad. Fused Adam (on
    GPUs) still updates these tables from its momentum. (Setting the loss to 0 would not suffice, because 0 × NaN is
    NaN in backward.)

    Even on GPUs, the host decides whether to step. With a zero gradient, Adam would still count the step, on
    which its bias corrections depend, and decay its momentum (torch 2.13.0, optim/adam.py).

    Gradients are masked on the device, which knows of a bad loss before the host, so the backward pass can be
    launched immediately. When the host reads the result, it only waits for the forward pass.

    Args:
        optimizer: Optimizer of the tables and dense layers.
        head: Module that maps (pooled embeddings, batch) to (loss, StepOutputs); its outputs are masked.
    """

    def __init__(self, optimizer: KeyedOptimizer, head: nn.Module):
        super().__init__(optimizer)
        self._bad: torch.Tensor | None = None  # bool scalar, True if the loss of some rank is not finite
        self._bad_copy: AsyncHostCopy | None = None  # copy of _bad for the host
        head.register_forward_pre_hook(self._before_head)
        head.register_forward_hook(self._after_head)

    def step(self, closure: Any = None) -> None:
        """Step the optimizer if the loss of the last training forward pass was finite on all ranks."""
        if self._bad_copy is None or not self._bad_copy.wait():
            super().step(closure)

    def _before_head(self, head: nn.Module, inputs: tuple) -> None:
        if head.training:
            for values in inputs[0].values():
                values.register_hook(lambda gradient: gradient.masked_fill(self._bad, 0))

    def _after_head(self, head: nn.Module, inputs: tuple, result: tuple) -> tuple | None:
        if not head.training:
            return None
        loss, outputs = result
        is_bad = (~torch.isfinite(loss.detach())).float()
        dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        self._bad = is_bad > 0
        self._bad_copy = AsyncHostCopy(self._bad)
        return loss, outputs.masked(self._bad, self._bad_copy.wait)


class RecentBatches(Iterator[Batch]):
    """Iterator over batches that keeps the MAX_RECENT_BATCHES most recent batches with their steps.

    Args:
        batches: Batches to iterate over.
        first_step: Step of the first batch, counted from 0 over the run.
    """

    def __init__(self, batches: Iterator[Batch], first_step: int):
        self._batches, self._step = batches, first_step
        self._recent: deque[tuple[int, Batch]] = deque(maxlen=MAX_RECENT_BATCHES)

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._recent.append((self._step, batch))
        self._step += 1
        return batch

    def at(self, step: int) -> Batch | None:
        """Return the batch of a step, counted from 0, or None if the batch is not kept."""
        return dict(self._recent).get(step)


def make_loss_error(
    batch: Batch | None, schema: Schema, folder: str, step: int, rank: int, sequences: Collection[str]
) -> RunError:
    """Write this rank's part of the batch of a step whose loss is not finite (see `dump`), and return the error.

    The error names the folder, or states why nothing was written. If `batch` is None, the batch is no longer in
    memory. `step` is counted from 1; the other arguments are those of `dump`. No error of writing is raised.
    """
    batch_text, inspect = "its batch is no longer in memory", ""
    try:
        if batch is not None:
            dump(batch, schema, folder, step, rank, sequences)
            batch_text, inspect = f"its batch is in {folder}/{NAN_FOLDER}", "inspect the batch; "
    except Exception as error:  # must not hide that the loss is not finite
        reason = getattr(error, "strerror", None) or get_first_line(error)
        batch_text = f"its batch could not be written to {folder}/{NAN_FOLDER}: {reason}"
    return RunError(
        "the loss is not a finite number",
        where=f"step {step}; {batch_text}",
        expected="a finite loss",
        do=f"{inspect}lower optim.dense.lr or optim.embeddings.lr; scale dense columns to about ±10; or set "
        "train.on_nan=skip",
    )


def add_advice(error: NonfiniteStateError, config: RunConfig, root: str, newest: int | None) -> NonfiniteStateError:
    """Return a copy of the error with advice to continue from the newest checkpoint, which is finite, or to restart.

    Args:
        error: Error of the save.
        config: Configuration of the run.
        root: Folder of all checkpoints.
        newest: Step of the newest checkpoint; None if there is none.
    """
    lower = f"optim.embeddings.lr={config.optim.embeddings.lr / 10:g} optim.dense.lr={config.optim.dense.lr / 10:g}"
    clipping = "a lower train.max_grad_norm" if config.train.max_grad_norm else "train.max_grad_norm set"
    if newest is None:
        do = f"restart with lower learning rates ({lower}) or with {clipping}"
    else:
        do = (
            f"start a new run from the last checkpoint, which is finite, with {clipping} or lower learning rates: "
            f"raytrec train --warm-start {quote_for_shell(get_step_folder(root, newest))} {lower}"
        )
    return NonfiniteStateError(**error.parts | {"do": do})


def dump(batch: Batch, schema: Schema, folder: str, step: int, rank: int, sequences: Collection[str] = ()) -> str:
    """Write a rank's part of a batch to a Parquet file with the schema's columns, and return its path.

    Ids are written as they are looked up, after hashing and clamping; managed ids are written as table rows.
    Padding rows are omitted. If tasks weight rows, the column `task_weights` contains each row's factor in each task.

    Args:
        batch: Batch of the rank.
        schema: Schema of the data.
        folder: Run folder.
        step: Step of the batch, used in the file's name.
        rank: Rank of this process, used in the file's name.
        sequences: Features that are looked up id by id, most recent id first; they are written oldest id first.

    Raises:
        OSError: The file cannot be written.
    """
    batch = batch.to(torch.device("cpu"))
    real = batch.weights > 0
    candidates = iter([] if batch.dense_of_candidates is None else batch.dense_of_candidates.unbind(1))
    columns: dict[str, Any] = {n: _values(batch, batch.labels[:, i]) for i, n in enumerate(schema.labels)}
    for i, name in enumerate(schema.dense):
        is_candidate = name in schema.candidates
        columns[name] = _values(batch, next(candidates)) if is_candidate else batch.dense[real, i].numpy()
    if batch.task_weights is not None:  # a label with factor 0 may be undefined
        columns[TASK_WEIGHTS_COLUMN] = _values(batch, batch.task_weights)
    for name in schema.sparse:
        feature = batch.sparse[name]
        bags = feature.values().split(feature.lengths().tolist())
        rows = [ids.tolist() for ids, is_real in zip(bags, real.tolist(), strict=True) if is_real]
        if name in sequences:  # back to oldest first, as in the data
            rows = [ids[::-1] for ids in rows]
        columns[name] = pa.array(rows, pa.list_(pa.int64()))
    path = Path(folder) / NAN_FOLDER / f"step-{step:010d}-rank-{rank}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


def _values(batch: Batch, values: torch.Tensor) -> list:
    """Return the value of each row or, if rows are requests, the list of its candidates' values.

    Padding rows are omitted.

    Args:
        batch: Batch that defines padding (weights) and requests.
        values: Values of rows, [B, ...], or of candidates, [N, ...].
    """
    if batch.requests is None:
        return list(values[batch.weights > 0].numpy())
    of_rows = values.split(batch.candidate_counts.tolist())
    return [list(row.numpy()) for row, is_real in zip(of_rows, batch.weights > 0, strict=True) if is_real]
