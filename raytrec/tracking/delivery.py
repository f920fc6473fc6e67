"""Delivery of a run folder to MLflow."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from time import monotonic, sleep
from typing import Any

from raytrec.common.documents import find_document
from raytrec.common.errors import ConfigError
from raytrec.common.formatting import count
from raytrec.common.processes import lock
from raytrec.common.redaction import hide_all
from raytrec.compat.mlflow_ import leave_out_dispensable
from raytrec.config.run_config import RunConfig
from raytrec.tracking.failures import closed_to_us, may_pass, reason, unreachable
from raytrec.tracking.feed import Feed
from raytrec.tracking.run_folder import CHECK_RESULT, CONFIG, PLAN, REPORT, RESULT, SCHEMA, TAGS
from raytrec.tracking.store import CORRECT, Store, cannot_open
from raytrec.tracking.translate import in_parts, parameters

ARTIFACTS = (CONFIG, SCHEMA, PLAN, RESULT, REPORT, CHECK_RESULT)
LOCK = "mlflow.lock"
EVERY_S = 1.0  # interval between the starts of two rounds of writing
LAST_S = 25.0  # time limit of the last round, after training has ended
FIRST_S, LONGEST_S = 1.0, 30.0  # shortest and longest delay between two retries
BACK = "MLflow is back; the records that it lacks are being written"
PARAM_LENGTH, TAG_LENGTH = 6000, 8000  # characters
LOG_IN = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"


class Delivery:
    """Writer of one MLflow run from a run folder.

    The run folder stores the offset up to which the store has the lines (tracking.feed). Therefore no record
    is lost or written twice when this process dies. If the store does not answer, is locked or fails, the
    call is retried after 1 s, 2 s, … 30 s. Records that the store rejects permanently are dropped; `finish`
    reports their number.

    Args:
        folder: Run folder, which stores the id of the MLflow run; if the store does not have it, a run is
            created.
        config: Configuration of the run with the tracking settings. Tokens and passwords come from MLflow's
            environment variables.
        notify: Function called with a sentence when the store stops answering and when it answers again.
    """

    def __init__(self, folder: Path, config: RunConfig, notify: Callable[[str], None]):
        self.uri, self._folder, self._notify = config.tracking.uri, folder, notify
        self._feed = Feed(folder)
        self._store = Store(config, folder, self._feed.delivered.key, self._feed.delivered.run_id)
        self._params = parameters(config)
        self._tags: dict[str, str] = {}  # tags that the store has
        self._uploaded: dict[Path, tuple[int, int]] = {}  # file → (modification time, size)
        self._joined = self._tried = self._ended = False
        self._status: str | None = None  # final status of the run; None during training
        self._pause_s, self._longest_s, self._next = 0.0, LONGEST_S, 0.0
        self._why, self._dropped = "", 0

    @property
    def run_id(self) -> str | None:
        """Return the id of the MLflow run; None until the store has the run."""
        return self._store.run_id

    def deliver(self) -> bool:
        """Write missing records unless a retry is pending. Return True if the store has all records.

        Raises:
            ConfigError: The store cannot be opened at the first attempt: a wrong address, a file that is not
                a database, or a server that requires other credentials.
        """
        if monotonic() < self._next:
            return False
        try:
            self._open()
            self._describe()
            self._write_lines()
            self._upload()
            if self._status and not self._ended:
                self._ended = self._attempt(self._end, self._status)
        except ConfigError:
            raise
        except Exception as error:
            self._failed(error)
            return False
        if self._pause_s:
            self._pause_s = 0.0
            self._notify(BACK)
        return True

    def finish(self, status: str, patience_s: float) -> str | None:
        """Write the rest and end the run with FINISHED, FAILED or KILLED.

        Args:
            status: Status of the run.
            patience_s: Seconds during which a failing store is retried.

        Returns:
            A sentence about missing records, or None if MLflow has everything.

        Raises:
            ConfigError: As in `deliver`.
        """
        until = monotonic() + patience_s
        self._status, self._longest_s, self._next = status, FIRST_S, 0.0
        while not self.deliver() and self._next < until:
            sleep(max(0.0, self._next - monotonic()))
        dropped = self._dropped + self._feed.dropped
        records = self._feed.waiting + len(self._changed_files()) + dropped
        missing = [count(records, "record")] if records else []
        missing += [] if self._ended else ["the end of the run"]
        return f"MLflow lacks {' and '.join(missing)} ({self._why or self._feed.why})" if missing else None

    def _attempt(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Call the store. Return False if it rejected the call permanently; re-raise transient errors."""
        try:
            call(*arguments)
        except Exception as error:
            if may_pass(error):
                raise
            self._why = reason(error)
            return False
        return True

    def _write(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call the store, and count a call that it rejected permanently."""
        self._dropped += not self._attempt(call, *arguments)

    def _failed(self, error: Exception) -> None:
        if not self._pause_s:
            kept = "records are kept in the run folder, and written when it is back"
            self._notify(f"MLflow does not answer ({reason(error)}): {kept}")
        self._why = reason(error)
        self._pause_s = min(2 * self._pause_s or FIRST_S, self._longest_s)
        self._next = monotonic() + self._pause_s

    def _open(self) -> None:
        """Find or create the run. If the store refuses access at the first attempt, raise ConfigError."""
        if self.run_id:
            return
        first, self._tried = not self._tried, True
        self._feed.delivered.write(self._folder)  # stores the key before the run is created
        try:
            self._store.open()
        except ConfigError as error:  # a run that has already begun is not stopped
            if first:
                raise
            raise RuntimeError(error.what) from None
        except Exception as error:
            if first and not unreachable(error):
                do = LOG_IN if closed_to_us(error) else CORRECT
                raise cannot_open(self.uri, reason(error), do) from None
            raise
        self._feed.use_run(self._store.run_id)

    def _describe(self) -> None:
        """Write the parent run, the parameters (section.key) unless already written, and changed tags."""
        if not self._joined:
            self._joined = self._attempt(self._store.join_parent) or True
        if not self._feed.delivered.params:
            for part in in_parts(self._params, PARAM_LENGTH):
                self._write(self._store.write_params, part)
            self._feed.params_written()
        tags = find_document(str(self._folder / TAGS), dict[str, Any]) or {}
        tags = hide_all({key: str(value) for key, value in tags.items()})
        if tags != self._tags:
            for part in in_parts(tags, TAG_LENGTH):
                self._write(self._store.write_tags, part)
            self._tags = tags

    def _write_lines(self) -> None:
        """Write all batches; if the store rejects a batch, write each record in a separate call."""
        while batch := self._feed.next_batch():
            if not self._attempt(self._store.write_metrics, batch.records):
                for record in batch.records:
                    self._write(self._store.write_metrics, [record])
            self._feed.written()

    def _upload(self) -> None:
        for path, version in self._changed_files().items():
            place = "" if path.parent == self._folder else path.parent.name
            self._write(self._store.upload, path, place)
            self._uploaded[path] = version

    def _changed_files(self) -> dict[Path, tuple[int, int]]:
        """Return files whose current version is not in the store, with their modification time and size."""
        paths = [*map(self._folder.joinpath, ARTIFACTS), *sorted(self._folder.glob("pictures/*.svg"))]
        found = {}
        for path in paths:
            with suppress(OSError):
                about = path.stat()
                found[path] = about.st_mtime_ns, about.st_size
        return {path: version for path, version in found.items() if self._uploaded.get(path) != version}

    def _end(self, status: str) -> None:
        self._store.end(status)
        self._store.join_parent()


@contextmanager
def one_delivery(folder: Path) -> Iterator[None]:
    """Hold the delivery lock of a run folder, after waiting until no other process delivers the run.

    On file systems without locks, or if the lock file cannot be created, the block runs without a lock.
    """
    try:
        file = open(folder / LOCK, "a", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError:
        yield
        return
    with file:
        lock(file, wait=True)
        yield


def follow(folder: Path, config: RunConfig) -> None:
    """Deliver a run during training until standard input ends: `raytrec track RUN --follow`.

    The last line of standard input is the final status of the run; without this line, the driver has died.
    Standard output has lines of JSON: {"note": a sentence for people}, {"run_id": …}, {"refused": parts of
    the error if the store cannot be opened}, and at the end {"missing": a sentence, or null}.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ends with its driver, which may still have to save
    leave_out_dispensable()
    status, told = None, None
    with one_delivery(folder):
        delivery = Delivery(folder, config, lambda text: _report("note", text))
        try:
            while status is None:
                began = monotonic()
                delivery.deliver()
                if delivery.run_id != told:
                    _report("run_id", told := delivery.run_id)
                status = _asked(max(0.0, began + EVERY_S - monotonic()))
            _report("missing", delivery.finish(status or status_of(folder), LAST_S if status else 0))
        except ConfigError as error:
            _report("refused", error.parts)
        except Exception as error:
            _report("missing", f"MLflow lacks the end of the run ({type(error).__name__}: {reason(error)})")


def status_of(folder: Path) -> str:
    """Return the status of a run whose driver has exited: FINISHED or FAILED."""
    return "FINISHED" if (folder / RESULT).is_file() else "FAILED"


def _asked(wait_s: float) -> str | None:
    """Return a status read from standard input; "" at its end; None if nothing arrived within wait_s."""
    if not select([sys.stdin], [], [], wait_s)[0]:
        return None
    return os.read(sys.stdin.fileno(), 100).decode().strip()


def _report(kind: str, value: Any) -> None:
    with suppress(OSError):  # a dead driver does not read
        print(json.dumps({kind: value}), flush=True)
