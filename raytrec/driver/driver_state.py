"""Lock, record (driver.json) and log of a run's driver."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, perf_counter, sleep, time
from typing import Any, TextIO

from pydantic import FiniteFloat
from typing_extensions import TypedDict

from raytrec.common.documents import find_document
from raytrec.common.errors import ErrorParts, RaytrecError, RunError, convert_os_errors
from raytrec.common.formatting import parse_number_or_zero
from raytrec.common.messages import EVENTS, METRICS
from raytrec.common.processes import lock_file
from raytrec.compat.ray_core import get_submission_id
from raytrec.tracking.run_folder import read_messages

# Exceptions raised for signals. While Ray is starting, Ray's own handlers end the process instead.
STOP_EXCEPTIONS = (KeyboardInterrupt, SystemExit)
DRIVER_RECORD_FILE, LOG_FILE = "driver.json", "run.log"


class DriverRecord(TypedDict, total=False):
    """Content of driver.json, which identifies the newest driver process of a run and states how this driver ended.

    Attributes:
        pid, started, host: Process id of the driver, its start time in clock ticks since boot, and its host name.
        job: Id of the driver's job in Ray's Job API; None outside of a job.
        unix_s: Start time of the driver (Unix time in seconds).
        seconds: Total duration of all drivers of the run that have ended, in seconds.
        status: RUNNING, FINISHED, STOPPED (by Ctrl-C or a signal) or FAILED; RUNNING remains after a kill.
        error: Parts of the error if the status is FAILED; None otherwise.
    """

    pid: int
    started: int | None
    host: str
    job: str | None
    unix_s: FiniteFloat
    seconds: FiniteFloat
    status: str
    error: ErrorParts | None


@contextmanager
def record_driver(folder: Path) -> Iterator[float]:
    """Record in driver.json of a run folder that this process drives the run and, after the block, how the block ended.

    Unless stderr is a terminal, text written to stderr is also appended to run.log. Write errors are ignored, because
    the run itself reports a full disk.

    Yields:
        Total duration of all earlier drivers of the run in seconds.
    """
    began, before_s = perf_counter(), _sum_driver_seconds(folder)
    note: DriverRecord = {
        "pid": os.getpid(),
        "started": _read_start_time(os.getpid()),
        "host": socket.gethostname(),
        "job": get_submission_id(),
        "unix_s": time(),
        "seconds": before_s,
        "status": "RUNNING",
        "error": None,
    }
    _write_record(folder, note)
    try:
        with _tee_stderr(folder / LOG_FILE):
            yield before_s
    except BaseException as error:
        note["status"] = "STOPPED" if isinstance(error, STOP_EXCEPTIONS) else "FAILED"
        if note["status"] == "FAILED":
            parts: ErrorParts = {"what": f"{type(error).__name__}: {error}"}
            note["error"] = error.parts if isinstance(error, RaytrecError) else parts
        raise
    else:
        note["status"] = "FINISHED"
    finally:
        note["seconds"] += perf_counter() - began
        _write_record(folder, note)


def read_driver_record(folder: Path) -> DriverRecord:
    """Return the content of driver.json in a run folder, or {} if the file is missing, unreadable or invalid."""
    return find_document(str(folder / DRIVER_RECORD_FILE), DriverRecord) or {}


def _sum_driver_seconds(folder: Path) -> float:
    """Return the total duration of all drivers so far, in seconds.

    A killed driver counts until its last recorded message.
    """
    note = read_driver_record(folder)
    seconds, begin = parse_number_or_zero(note.get("seconds")), parse_number_or_zero(note.get("unix_s"))
    if note.get("status") != "RUNNING":
        return seconds
    messages = [message for name in (METRICS, EVENTS) for message in deque(read_messages(folder, name), 1)]
    return seconds + max([0.0, *((message.unix_s or 0.0) - begin for message in messages)])


def is_alive(note: DriverRecord) -> bool | None:
    """Return True if the process of a driver record is running, False if it has ended; None for another host or {}."""
    if note.get("host") != socket.gethostname():
        return None
    started = _read_start_time(note.get("pid", 0))
    return started is not None and started == note.get("started")


def ask_to_stop(note: DriverRecord) -> None:
    """Send SIGTERM to the driver, which then saves the run and ends. This function must run on the driver's host.

    Raises:
        RunError: The driver process has ended, or this process runs on another host.
        PermissionError: The driver process belongs to another user.
    """
    if not is_alive(note):
        process = f"process {note.get('pid')} on {note.get('host')}"
        raise RunError(f"the driver of the run, {process}, has ended or runs on another host")
    os.kill(note["pid"], signal.SIGTERM)


def _read_start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks, or None if the process has exited.

    Together with the pid, the start time identifies a process uniquely.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the process name may contain spaces and parentheses
    return None if fields[0] == "Z" else int(fields[19])


def _write_record(folder: Path, note: DriverRecord) -> None:
    from raytrec.driver.recorder import write_json

    with suppress(OSError):  # a full disk, which the run itself reports
        write_json(folder / DRIVER_RECORD_FILE, note)


@contextmanager
def _tee_stderr(path: Path) -> Iterator[None]:
    stderr, file = sys.stderr, None
    if stderr is not None and not stderr.isatty():
        with suppress(OSError):  # a full disk, which the run itself reports
            file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            sys.stderr = _TeeStream(stderr, file)
    try:
        yield
    finally:
        sys.stderr = stderr
        if file:
            with suppress(OSError):  # text that could not be written to a full disk
                file.close()


class _TeeStream:
    """Stream whose text is also written to a file."""

    def __init__(self, stream: TextIO, file: TextIO):
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # a full disk, or a thread that outlives the run
            self._file.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


DRIVER_LOCK_FILE = "driver.lock"


@contextmanager
def hold_run_lock(folder: Path, patience_s: float, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run folder while the block runs. The system releases the lock if the process is killed.

    The folder is created if necessary. On file systems without locks, the block runs without a lock.

    Args:
        folder: Run folder.
        patience_s: Seconds to wait for another process, e.g. a driver that saves its last checkpoint; 0: no wait.
        report: Function called once, if the lock is not free, with a line that names the process that holds the lock.

    Raises:
        RunError: Another process still holds the lock after `patience_s`, or the folder cannot be written.
    """
    with convert_os_errors("cannot write the run folder", where=str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / DRIVER_LOCK_FILE).open("a+")
    with file:
        _acquire_lock(file, folder, patience_s, report)
        yield


def _acquire_lock(file, folder: Path, patience_s: float, report: Callable[[str], None]) -> None:
    deadline, is_reported = monotonic() + patience_s, False
    while True:
        try:
            lock_file(file)
            return
        except BlockingIOError:
            note = read_driver_record(folder)
            is_driver = note.get("status") == "RUNNING" and is_alive(note) is not False  # raytrec track also locks
            holder = "process {pid} on {host}".format(**note) if is_driver else "another process"
        if monotonic() > deadline:
            raise RunError(
                f"the folder is already in use by {holder}",
                where=str(folder),
                expected="one raytrec command per folder at a time",
                do="wait until the other command ends, or stop it; for a new run, choose another run.name or run.dir",
            )
        if not is_reported:
            report(f"waiting for {holder} to release {folder}")
            is_reported = True
        sleep(0.5)
