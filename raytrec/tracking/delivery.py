"""Deliver a run folder to MLflow."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from time import monotonic, sleep
from typing import Any

from raytrec.common.documents import find_document
from raytrec.common.errors import ConfigError
from raytrec.common.formatting import flatten, format_count
from raytrec.common.processes import lock_file
from raytrec.common.redaction import hide, hide_all
from raytrec.compat.mlflow_ import block_unneeded_packages, is_transient, is_unreachable, reason
from raytrec.config.run_config import RunConfig
from raytrec.tracking.mlflow_records import INVALID_NAME_CHARACTERS, RecordReader
from raytrec.tracking.run_folder import CHECK_RESULT, CONFIG, PLAN, REPORT, RESULT, SCHEMA, TAGS
from raytrec.tracking.store import Store, explain_open_error

ARTIFACTS = (CONFIG, SCHEMA, PLAN, RESULT, REPORT, CHECK_RESULT)
LOCK = "mlflow.lock"
ROUND_INTERVAL_S = 1.0  # interval between the starts of consecutive rounds of writing
FINAL_ROUND_TIMEOUT_S = 25.0  # time limit of the last round, after training has ended
MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 1.0, 30.0  # shortest and longest delay between retries
RECOVERY_NOTICE = "MLflow accepts records again; the missing records are being written"
MAX_TEXTS_PER_CALL = 100  # maximum number of parameters or tags in one call to MLflow
MAX_PARAM_LENGTH, MAX_TAG_LENGTH = 6000, 8000  # maximum lengths in characters


class Delivery:
    """Writer that copies a run folder to one MLflow run.

    The run folder stores the offset up to which lines have been delivered (tracking.mlflow_records). Therefore no
    record is lost if this process dies, although a batch may be sent twice. If the store does not respond, is locked or
    fails, delivery is retried after 1 s, 2 s, 4 s, … 30 s. Records that the store permanently rejects are dropped;
    `finish` reports their number.

    Args:
        folder: Run folder, which stores the id of the MLflow run; if the store cannot continue that run, a new run is
            created.
        config: Configuration of the run, with the tracking settings. Tokens and passwords are read from
            MLflow's environment variables.
        notify: Function called with a message when delivery starts to fail, and when it succeeds again.
    """

    def __init__(self, folder: Path, config: RunConfig, notify: Callable[[str], None]):
        self.uri, self._folder, self._notify = config.tracking.uri, folder, notify
        self._feed = RecordReader(folder)
        self._store = Store(config, folder, self._feed.delivered.key, self._feed.delivered.run_id)
        self._params = parameters(config)
        self._tags: dict[str, str] = {}  # tags that have been written to the store
        self._uploaded: dict[Path, tuple[int, int]] = {}  # file → (modification time, size)
        self._joined = self._tried = self._ended = False
        self._final_status: str | None = None  # final status of the run; None during training
        self._pause_s, self._max_delay_s, self._next = 0.0, MAX_RETRY_DELAY_S, 0.0
        self._why, self._why_rejected, self._dropped = "", "", 0

    @property
    def run_id(self) -> str | None:
        """Return the id of the MLflow run; None until the run has been found or created in the store."""
        return self._store.run_id

    def deliver(self) -> bool:
        """Write missing records; return False if a retry is pending, else True.

        Everything has then been written, except records that the store permanently rejected.

        Raises:
            ConfigError: The store cannot be opened at the first attempt although it is available, e.g. because a file
                is not a database, the experiment is deleted, or the server requires other credentials.
        """
        if monotonic() < self._next:
            return False
        try:
            self._open()
            self._write_description()
            self._write_lines()
            self._upload_files()
            if self._final_status and not self._ended:
                self._ended = self._attempt(self._end, self._final_status)
        except ConfigError:
            raise
        except Exception as error:
            self._schedule_retry(error)
            return False
        self._report_recovery()
        return True

    def finish(self, status: str, patience_s: float) -> str | None:
        """Write all remaining records, and end the MLflow run with FINISHED, FAILED or KILLED.

        Args:
            status: Final status of the run.
            patience_s: Seconds for which writing is retried if it fails; 0: only one attempt.

        Returns:
            Message for users that states what MLflow lacks and, if known, why; None if MLflow has everything.

        Raises:
            ConfigError: The store cannot be opened; see `deliver`.
        """
        until = monotonic() + patience_s
        self._final_status, self._max_delay_s, self._next = status, MIN_RETRY_DELAY_S, 0.0
        while not self.deliver() and self._next < until:
            sleep(max(0.0, self._next - monotonic()))
        dropped = self._dropped + self._feed.dropped
        records = self._feed.waiting + len(self._changed_files()) + dropped
        missing = [format_count(records, "record")] if records else []
        missing += [] if self._ended else ["the end of the run"]
        why = self._why or self._why_rejected or self._feed.why
        return f"MLflow lacks {' and '.join(missing)}" + (f" ({why})" if why else "") if missing else None

    def _attempt(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Call the store. Return False if the store permanently rejected the call; re-raise transient errors."""
        try:
            call(*arguments)
        except Exception as error:
            if is_transient(error):
                raise
            self._why_rejected = reason(error)
            return False
        return True

    def _write(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call the store, and count the call as dropped if the store permanently rejected it."""
        self._dropped += not self._attempt(call, *arguments)

    def _schedule_retry(self, error: Exception) -> None:
        if not self._pause_s:
            kept = "records stay in the run folder, and writing is retried"
            self._notify(f"cannot write to MLflow at {hide(self.uri)} ({reason(error)}): {kept}")
        self._why = reason(error)
        self._pause_s = min(2 * self._pause_s or MIN_RETRY_DELAY_S, self._max_delay_s)
        self._next = monotonic() + self._pause_s

    def _open(self) -> None:
        """Find or create the MLflow run, unless this has been done; raise errors as `deliver`.

        An error at a later attempt, or of an unavailable store, is raised as another exception, after which
        `deliver` tries again.
        """
        if self.run_id:
            return
        first, self._tried = not self._tried, True
        self._feed.delivered.write(self._folder)  # stores the key before the run is created
        try:
            self._store.open()
        except ConfigError as error:  # a delivery that has already begun is not stopped
            if first:
                raise
            raise RuntimeError(error.what) from None
        except Exception as error:
            if first and not is_unreachable(error):
                raise explain_open_error(self.uri, error) from None
            raise
        self._feed.use_run(self._store.run_id)

    def _write_description(self) -> None:
        """Join the parent run and write the parameters once; write all tags whenever any tag has changed."""
        if not self._joined:
            self._joined = self._attempt(self._store.join_parent) or True
        if not self._feed.delivered.params:
            for part in split_texts(self._params, MAX_PARAM_LENGTH):
                self._write(self._store.write_params, part)
            self._feed.delivered.params = True
            self._feed.delivered.write(self._folder)
        tags = find_document(str(self._folder / TAGS), dict[str, Any]) or {}
        tags = hide_all({key: str(value) for key, value in tags.items()})
        if tags != self._tags:
            for part in split_texts(tags, MAX_TAG_LENGTH):
                self._write(self._store.write_tags, part)
            self._tags = tags

    def _write_lines(self) -> None:
        """Write all batches of records; if the store permanently rejects a batch, write its records one by one."""
        while batch := self._feed.next_batch():
            if not self._attempt(self._store.write_metrics, batch.records):
                for record in batch.records:
                    self._write(self._store.write_metrics, [record])
            self._feed.mark_batch_written()
            self._report_recovery()  # a slow store may take long to write all records

    def _report_recovery(self) -> None:
        if self._pause_s:
            self._pause_s, self._why = 0.0, ""
            self._notify(RECOVERY_NOTICE)

    def _upload_files(self) -> None:
        for path, version in self._changed_files().items():
            place = "" if path.parent == self._folder else path.parent.name
            self._write(self._store.upload, path, place)
            self._uploaded[path] = version

    def _changed_files(self) -> dict[Path, tuple[int, int]]:
        """Return path → (modification time, size) of each file whose current version has not been uploaded."""
        paths = [*map(self._folder.joinpath, ARTIFACTS), *sorted(self._folder.glob("pictures/*.svg"))]
        versions = {}
        for path in paths:
            with suppress(OSError):
                about = path.stat()
                versions[path] = about.st_mtime_ns, about.st_size
        return {path: version for path, version in versions.items() if self._uploaded.get(path) != version}

    def _end(self, status: str) -> None:
        self._store.end(status)
        self._store.join_parent()


def parameters(config: RunConfig) -> dict[str, str]:
    """Return the settings of a configuration as section.key → text, without secrets; empty mappings are omitted.

    A mapping with a key that MLflow does not allow in names, such as the pattern 'item*', becomes a single parameter.
    """
    values = hide_all(config.model_dump(by_alias=True))
    flat = flatten(values, whole=lambda inner: any(INVALID_NAME_CHARACTERS.search(name) for name in inner))
    return {key: str(value) for key, value in flat.items()}


def split_texts(texts: Mapping[str, str], length: int) -> list[dict[str, str]]:
    """Split parameters or tags into mappings of at most MAX_TEXTS_PER_CALL, one per call to MLflow.

    Secrets in values are hidden, and values are cut to `length` characters.
    """
    items = [(key, hide(value)[:length]) for key, value in texts.items()]
    return [dict(items[i : i + MAX_TEXTS_PER_CALL]) for i in range(0, len(items), MAX_TEXTS_PER_CALL)]


@contextmanager
def hold_delivery_lock(folder: Path) -> Iterator[None]:
    """Hold the delivery lock of a run folder (mlflow.lock) for the duration of the block; wait for other processes.

    On file systems without locks, or if the lock file cannot be created or opened, the block runs without a lock.
    """
    try:
        file = open(folder / LOCK, "a", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError:
        yield
        return
    with file:
        lock_file(file, wait=True)
        yield


def follow(folder: Path, config: RunConfig) -> None:
    """Deliver a run to MLflow during training until its final status arrives (`raytrec track RUN --follow`).

    The driver writes the final status to standard input; if the input ends without a status, the driver has died.
    JSON lines are written to standard output: {"note": message for users}, {"run_id": id of the MLflow run}, and at the
    end {"missing": message or null}, or {"refused": parts of the error} if the store cannot be opened.

    From this call on, the process ignores SIGTERM, and cannot import pandas, numpy and scipy.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends with its driver, which may still have to save
    block_unneeded_packages()
    status, sent_id = None, None
    with hold_delivery_lock(folder):
        delivery = Delivery(folder, config, lambda text: _print_message("note", text))
        try:
            while status is None:
                began = monotonic()
                delivery.deliver()
                if delivery.run_id != sent_id:
                    _print_message("run_id", sent_id := delivery.run_id)
                status = _read_status(max(0.0, began + ROUND_INTERVAL_S - monotonic()))
            _print_message(
                "missing", delivery.finish(status or read_final_status(folder), FINAL_ROUND_TIMEOUT_S if status else 0)
            )
        except ConfigError as error:
            _print_message("refused", error.parts)
        except Exception as error:
            why = f"{type(error).__name__}: {reason(error)}"
            _print_message("missing", f"MLflow may lack the end of the run and other records ({why})")


def read_final_status(folder: Path) -> str:
    """Return the final status of a run whose driver has exited: FINISHED if result.json exists, else FAILED."""
    return "FINISHED" if (folder / RESULT).is_file() else "FAILED"


def _read_status(wait_s: float) -> str | None:
    """Return the status from standard input, "" at the end of input, or None if neither arrives within `wait_s`."""
    if not select([sys.stdin], [], [], wait_s)[0]:
        return None
    return os.read(sys.stdin.fileno(), 100).decode().strip()


def _print_message(kind: str, value: Any) -> None:
    with suppress(OSError):  # the driver may have died
        print(json.dumps({kind: value}), flush=True)
