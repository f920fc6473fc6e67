"""Follower of a run's deltas, with which a replica serves the state of a recent training step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from threading import Thread
from time import monotonic, sleep, time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from prometheus_client import Counter, Gauge

from raytrec.common.errors import RaytrecError, RunError, get_first_line
from raytrec.common.storage import split_query
from raytrec.deltas.apply import PreparedDeltas, read_delta
from raytrec.deltas.chain import Position, check_gap, find_stream, iterate_exports, make_missing_export_error, read_next
from raytrec.scoring.load import LookupMaker
from raytrec.scoring.scorer import Scorer
from raytrec.serving.batching import UnavailableError
from raytrec.serving.loaded_exports import LoadedExports
from raytrec.serving.table_shards.messages import MAX_STATES, OutdatedStateError

if TYPE_CHECKING:
    from raytrec.serving.app import Service
    from raytrec.serving.listener import Listener

_log = logging.getLogger(__name__)
LOCAL_INTERVAL_S, STORE_INTERVAL_S = 0.2, 1.0  # intervals at which the next delta is looked up
MAX_REASONS = 100  # maximum number of refusal reasons that are remembered
HEAL_INTERVAL_S = 15.0  # interval of attempts to load a full export after a failed attempt
RETRY_INTERVAL_S = 1.0  # interval at which a refused delta is read again; it may have been incomplete on a store
CHECK_INTERVAL_S = 5.0  # interval at which the folder is checked for gaps and new runs while no delta appears


class Follower:
    """Consumer that loads a full export in a replica, and applies the run's following deltas in a thread.

    A delta (the changes between two steps of the run) that cannot be used is refused. The replica keeps its state, and
    tries again until the delta can be used or a newer full export exists.

    Args:
        folder: Folder of deltas (export.deltas.to).
        allow_code: True if transforms of exports may name code.
        make_maker: Function called with position=POSITION of a full export, which returns the LookupMaker for this
            export; None: tables are mapped into memory.

    Attributes:
        versions: Exports of the process.
        position: Delta that leads to the state that the replica serves.
        problem: Reason why the next delta has been refused, or cannot be read; None if there is no problem.

    Raises:
        RaytrecError: There is no full export, or no full export can be loaded.
        OSError: The store cannot be read.
    """

    def __init__(self, folder: str, allow_code: bool = False, make_maker: Callable[..., LookupMaker] | None = None):
        self._folder, self._allow_code, self._make_maker = folder, allow_code, make_maker
        self.problem: str | None = None
        self._reasons: deque[str] = deque(maxlen=MAX_REASONS)
        self._skips = False  # True if table shards no longer have states that follow the replica's state
        self._interval_s = STORE_INTERVAL_S if "://" in folder else LOCAL_INTERVAL_S
        self._applied = Counter("raytrec_serve_deltas_applied", "Applied deltas.", registry=None)
        self._refused = Counter("raytrec_serve_deltas_refused", "Reasons for which deltas were refused.", registry=None)
        loaded = self._load_newest(0, background=False)
        if loaded is None:
            raise make_missing_export_error(folder)
        self.versions, self.position = loaded
        self._check_due, self._heal_due = 0.0, 0.0
        self._switch: Callable[[Callable[[], None]], None] = lambda action: action()

    def start(self, service: Service, listener: Listener) -> None:
        """Register metrics, and follow the run in a thread, which changes the model in the listener's event loop."""
        registry = service.figures.registry
        for metric in (self._applied, self._refused):
            registry.register(metric)
        step = Gauge("raytrec_serve_step", "Training step whose state the replica serves.", registry=registry)
        step.set_function(lambda: self.position.manifest.step)
        behind = Gauge("raytrec_serve_seconds_behind", "Seconds since training reached this step.", registry=registry)
        behind.set_function(lambda: self.seconds_behind)
        service.follower = self
        Thread(target=self._run, args=(service, listener), name="deltas", daemon=True).start()

    @property
    def seconds_behind(self) -> float:
        """Return the seconds since training reached the served step; 0 for the last state of a run."""
        manifest = self.position.manifest
        return 0.0 if manifest.last else max(0.0, time() - manifest.cut_unix_s)

    def describe(self) -> dict[str, Any]:
        """Return a dict with step, delta, seconds_behind, ended and problem, as in Freshness in openapi.yaml."""
        manifest = self.position.manifest
        about = {"step": manifest.step, "delta": manifest.number, "seconds_behind": round(self.seconds_behind, 3)}
        return about | {"ended": manifest.last, "problem": self.problem}

    def _run(self, service: Service, listener: Listener) -> None:
        while listener.loop is None:
            sleep(self._interval_s)
        loop = listener.loop

        def switch(action: Callable[[], None]) -> None:
            done: Future[None] = Future()

            def complete() -> None:
                try:
                    action()
                    done.set_result(None)
                except BaseException as error:
                    done.set_exception(error)

            loop.call_soon_threadsafe(service.batcher.call_between, complete)
            done.result()

        self._switch = switch
        while not loop.is_closed():
            if not self.advance():
                sleep(RETRY_INTERVAL_S if self.problem else self._interval_s)

    def advance(self) -> bool:
        """Apply the next delta or load a newer full export; return False if the replica keeps its state."""
        try:
            advanced = self._apply_next()
            self._clear_problem()
            return advanced
        except Exception as error:
            self.problem = self._record_refusal(error)
            if isinstance(error, UnavailableError) or monotonic() < self._heal_due:
                return False
        try:
            return self._heal()
        except Exception as error:
            self._record_refusal(error)
            self._heal_due = monotonic() + HEAL_INTERVAL_S
            return False

    def _clear_problem(self) -> None:
        self.problem = None
        self._reasons.clear()

    def _apply_next(self) -> bool:
        """Apply the next delta, or with table shards several deltas; return False if the next delta does not exist yet.

        Raises:
            RunError: The next delta cannot be used or will not appear, or a table shard is unavailable.
            OSError: The store cannot be read.
        """
        scorer = self.versions.current.scorer
        if scorer.lookups.refusal:
            raise scorer.lookups.refusal
        prepared = self._prepare_next(scorer, self.position)
        if prepared is None:
            if self.problem or monotonic() > self._check_due:
                self._check_due = monotonic() + CHECK_INTERVAL_S
                check_gap(self._folder, self.position)
            return False
        self._switch(lambda: self._adopt(prepared))
        self._check_due = monotonic() + CHECK_INTERVAL_S
        return True

    def _prepare_next(self, scorer: Scorer, position: Position) -> PreparedDeltas | None:
        """Prepare the next delta, or several usable deltas with table shards; return None if there is no next delta.

        Shards keep MAX_STATES states. The replica advances by fewer deltas at a time, so that the shards still have its
        current state. If other replicas are so far ahead that the shards lack its next state, the replica skips to the
        newest delta.
        """
        at_once = inf if self._skips else MAX_STATES - 1 if scorer.lookups.is_remote else 1
        prepared, schema, weights = PreparedDeltas(self._folder, scorer), scorer.manifest.data_schema, scorer.weights
        try:
            while at_once and (following := read_next(self._folder, prepared.position or position)):
                prepared.add(read_delta(self._folder, following, schema, weights))
                at_once -= 1
        except RunError:
            if prepared.position is None:
                raise
        if prepared.position is None:
            return None
        try:
            prepared.finish()
        except OutdatedStateError:
            if self._skips:
                raise
            self._skips = True
            return self._prepare_next(scorer, position)
        return prepared

    def _adopt(self, prepared: PreparedDeltas) -> None:
        self._applied.inc(prepared.position.number - self.position.number)
        prepared.apply()
        self.position, self._skips = prepared.position, False

    def _record_refusal(self, error: Exception) -> str:
        """Return the reason for keeping the state, without the folder's location; count and log each reason once."""
        reason = str(error) if isinstance(error, RaytrecError) else f"{self._folder}: {get_first_line(error)}"
        if reason not in self._reasons:
            self._reasons.append(reason)
            self._refused.inc()
            _log.warning("this replica serves step %s until it can continue: %s", self.position.manifest.step, reason)
        if not isinstance(error, RaytrecError):
            return "a delta cannot be read; the log states the reason"
        # Clients may read this sentence without a token, but not the location of the folder.
        path = split_query(self._folder)[0].rpartition("://")[2]
        return error.what.replace(path, "…").replace(unquote(path), "…")

    def _heal(self) -> bool:
        """Load the newest full export after the current delta; return False if there is none.

        The newest full export is loaded in any case if the folder contains the deltas of another run (another stream),
        or if table shards can no longer load the current state.
        """
        stream, is_lost = find_stream(self._folder), self.versions.current.scorer.lookups.refusal is not None
        is_same = stream is None or stream.id == self.position.manifest.stream
        loaded = self._load_newest(self.position.number if is_same and not is_lost else 0, background=True)
        if loaded is None:
            return False
        versions, position = loaded

        def replace() -> None:
            self.versions.replace(versions.current)
            self.position = position
            self._clear_problem()

        self._switch(replace)
        _log.warning("this replica has loaded a full export, and serves step %s", position.manifest.step)
        return True

    def _load_newest(self, newer_than: int, background: bool) -> tuple[LoadedExports, Position] | None:
        """Load the newest usable full export after delta `newer_than`, and apply the deltas after the export.

        Returns:
            The export, and the position of the last applied delta; None if there is no such export.

        Raises:
            RaytrecError: None of these exports can be loaded; the error is that of the newest one.
        """
        failure: RaytrecError | None = None
        for uri, position in iterate_exports(self._folder, newer_than):
            try:
                make_lookups = self._make_maker and self._make_maker(position=position)
                versions = LoadedExports(uri, self._allow_code, background, make_lookups)
                return versions, self._catch_up(versions.current.scorer, position)
            except RaytrecError as error:
                failure = failure or error
        if failure:
            raise failure
        return None

    def _catch_up(self, scorer: Scorer, position: Position) -> Position:
        """Apply the deltas after a full export until one cannot be used, and return the position that is reached."""
        while True:
            try:
                prepared = self._prepare_next(scorer, position)
            except Exception as error:  # the export can be served without this delta
                _log.warning("not all deltas after the full export can be applied: %s", error)
                return position
            if prepared is None:
                return position
            prepared.apply()
            position, self._skips = prepared.position, False
