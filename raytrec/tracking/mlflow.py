"""The MLflow run of a training run, written from a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic, time

from raytrec.common.errors import ConfigError
from raytrec.common.redaction import hide, hide_all
from raytrec.config.run_config import RunConfig
from raytrec.tracking.failures import closed_to_us, may_pass, reason, unreachable
from raytrec.tracking.outbox import Outbox, Record
from raytrec.tracking.store import Store
from raytrec.tracking.trouble import Trouble

READY_S = 5.0  # a server that has not answered by then is waited for no longer
EVERY_S = 1.0  # from the beginning of one round of writing to the next
WRITE_S = 0.25  # of each round: writing shares the driver's processors with training
RECORDS, FILES = "records", "files"  # the two ways to a store: artifacts may lie elsewhere
CORRECT = "correct tracking.uri, or leave it out for a local sqlite store"
LOG_IN = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
KEPT = "training goes on; what there is to record is kept and written when it is back"
BACK = "MLflow is back; what waited is being written"


class NoTracker:
    """In a Tracker's place where nothing is to be recorded (tracking.enabled=false): calls do nothing."""

    uri: str | None = None
    run_id: str | None = None

    def ready(self) -> None: ...
    def params(self, config: RunConfig) -> None: ...
    def tags(self, tags: Mapping[str, str]) -> None: ...
    def metrics(
        self, figures: Mapping[str, float | None], step: int, unix_s: float | None = None
    ) -> None: ...
    def file(self, path: Path, folder: str = "") -> None: ...
    def close(self, status: str, patience_s: float = 0.0) -> None: ...


class Tracker:
    """Writes one MLflow run. Its calls hand over and return at once, whatever the store does.

    A thread writes what waits about once a second, in as few calls as possible. When the store does not
    answer, is locked or fails on its side, everything is kept, in order, and tried again after 1 s, 2 s, …
    30 s. What it will never take (a file that is missing, a record that it refuses) is dropped; `close` says
    how much that was.

    Args:
        uri: tracking store or server, for example sqlite:////runs/mlflow.db or http://127.0.0.1:5000. Tokens
            and passwords come from MLflow's environment variables.
        experiment: made if it does not exist.
        name: name of the run.
        artifacts: folder for artifacts where the store is an sqlite file.
        run_id: of a run to go on with; if the store does not have it, a new one is made.
        sweep: name of a sweep: the run becomes a child of the MLflow run of that name, made if need be.
        tags: of a new run.
        on_trouble: called from the thread with a sentence when the store stops answering and with another
            when it is back.

    Example:
        >>> tracker = Tracker("sqlite:///mlflow.db", "raytrec", "try", Path("mlartifacts"))
        >>> tracker.metrics({"train.logloss": 0.5}, step=20)
        >>> tracker.close("FINISHED")
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        name: str,
        artifacts: Path,
        run_id: str | None = None,
        *,
        sweep: str | None = None,
        tags: Mapping[str, str] | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ):
        self.uri = uri
        self._store = Store(uri, experiment, name, artifacts, run_id, sweep, dict(tags or {}))
        self._outbox = Outbox()
        self._trouble = Trouble(on_trouble or (lambda sentence: None))
        self._lock = Lock()
        self._refusal: Exception | None = None  # why the store cannot be opened at all
        self._started = False  # from here on nothing is a reason to stop
        self._status: str | None = None  # with which the run is to be ended
        self._why = ""  # the last failure
        self._joined = self._ended = False
        self._loaded, self._tried = Event(), Event()
        self._put, self._closing, self._over = Event(), Event(), Event()
        # A daemon, unlike the threads of an executor: the end of the process does not wait for a dead server.
        self._thread = Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """The run's id, as soon as the store has said it."""
        return self._store.run_id

    @property
    def waiting(self) -> int:
        """Records that have not been written yet."""
        return self._outbox.records

    def ready(self) -> str | None:
        """Waits until the store has the run.

        Returns:
            Its id; None when a server cannot be reached within 5 s: then everything waits until it is there.

        Raises:
            ConfigError: when the store cannot be opened: a wrong address, a file that is no database, a
                server that wants another user.
        """
        self._loaded.wait()
        tried = self._tried.wait(None if self._store.local else READY_S)
        with self._lock:
            self._started = True
        if self._refusal:
            raise ConfigError(
                f"cannot open the MLflow store: {reason(self._refusal)}",
                where=f"tracking.uri={hide(self.uri)}",
                expected="sqlite:///FILE or the address of an MLflow server",
                do=LOG_IN if closed_to_us(self._refusal) else CORRECT,
            ) from None
        if not tried:
            self._failed(RECORDS, TimeoutError(f"no answer within {READY_S:.0f} s"))
        return self.run_id

    def params(self, config: RunConfig) -> None:
        """Every knob of the configuration as section.key."""
        self._outbox.put_params(hide_all(config.model_dump(by_alias=True)))
        self._put.set()

    def tags(self, tags: Mapping[str, str]) -> None:
        """Tags of the run; one that it has already gets the new value."""
        self._outbox.put_tags(hide_all({k: str(v) for k, v in tags.items()}))
        self._put.set()

    def metrics(self, figures: Mapping[str, float | None], step: int, unix_s: float | None = None) -> None:
        """Metrics of one step, at a time (default: now). What is None or not finite is left out."""
        self._outbox.put_metrics(figures, step, time() if unix_s is None else unix_s)
        self._put.set()

    def file(self, path: Path, folder: str = "") -> None:
        """Keeps a file as an artifact, as it is when it gets written, in a folder of the run's artifacts."""
        self._outbox.put_file(Path(path), folder)
        self._put.set()

    def close(self, status: str, patience_s: float = 30.0) -> str | None:
        """Writes what is left and ends the run with FINISHED, FAILED or KILLED.

        Args:
            patience_s: seconds that this may take. Ctrl-C ends the waiting, too.

        Returns:
            None, or what is missing in MLflow (an error that `ready` has raised is not said again).
        """
        self._status = status
        self._trouble.hurry()
        self._closing.set()
        self._put.set()
        try:
            self._thread.join(patience_s)
        except KeyboardInterrupt:
            pass
        finally:
            self._over.set()
        if self._refusal:
            return None
        return self._missing()

    def _missing(self) -> str | None:
        records = self._outbox.records + self._outbox.files + self._outbox.dropped
        missing = [f"{records:,} record{'s' * (records != 1)}"] if records else []
        missing += [] if self._ended else ["the end of the run"]
        if not missing:
            return None
        why = f" ({self._why})" if self._why else ""
        return f"MLflow lacks {' and '.join(missing)}{why}"

    def _work(self) -> None:
        """The thread: rounds until the run is ended, or `close` waits no longer."""
        try:
            self._store.load()
        except Exception as error:
            self._refusal = error
            self._tried.set()
        self._loaded.set()
        while not self._over.is_set() and not self._refusal:
            began = monotonic()
            self._round(began + WRITE_S)
            if self._ended and not self._outbox.files:
                return
            self._rest(began + EVERY_S)

    def _round(self, until: float) -> None:
        """Does what can be done now; writes no longer than `until`, unless the run is being closed."""
        if self._trouble.wait_s(RECORDS) or not self._open():
            return
        if not self._joined:
            self._joined = self._call(RECORDS, self._store.join_sweep)
        self._write(until)
        if RECORDS not in self._trouble and not self._trouble.wait_s(FILES):
            self._upload(until)
        waits = self._outbox.records or (self._outbox.files and FILES not in self._trouble)
        if self._closing.is_set() and not waits and not self._ended:
            self._ended = self._call(RECORDS, self._end)

    def _rest(self, until: float) -> None:
        """Waits for something to do, until the next round, and for as long as the store is in trouble."""
        pause = self._trouble.wait_s(RECORDS)
        if self._closing.is_set():
            self._over.wait(pause or self._trouble.wait_s(FILES))
            return
        self._closing.wait(max(pause, until - monotonic()))
        if self._joined and not self._outbox.records and not self._outbox.files:
            self._put.wait()
        self._put.clear()

    def _open(self) -> bool:
        """Whether the store has the run. One that refuses us at the start is the end of it."""
        if self.run_id:
            return True
        try:
            self._store.open()
        except Exception as error:
            with self._lock:
                if not self._started and not unreachable(error):
                    self._refusal = error
            if not self._refusal:
                self._failed(RECORDS, error)
        else:
            self._trouble.worked(RECORDS, BACK)
        self._tried.set()
        return self.run_id is not None

    def _write(self, until: float) -> None:
        """Writes what waits by now; what comes meanwhile shares the calls of the next round."""
        left = self._outbox.records
        while left > 0 and (records := self._outbox.first_records()):
            left -= len(records)
            refused = partial(self._outbox.refused, len(records))
            if not self._call(RECORDS, partial(self._send, records), refused) or self._is_time(until):
                return

    def _send(self, records: list[Record]) -> None:
        self._store.write(records)
        self._outbox.written(len(records))

    def _upload(self, until: float) -> None:
        while file := self._outbox.first_file():
            refused = partial(self._outbox.uploaded, *file, lost=True)
            if not self._call(FILES, partial(self._send_file, *file), refused) or self._is_time(until):
                return

    def _send_file(self, path: Path, folder: str) -> None:
        self._store.upload(path, folder)
        self._outbox.uploaded(path, folder)

    def _end(self) -> None:
        self._store.end(self._status)
        self._store.join_sweep()

    def _is_time(self, until: float) -> bool:
        return self._over.is_set() or (monotonic() > until and not self._closing.is_set())

    def _call(self, way: str, call: Callable[[], None], refused: Callable[[], None] | None = None) -> bool:
        """Makes a call to the store; False if it has to be made again later.

        Args:
            way: RECORDS or FILES.
            refused: called when the store will never do it; then there is nothing to be done later, either.
        """
        try:
            call()
        except Exception as error:
            if may_pass(error):
                self._failed(way, error)
                return False
            self._why = reason(error)
            (refused or self._outbox.lost)()
            return True
        self._trouble.worked(way, BACK)
        return True

    def _failed(self, way: str, error: Exception) -> None:
        self._why = reason(error)
        does_not = "does not answer" if way == RECORDS else "does not take files"
        self._trouble.failed(way, f"MLflow {does_not} ({self._why}): {KEPT}")
