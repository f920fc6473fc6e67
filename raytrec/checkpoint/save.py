"""Save checkpoints while training continues: a thread writes a snapshot of the state."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pyarrow import fs
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from raytrec.checkpoint.blocks import blocks, iterate_row_pieces
from raytrec.checkpoint.files import get_step_folder, keep, remove_incomplete, remove_oldest
from raytrec.checkpoint.index import CheckpointError, InsufficientSpaceError, is_local, read_index
from raytrec.checkpoint.snapshot import HostStateBuffer, RowSnapshot
from raytrec.checkpoint.state import State, find_nonfinite, summarize_over_ranks
from raytrec.checkpoint.storage import ShardWriter
from raytrec.common.collectives import Peers
from raytrec.common.errors import RunError, get_first_line, get_root_cause
from raytrec.common.formatting import format_count
from raytrec.common.storage import open_filesystem
from raytrec.compat.torch_ import ShardedTensor, list_local_parts
from raytrec.config.training import CheckpointSection
from raytrec.metrics.selection import MetricDisplay

SLACK_BYTES = 1 << 20  # reserved on a disk for the index and Ray Train's own files


class NonfiniteStateError(RunError):
    """Error for a training state that is not saved because it contains NaN or infinity."""


@dataclass(frozen=True)
class Saved:
    """Outcome of a save.

    Attributes:
        step: Step of the run.
        folder: Folder of the checkpoint.
        error: Error that made the save fail, None if it succeeded; equal on all ranks unless a collective failed.
        note: Remark for the user; None if there is none.
        blocked_s: Seconds for which training waited for copies.
        seconds: Seconds from the start of the save to its end.
    """

    step: int
    folder: str
    error: RunError | None
    note: str | None
    blocked_s: float
    seconds: float


class CheckpointWriter:
    """Writer of this rank's part of a run's checkpoints; all ranks must call the constructor and `save` together.

    Args:
        root: Folder of all checkpoints: a local path or a URI (s3:// or gs://).
        config: Section `checkpoint` of the configuration: number of checkpoints to keep, and whether training
            continues during a save.
        confirm: Function called on rank 0 before a checkpoint is committed and before old checkpoints are removed.
            It must raise RunError if this worker group no longer owns the run.
        unbounded: Names of tensors that may contain infinity (LogicalState.unbounded).
        best: Metric that determines which checkpoints are best (checkpoint.keep_best); None: no checkpoint is best.
        rows: Snapshot that preserves the table rows that training changes during a save; None: whole tables
            are copied. Neither happens without checkpoint.async_save.

    Attributes:
        last_step: Step of the save that was started last; None if none was started.
    """

    def __init__(
        self,
        root: str,
        config: CheckpointSection,
        confirm: Callable[[], None] = lambda: None,
        unbounded: frozenset[str] = frozenset(),
        best: MetricDisplay | None = None,
        rows: RowSnapshot | None = None,
    ):
        self._root, self._config, self._confirm, self._unbounded = root, config, confirm, unbounded
        self._best_metric, self._rows = best, rows
        self._has_removed = False  # True if an older checkpoint had to be removed to free space
        # A separate group, because saving and training run collectives concurrently; gloo, because the tensors
        # are in host memory.
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[Saved] | None = None
        self._host = HostStateBuffer()
        self.last_step: int | None = None

    @property
    def busy(self) -> bool:
        """Return True if a save is in progress."""
        return self._running is not None and not self._running.done()

    def save(self, step: int, tensors: State, about: dict[str, Any], copied: Mapping[str, Any] | None = None) -> None:
        """Start a save, and return as soon as training may change the tensors; without async_save, after the save.

        Errors of the save are part of its outcome. Call `collect_outcome` before the next save.

        Args:
            step: Number of training steps completed in the run.
            tensors: Live tensors (LogicalState.tensors).
            about: Entry "about" of the index as JSON values, equal on all ranks.
            copied: Further tensors, which no longer change.
        """
        assert self._running is None, "the outcome of the last save has not been read"
        start_s = perf_counter()
        attempt = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(attempt, group=self._group)
        if self._config.async_save:
            tensors = self._protect(tensors)
        tensors = {**tensors, **(copied or {})}
        blocked = perf_counter() - start_s
        self.last_step = step
        self._running = self._thread.submit(self._write, step, attempt[0], tensors, about, start_s, blocked)
        if not self._config.async_save:
            self._running.result()

    def _protect(self, tensors: State) -> State:
        """Return a snapshot of tensors: copies, or tensors whose rows are copied before training changes them."""
        rows = self._rows
        if rows is None:
            return self._host.copy(tensors)
        copies = self._host.copy({name: value for name, value in tensors.items() if not rows.holds(value)})
        rows.begin()
        return {name: copies.get(name, value) for name, value in tensors.items()}

    def collect_outcome(self) -> Saved | None:
        """Wait for the last save, and return its outcome; None if there is no save or its outcome was collected."""
        if self._running is None:
            return None
        saved, self._running = self._running.result(), None
        return saved

    def close(self) -> None:
        """Wait for the running save, and release the memory of the copies; no further save is possible."""
        self._thread.shutdown()
        self._host.close()

    def _write(self, step: int, attempt: str, tensors: State, about: dict, start_s: float, blocked: float) -> Saved:
        folder = get_step_folder(self._root, step)
        notes = [self._host.note] if self._host.note else []
        try:
            error = self._find_nonfinite_error(tensors, step) or self._store(folder, attempt, tensors, about, notes)
        except Exception as failure:  # for example an error in a collective
            error = RunError(f"the checkpoint cannot be saved: {get_first_line(failure)}", where=folder)
        finally:
            if self._rows:
                self._rows.end()
        return Saved(step, folder, error, "; ".join(notes) or None, blocked, perf_counter() - start_s)

    def _find_nonfinite_error(self, tensors: State, step: int) -> NonfiniteStateError | None:
        """Return an error, the same on all ranks, if this state contains NaN or infinity; else None."""
        pieces_of = self._rows.pieces if self._rows else iterate_row_pieces
        nonfinite = summarize_over_ranks(find_nonfinite(tensors, self._unbounded, pieces_of), self._group)
        if nonfinite is None:
            return None
        return NonfiniteStateError(
            f"the state at step {step} contains NaN or infinity: {nonfinite}",
            where=f"step {step}",
            expected="finite weights and optimizer state",
        )

    def _store(self, folder: str, attempt: str, tensors: State, about: dict, notes: list[str]) -> RunError | None:
        """Write and commit the checkpoint; if the disk is full, remove older checkpoints and retry.

        Returns:
            Error, the same on all ranks, if the checkpoint could not be written; else None.
        """
        needed = self._make_room(tensors, notes)
        for number in count():
            name = f"{attempt}{number:02x}"
            error = self._write_attempt(folder, name, tensors, about)
            if dist.get_rank() == 0:
                self._clean_up(folder, name, error, notes)
            if not isinstance(error, InsufficientSpaceError):
                return error
            final_error: list[RunError | None] = [None]
            if dist.get_rank() == 0 and not self._remove_oldest(notes):
                final_error = [self._add_sizes(error, needed)]
            dist.broadcast_object_list(final_error, group=self._group)
            if final_error[0] is not None:
                return final_error[0]
        return None

    def _write_attempt(self, folder: str, attempt: str, tensors: State, about: dict) -> RunError | None:
        try:
            read = self._rows.blocks if self._rows else blocks
            writer = ShardWriter(folder, attempt, about, self._confirm, read)
            # Names are flat; with flattening, the planner would record and exchange a mapping of all names.
            planner = DefaultSavePlanner(flatten_state_dict=False)
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=self._group)
        except (Exception, CheckpointException) as failure:  # CheckpointException is a BaseException
            cause = get_root_cause(failure)
            if isinstance(cause, CheckpointException):  # its own first line lacks the error of the rank
                cause = next(iter(cause.failures.values()))[0]
            what = f"the checkpoint cannot be saved: {get_first_line(cause)}"
            return cause if isinstance(cause, RunError) else RunError(what, where=folder)
        return None

    def _make_room(self, tensors: State, notes: list[str]) -> int:
        """Remove older checkpoints until the new one is expected to fit, and return its size in bytes."""
        # A replicated tensor is written by one rank only; rank 0 counts it.
        own_tensors = [v for v in tensors.values() if isinstance(v, ShardedTensor) or dist.get_rank() == 0]
        local_bytes = sum(part.nbytes for value in own_tensors for part in list_local_parts(value))
        needed = int(Peers(group=self._group).sum(torch.tensor(local_bytes)))
        try:
            if dist.get_rank() == 0 and self._is_short(needed):
                self._confirm()
                remove_incomplete(self._root)
                while self._is_short(needed) and self._remove_oldest(notes):
                    pass
        except (OSError, RunError) as failure:
            notes.append(f"space for the checkpoint could not be freed: {get_first_line(failure)}")
        return needed

    def _is_short(self, needed: int) -> bool:
        free = measure_free_bytes(self._root)
        return free is not None and free < needed + SLACK_BYTES

    def _remove_oldest(self, notes: list[str]) -> bool:
        """Remove the oldest removable checkpoint, and return True if one was removed; called on rank 0."""
        try:
            self._confirm()
            removed_folder = remove_oldest(self._root, self._config.keep_best, self._best_metric)
        except (OSError, RunError) as failure:
            notes.append(f"older checkpoints could not be removed: {get_first_line(failure)}")
            return False
        if removed_folder and not self._has_removed:
            self._has_removed = True
            notes.append(
                f"there is no space for {format_count(self._config.keep_last, 'checkpoint')} (checkpoint.keep_last) "
                f"and a new one: older checkpoints are removed before a save, most recently {removed_folder}"
            )
        return removed_folder is not None

    def _add_sizes(self, error: InsufficientSpaceError, needed: int) -> InsufficientSpaceError:
        free = measure_free_bytes(self._root)
        free_text = "" if free is None else f", {free / 2**20:,.1f} MiB are free on the disk"
        return InsufficientSpaceError(
            error.what,
            where=error.where,
            expected=f"space for one more checkpoint: {needed / 2**20:,.1f} MiB are needed{free_text}",
            do="free up space, or start a new run with another checkpoint.dir. The newest complete checkpoint is only "
            "removed after a newer one is complete: even checkpoint.keep_last=1 needs space for two",
        )

    def _clean_up(self, folder: str, attempt: str, error: RunError | None, notes: list[str]) -> None:
        if error is not None:
            with suppress(CheckpointError):
                if read_index(folder)["attempt"] == attempt:
                    return None  # a rank was lost after the commit, before all ranks knew of the commit
            return discard(folder, attempt)
        try:
            self._confirm()
            remove_other_attempts(folder, attempt)
            keep(self._root, self._config.keep_last, self._config.keep_best, self._best_metric)
        except (OSError, RunError) as failure:
            notes.append(f"older checkpoints could not be removed: {get_first_line(failure)}")


def measure_free_bytes(root: str) -> int | None:
    """Return the bytes available to this user on the disk of the folder `root`, or of its first existing parent.

    The result is None for object stores.

    Raises:
        OSError: The disk cannot be queried.
    """
    filesystem, path = open_filesystem(root)
    if not is_local(filesystem):
        return None
    place = next(p for p in (Path(path), *Path(path).parents) if p.exists())
    return shutil.disk_usage(place).free


def remove_other_attempts(folder: str, attempt: str) -> None:
    """Remove the files of all attempts except `attempt` from the folder of a complete checkpoint.

    Raises:
        OSError: The folder cannot be listed, or a file cannot be removed.
    """
    filesystem, path = open_filesystem(folder)
    for info in filesystem.get_file_info(fs.FileSelector(path)):
        is_data_file = info.base_name.endswith(".bin") or ".partial-" in info.base_name
        if is_data_file and attempt not in info.base_name:
            filesystem.delete_file(info.path)


def discard(folder: str, attempt: str) -> None:
    """Remove the files of a failed attempt, and the folder if it is then empty; ignore any OSError."""
    filesystem, path = open_filesystem(folder)
    with suppress(OSError):
        files = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        for info in files:
            if attempt in info.base_name:
                filesystem.delete_file(info.path)
        if all(attempt in info.base_name for info in files):
            filesystem.delete_dir(path)
