"""Write deltas during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raytrec.checkpoint.state import LogicalState
from raytrec.common.collectives import Peers
from raytrec.common.errors import DataError, RunError
from raytrec.config.run_config import RunConfig
from raytrec.deltas.chain import list_exports, read_stream
from raytrec.deltas.changes import IdChanges, IdRowChanges, RowChanges, RowPiece, TakenRows, count_bytes, iterate_pieces
from raytrec.deltas.files import DeltaFiles, DeltaOutcome, ManifestWriter, describe_failure
from raytrec.deltas.format import DeltaManifest, DeltaTable, Operation, UnusableDeltaError, read_batches, select_tables
from raytrec.embeddings.managed.batches import ManagedBatches

MAX_COPY_BYTES = 1 << 30  # maximum copy of a rank's changed rows; training waits until a larger delta is written
COMMIT_TIMEOUT_S = 60.0  # maximum time that a checkpoint waits for its delta
HEAD, VALUE, AVERAGE = "dense/head.", "/value", "/ema"  # parts of dense names in LogicalState


@dataclass(frozen=True)
class _Cut:
    """Changes that this rank publishes in one delta."""

    step: int
    unix_s: float
    last: bool
    rows: TakenRows
    ids: dict[str, IdRowChanges]
    dense: dict[str, torch.Tensor]


class DeltaPublisher:
    """Writer of this rank's part of a run's deltas. The constructor and `cut` are collective operations.

    Args:
        config: Configuration of the run.
        model: Sharded model, on whose lookups hooks are registered.
        state: Live state of the model.
        managed: Maps of managed ids, whose `on_write` and `on_assign` are replaced; None if no table has managed ids.
        position: Entry "deltas" of the restored checkpoint; {} if the checkpoint has no such entry, and None at the
            start of the run.
        step: Step of the current state.
        confirm: Function called on rank 0 before a delta is committed; raises RunError if these ranks no longer own
            the run.
        warn: Function called with a warning for the user.

    Attributes:
        written: Step → number of the newest delta that leads to the step, for the last 9 deltas of this process.

    Raises:
        RunError, DataError: As for `read_stream`.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        state: LogicalState,
        managed: ManagedBatches | None,
        position: Mapping[str, Any] | None,
        step: int,
        confirm: Callable[[], None],
        warn: Callable[[str], None],
    ):
        self._section, self._folder, self._state = config.export.deltas, config.export.deltas.to, state
        self._stream, self._warn = read_stream(config).id, warn
        self._sizes = {name: DeltaTable(rows=t.shape[0], dim=t.shape[1]) for name, t in state.tables.items()}
        self._rows, self._ids = RowChanges(model, state.tables), IdChanges(managed.maps if managed else {})
        if managed:
            on_write = managed.on_write

            def write(table: str, rows: torch.Tensor) -> None:
                on_write(table, rows)
                self._rows.mark_local(table, rows)

            managed.on_write, managed.on_assign = write, self._ids.add_assigned
        # A single rank creates no group, because the threads of the group would poll.
        self._peers = Peers(group=dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deltas")
        self._running: Future[DeltaOutcome] | None = None
        self._cut: _Cut | None = None
        self._cut_at, self._is_requested = monotonic(), False
        self._has_failed, self._marks_all = False, False
        self._manifests = ManifestWriter(self._folder, self._stream, self._sizes, confirm)  # used by rank 0
        self.written: dict[int, int] = {}
        self._number = self._mark_since(position, step)

    def take_request(self) -> bool:
        """Return True if export.deltas.every_s seconds have passed since the last `cut`, and no delta is being written.

        The time before the first `cut` is measured from construction. After True, the result is False until the next
        `cut`.
        """
        is_busy = self._is_requested or not (self._running is None or self._running.done())
        self._is_requested |= not is_busy and monotonic() - self._cut_at >= self._section.every_s
        return not is_busy and self._is_requested

    def lacks_export(self) -> bool:
        """Return True if the folder contains no complete full export; False if the store cannot be read."""
        try:
            return not list_exports(self._folder)
        except (OSError, DataError):
            return False

    def mark_all(self) -> None:
        """Include all rows and ids in the next delta."""
        self._marks_all = True

    def cut(self, step: int, last: bool = False) -> dict[str, Any]:
        """Start to write a delta that leads to the current state, and return as soon as training may continue.

        Waits for the previous delta, and for this one if this rank's changed rows exceed MAX_COPY_BYTES.

        Args:
            step: Number of training steps completed in the run. Ids of later batches must not have been mapped yet.
            last: True if the run ends with this state.

        Returns:
            Entry for the index of a checkpoint of this state: {"deltas": {"stream": id, "number": number}}.
        """
        self.collect()
        if self._marks_all:
            self._rows.mark_all()
            self._ids.mark_all()
        self._marks_all, self._is_requested, self._cut_at = False, False, monotonic()
        taken = self._rows.take()
        self._cut = cut = _Cut(step, time(), last, taken, self._ids.take(), self._copy_dense())
        fits = count_bytes(taken) <= MAX_COPY_BYTES
        pieces = list(iterate_pieces(taken)) if fits else iterate_pieces(taken)
        self._running = self._thread.submit(self._publish, cut, pieces)
        if not fits:
            wait([self._running])
        return {"deltas": {"stream": self._stream, "number": self._number + 1}}

    def collect(self, block: bool = True) -> None:
        """Process the outcome of the last delta. If the delta was not written, the next delta includes its changes.

        `warn` is called for the first of several consecutive failures, and for a failure of the run's last delta.

        Args:
            block: True to wait for the outcome; False to return if it is not known yet.
        """
        if self._running is None or not (block or self._running.done()):
            return
        outcome, self._running = self._running.result(), None
        if outcome.error is not None and outcome.number != self._number:
            self._marks_all = True  # the folder contains a delta of unknown content
        self._number = outcome.number
        if outcome.error is None:
            self.written = dict([*self.written.items(), (self._cut.step, outcome.number)][-9:])
        else:
            for part, rows in self._cut.rows:
                part.mark(rows)
            self._ids.put_back(self._cut.ids)
            if not self._has_failed or self._cut.last:
                failure = f"delta {outcome.number + 1} was not written: {outcome.error}"
                self._warn(f"{failure}; if training continues, the next delta will contain its changes")
        self._cut, self._has_failed = None, outcome.error is not None

    def wait_until_written(self) -> None:
        """Wait until the delta in progress, if any, is written or has failed, for at most COMMIT_TIMEOUT_S seconds."""
        if running := self._running:
            wait([running], COMMIT_TIMEOUT_S)

    def close(self) -> None:
        """Wait for the last delta, and end the thread. `cut` must not be called afterwards."""
        self.collect()
        self._thread.shutdown()

    def _copy_dense(self) -> dict[str, torch.Tensor]:
        """Return copies of all dense weights (their averages if train.ema is set) on rank 0, and {} on other ranks."""
        dense, copies = self._state.dense, {}
        for name in dense if dist.get_rank() == 0 else ():
            if name.startswith(HEAD) and name.endswith(VALUE):
                part = name.removesuffix(VALUE)
                copies[part.removeprefix(HEAD)] = dense.get(part + AVERAGE, dense[name]).detach().to("cpu", copy=True)
        return copies

    def _mark_since(self, position: Mapping[str, Any] | None, step: int) -> int:
        """Mark the changes since a checkpoint, or everything if unknown; return the number of the newest delta."""
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            found[0] = self._manifests.find_since(position, step)
        dist.broadcast_object_list(found)
        number, deltas = found[0]
        ids: dict[str, list[torch.Tensor]] = {}
        try:
            for delta in deltas or ():
                for table, rows in self._read_named(delta, "rows"):
                    self._rows.mark(table, rows)
                for table, rows in self._read_named(delta, "ids"):
                    ids.setdefault(table, []).append(rows)
            is_readable = deltas is not None
        except UnusableDeltaError:
            is_readable = False
        if Peers().max_number(not is_readable):
            self._marks_all = True
        else:
            for table in sorted(ids):
                self._ids.mark(table, torch.cat(ids[table]).unique())
        return number

    def _read_named(self, delta: DeltaManifest, operation: Operation) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (table, rows int64 [n]) for the rows in a delta's files of an operation.

        Raises:
            UnusableDeltaError: A file cannot be read, or is damaged.
        """
        for batch in read_batches(self._folder, delta, operation):
            rows = batch["row"].to_numpy()
            for table, places in select_tables(batch, self._sizes):
                yield table, torch.from_numpy(rows[places])

    def _publish(self, cut: _Cut, pieces: Iterable[RowPiece]) -> DeltaOutcome:
        """Write this rank's files, and on rank 0 the manifest. Runs in the background thread."""
        rank = dist.get_rank()
        begun = self._manifests.begin(self._number) if rank == 0 else None
        newest, error, name = self._peers.objects(begun)[0]
        if error is not None:
            return DeltaOutcome(newest, error)
        number = newest + 1
        files = DeltaFiles(self._folder, name, self._sizes)
        try:
            files.write_rows(f"rows-{rank:05d}.arrow", pieces)
            files.write_ids(f"ids-{rank:05d}.arrow", cut.ids)
            if cut.dense:
                self._check_dense(cut.dense)
                files.write_dense("dense.arrow", cut.dense)
        except Exception as failure:
            error = describe_failure(failure)
        entries, errors = zip(*self._peers.objects((files.entries, error)), strict=True)
        error = next(filter(None, errors), None)
        if error is None and rank == 0:
            error = self._manifests.commit(number, entries, step=cut.step, cut_unix_s=cut.unix_s, last=cut.last)
        error = self._peers.objects(error)[0]
        if error is not None and rank == 0:
            self._manifests.give_up(number, name)
        return DeltaOutcome(number if error is None else newest, error)

    def _check_dense(self, dense: Mapping[str, torch.Tensor]) -> None:
        for name, value in dense.items():
            if f"{HEAD}{name}{VALUE}" not in self._state.unbounded and not value.isfinite().all():
                raise RunError(f"the dense weight {name} contains NaN or infinity")
