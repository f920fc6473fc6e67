"""The MLflow run of a training run, written from a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

from raytrec.common.formatting import count
from raytrec.common.redaction import hide_all
from raytrec.config.run_config import RunConfig
from raytrec.tracking.calls import FILES, RECORDS, Calls
from raytrec.tracking.failures import closed_to_us, reason, unreachable
from raytrec.tracking.feed import NOTE, Feed
from raytrec.tracking.store import CORRECT, Store, cannot_open, place_for_artifacts
from raytrec.tracking.tags import in_parts, parameters

READY_S = 5.0  # a server that has not answered by then is waited for no longer
EVERY_S = 1.0  # from the beginning of one round of writing to the next
WRITE_S = 0.25  # of each round: writing shares the driver's processors with training
PARAM_LENGTH, TAG_LENGTH = 6000, 8000  # characters
LOG_IN = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"


class NoTracker:
    """In a Tracker's place where nothing is to be recorded (tracking.enabled=false): calls do nothing."""

    uri: str | None = None
    run_id: str | None = None

    def begin(self) -> None: ...
    def check(self) -> None: ...
    def ready(self, patience_s: float | None = None) -> None: ...
    def params(self, config: RunConfig) -> None: ...
    def tags(self, tags: Mapping[str, str]) -> None: ...
    def line(self, file: str, line: dict[str, Any]) -> None: ...
    def file(self, path: Path, folder: str = "") -> None: ...
    def close(self, status: str, patience_s: float = 0.0) -> None: ...


class Tracker:
    """Writes one MLflow run out of a run folder: what its lines say, as they are added.

    A thread looks for new lines about once a second and writes them in as few calls as possible; up to which
    byte the store has them is kept in the run folder (tracking.feed), so that nothing is lost, and nothing
    written twice, when a driver dies and the run is resumed. When the store does not answer, is locked or
    fails on its side, the thread tries again after 1 s, 2 s, … 30 s. What it will never take (a file that is
    missing, a record that it refuses) is dropped; `close` says how much that was.

    Args:
        uri: tracking store or server, for example sqlite:////runs/mlflow.db or http://127.0.0.1:5000. Tokens
            and passwords come from MLflow's environment variables.
        experiment: made if it does not exist.
        name: name of the run.
        folder: of the run. Which MLflow run it has, is kept there; a new one is made where the store does not
            have that.
        artifacts: folder for artifacts where the store is an sqlite file; default: as of
            store.place_for_artifacts.
        parent: the run becomes a child of the MLflow run of that name, made if need be.
        max_series: tracking.max_rank_table_series.
        tags: of a new run.
        on_trouble: called from the thread with a sentence when the store stops answering and with another
            when it is back.
        at_once: else the thread, whose first act is to import MLflow, waits for `begin`.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        name: str,
        folder: Path,
        *,
        artifacts: Path | None = None,
        parent: str | None = None,
        max_series: int = 0,
        tags: Mapping[str, str] | None = None,
        on_trouble: Callable[[str], None] | None = None,
        at_once: bool = True,
    ):
        self.uri, self._folder = uri, folder
        noted = (folder / NOTE).is_file()
        self._feed = Feed(folder, max_series)
        before = self._feed.delivered
        self._store = Store(
            uri,
            experiment,
            name,
            artifacts or place_for_artifacts(uri, folder),
            before.key,
            asked=noted,
            before=before.run_id,
            parent=parent,
            tags=tags,
        )
        self._params: dict[str, str] = {}
        self._tags: deque[dict[str, str]] = deque()
        self._files: dict[tuple[Path, str], None] = {}  # as an ordered set
        self._calls = Calls(on_trouble or (lambda sentence: None))
        self._lock = Lock()
        self._refusal: Exception | None = None  # why the store cannot be opened at all
        self._started = False  # from here on nothing is a reason to stop
        self._status: str | None = None  # with which the run is to be ended
        self._joined = self._ended = False
        self._loaded, self._tried = Event(), Event()
        self._closing, self._over = Event(), Event()
        # A daemon, unlike the threads of an executor: the end of the process does not wait for a dead server.
        self._thread = Thread(target=self._work, name="mlflow", daemon=True)
        if at_once:
            self.begin()

    @property
    def run_id(self) -> str | None:
        """The run's id, as soon as the store has said it."""
        return self._store.run_id

    @property
    def waiting(self) -> int:
        """Lines that have not been written yet."""
        return self._feed.waiting

    def begin(self) -> None:
        """Starts the thread, unless that has been done."""
        if self._thread.ident is None:
            self._thread.start()

    def ready(self, patience_s: float | None = None) -> str | None:
        """Waits until the store has the run.

        Args:
            patience_s: for which a server that does not answer is waited for; default: 5.

        Returns:
            Its id; None when a server cannot be reached: then everything waits until it is there.

        Raises:
            ConfigError: when the store cannot be opened: a wrong address, a file that is no database, a
                server that wants another user.
        """
        self.begin()
        self._loaded.wait()
        patience_s = patience_s or READY_S
        tried = self._tried.wait(None if self._store.local else patience_s)
        with self._lock:
            self._started = True
        self.check()
        if not tried:
            self._calls.failed(RECORDS, TimeoutError(f"no answer within {patience_s:.0f} s"))
        return self.run_id

    def check(self) -> None:
        """
        Raises:
            ConfigError: the store cannot be opened (`ready`), as far as is known now.
        """
        if self._refusal:
            do = LOG_IN if closed_to_us(self._refusal) else CORRECT
            raise cannot_open(self.uri, reason(self._refusal), do) from None

    def params(self, config: RunConfig) -> None:
        """Every knob of the configuration as section.key, unless the MLflow run has them already."""
        self._params = parameters(config)

    def tags(self, tags: Mapping[str, str]) -> None:
        """Tags of the run; one that it has already gets the new value."""
        self._tags.extend(in_parts(hide_all({k: str(v) for k, v in tags.items()}), TAG_LENGTH))

    def line(self, file: str, line: dict[str, Any]) -> None:
        """A line that the run folder does not take: it waits for room there, and MLflow gets it now."""
        self._feed.add(file, line)

    def file(self, path: Path, folder: str = "") -> None:
        """Keeps a file as an artifact, as it is when it gets written, in a folder of the run's artifacts."""
        with self._lock:
            self._files.setdefault((Path(path), folder))

    def close(self, status: str, patience_s: float = 30.0) -> str | None:
        """Writes what is left and ends the run with FINISHED, FAILED or KILLED.

        Args:
            patience_s: seconds that this may take. Ctrl-C ends the waiting, too.

        Returns:
            None, or what is missing in MLflow (an error that `ready` has raised is not said again).
        """
        self._status = status
        self.begin()
        self._calls.hurry()
        self._closing.set()
        late = f"not written within {patience_s:g} s"
        try:
            self._thread.join(patience_s)
        except KeyboardInterrupt:
            late = "interrupted"
        finally:
            self._over.set()
        return None if self._refusal else self._missing(late)

    def _missing(self, late: str) -> str | None:
        dropped = self._calls.dropped + self._feed.dropped
        records = self._feed.waiting + len(self._tags) + len(self._files) + dropped
        missing = [count(records, "record")] if records else []
        missing += [] if self._ended else ["the end of the run"]
        if not missing:
            return None
        why = self._calls.why or self._feed.why or late
        return f"MLflow lacks {' and '.join(missing)} ({why})"

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
            if self._ended and not self._files:
                return
            self._rest(began + EVERY_S)

    def _round(self, until: float) -> None:
        """Does what can be done now; writes no longer than `until`, unless the run is being closed."""
        closing = self._closing.is_set()
        if self._calls.wait_s(RECORDS) or not self._open():
            return
        if not self._joined:
            self._joined = self._calls.make(RECORDS, self._store.join_parent)
        written = self._write_texts() and self._write_lines(until)
        if not self._calls.failing(RECORDS) and not self._calls.wait_s(FILES):
            self._upload(until)
        uploaded = not self._files or self._calls.failing(FILES)
        if closing and written and uploaded and not self._ended:
            self._ended = self._calls.make(RECORDS, self._end)

    def _rest(self, until: float) -> None:
        """Waits until the next round, and for as long as the store is in trouble."""
        pause = self._calls.wait_s(RECORDS)
        if self._closing.is_set():
            self._over.wait(pause or self._calls.wait_s(FILES))
        else:
            self._closing.wait(max(pause, until - monotonic()))

    def _open(self) -> bool:
        """Whether the store has the run. One that refuses us at the start is the end of it."""
        if self.run_id:
            return True
        self._feed.delivered.write(self._folder)  # with the key of a run that may be made now
        try:
            self._store.open()
        except Exception as error:
            with self._lock:
                if not self._started and not unreachable(error):
                    self._refusal = error
            if not self._refusal:
                self._calls.failed(RECORDS, error)
        else:
            self._feed.use_run(self._store.run_id)
            self._calls.worked(RECORDS)
        self._tried.set()
        return self.run_id is not None

    def _write_texts(self) -> bool:
        """Writes parameters and tags; False if they have to be written later."""
        if self._params and not self._feed.delivered.params:
            for part in in_parts(self._params, PARAM_LENGTH):
                if not self._calls.make(RECORDS, partial(self._store.write_params, part)):
                    return False
            self._feed.params_written()
        while self._tags:
            if not self._calls.make(RECORDS, partial(self._store.write_tags, self._tags[0])):
                return False
            self._tags.popleft()
        return True

    def _write_lines(self, until: float) -> bool:
        """Writes lines of the run folder; False if some have to be written later."""
        while batch := self._feed.next_batch():
            if batch.records:
                write = partial(self._store.write_metrics, batch.records)
                if not self._calls.make(RECORDS, write, self._feed.refused, self._feed.written):
                    return False
            else:
                self._feed.written()
            if self._is_time(until):
                return False
        return True

    def _upload(self, until: float) -> None:
        while self._files:
            file = next(iter(self._files))
            if not self._calls.make(FILES, partial(self._store.upload, *file)):
                return
            with self._lock:
                del self._files[file]
            if self._is_time(until):
                return

    def _end(self) -> None:
        self._store.end(self._status)
        self._store.join_parent()

    def _is_time(self, until: float) -> bool:
        return self._over.is_set() or (monotonic() > until and not self._closing.is_set())
