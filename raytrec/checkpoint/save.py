"""Saving while training goes on: a copy is taken at the step, a thread writes it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from raytrec.checkpoint.files import discard, folder_of, keep
from raytrec.checkpoint.hostcopy import HostCopy
from raytrec.checkpoint.state import State
from raytrec.checkpoint.storage import ShardWriter
from raytrec.errors import RunError, root_cause
from raytrec.sections import CheckpointSection


@dataclass(frozen=True)
class Saved:
    """What became of a save.

    Attributes:
        step: of the run.
        folder: the checkpoint.
        error: why there is none; the same on every rank.
        note: what else is to be said.
        blocked_s: seconds that the step waited for the copy.
        seconds: until it was committed.
    """

    step: int
    folder: str
    error: RunError | None
    note: str | None
    blocked_s: float
    seconds: float


class Saver:
    """Writes checkpoints of this rank's part of a run; making one is a collective, as is each `save`.

    Args:
        root: the folder of all checkpoints, local or s3:// or gs://.
        config: how many to keep, and whether training goes on while one is written.
        confirm: called on rank 0 before a checkpoint is committed and before old ones are removed; raises
            RunError where these ranks are no longer the run's.
    """

    def __init__(self, root: str, config: CheckpointSection, confirm: Callable[[], None] = lambda: None):
        self._root, self._config, self._confirm = root, config, confirm
        # A group of its own, because its collectives run beside those of training; gloo, for host memory.
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[Saved] | None = None
        self._host = HostCopy()
        self.last_step: int | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._running is not None and not self._running.done()

    def save(self, step: int, tensors: State, about: dict[str, Any]) -> None:
        """Begins to save; returns when training may change the tensors.

        Args:
            step: of the run: steps that have been trained.
            tensors: LogicalState.tensors().
            about: what else belongs to the state, JSON; the same on every rank.
        """
        assert self._running is None, "the last save has not been taken"
        began = perf_counter()
        attempt = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(attempt, group=self._group)
        if self._config.asynchronous:
            tensors = self._host.copy(tensors)
        blocked = perf_counter() - began
        self.last_step = step
        self._running = self._thread.submit(self._write, step, attempt[0], tensors, about, began, blocked)
        if not self._config.asynchronous:
            self._running.result()

    def taken(self) -> Saved | None:
        """The outcome of the last save, once; waits for it. None when there is none."""
        if self._running is None:
            return None
        saved, self._running = self._running.result(), None
        return saved

    def close(self) -> None:
        """Waits for what is being written, and gives back the memory of the copies; it saves no more."""
        self._thread.shutdown()
        self._host.close()

    def _write(
        self, step: int, attempt: str, tensors: State, about: dict, began: float, blocked: float
    ) -> Saved:
        folder, error = folder_of(self._root, step), None
        try:
            writer = ShardWriter(folder, attempt, about, self._confirm)
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
        except (Exception, CheckpointException) as failure:  # torch's is a BaseException
            cause = root_cause(failure)
            error = cause if isinstance(cause, RunError) else RunError(str(cause), where=folder)
        notes = [self._host.note] if self._host.note else []
        if dist.get_rank() == 0:
            try:
                self._tidy(folder, attempt, error)
            except (OSError, RunError) as failure:
                notes.append(f"older checkpoints could not be removed: {str(failure).splitlines()[0]}")
        return Saved(step, folder, error, "; ".join(notes) or None, blocked, perf_counter() - began)

    def _tidy(self, folder: str, attempt: str, error: RunError | None) -> None:
        if error is None:
            self._confirm()
            keep(self._root, self._config.keep_last, self._config.keep_best, self._config.best_by)
        else:
            discard(folder, attempt)
