"""Who drives a run: a note in its folder, by which others find the process, and what it has said."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter, time
from typing import Any, TextIO

from raytrec.common.errors import RaytrecError, RunError
from raytrec.common.formatting import or_0
from raytrec.common.messages import EVENTS, METRICS
from raytrec.common.reading import NotReadable, json_values, read_bytes
from raytrec.compat.ray_core import job_id
from raytrec.report.history import read_lines

# What a signal becomes; while Ray is only starting, it has handlers of its own, which end the process.
ASKED = (KeyboardInterrupt, SystemExit)
NOTE, LOG = "driver.json", "run.log"
KINDS: dict[str, Any] = {
    "pid": int,
    "started": int,
    "host": str,
    "status": str,
    "job": str,
    "unix_s": (int, float),
    "seconds": (int, float),
}
PARTS = ("what", "where", "expected", "do")  # of an error


@contextmanager
def record_driver(folder: Path) -> Iterator[float]:
    """Notes in a run folder that this process drives the run, and, at the end of the block, how it ended.

    Gives the seconds that the drivers of before have taken.

    driver.json: {"pid", "started" (the process), "host", "job" (of Ray's Job API, or null), "unix_s",
    "seconds" (of all drivers that have ended), "status": "RUNNING", "FINISHED", "STOPPED" or "FAILED",
    "error": null or its parts}. Where stderr is no
    terminal, what goes there goes to run.log, too.
    """
    began, before_s = perf_counter(), _seconds(folder)
    note: dict[str, Any] = {
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "host": socket.gethostname(),
        "job": job_id(),
        "unix_s": time(),
        "seconds": before_s,
        "status": "RUNNING",
        "error": None,
    }
    _write(folder, note)
    try:
        with _logged(folder / LOG):
            yield before_s
    except BaseException as error:
        note["status"] = "STOPPED" if isinstance(error, ASKED) else "FAILED"
        note["error"] = None if note["status"] == "STOPPED" else _parts(error)
        raise
    else:
        note["status"] = "FINISHED"
    finally:
        note["seconds"] += perf_counter() - began
        _write(folder, note)


def driver_of(folder: Path) -> dict[str, Any]:
    """What the note says; empty where there is none. A status of RUNNING may be of a process that died."""
    try:
        note = json_values(read_bytes(folder / NOTE))
    except (OSError, NotReadable):
        return {}
    if not isinstance(note, dict):
        return {}
    sound = {key: note[key] for key, kind in KINDS.items() if isinstance(note.get(key), kind)}
    if isinstance(error := note.get("error"), dict):
        sound["error"] = {key: str(error[key]) if error.get(key) else None for key in PARTS}
        sound["error"]["what"] = sound["error"]["what"] or ""
    return sound


def _seconds(folder: Path) -> float:
    """Seconds of all drivers so far: of one that was killed, those up to the last line of the run folder."""
    note = driver_of(folder)
    seconds, begin = or_0(note.get("seconds")), or_0(note.get("unix_s"))
    if note.get("status") != "RUNNING":
        return seconds
    last = [line for name in (METRICS, EVENTS) for line in deque(read_lines(folder / name), 1)]
    return seconds + max([0.0, *(or_0(line.get("unix_s")) - begin for line in last)])


def is_alive(note: dict[str, Any]) -> bool | None:
    """Whether the process of a note is there; None when it is one of another host."""
    if note.get("host") != socket.gethostname():
        return None
    started = _started(note.get("pid", 0))
    return started is not None and started == note.get("started")


def ask_to_stop(note: dict[str, Any]) -> None:
    """SIGTERM, upon which a run saves and ends; to be called on the driver's host.

    Raises:
        RunError: the process has ended.
    """
    if not is_alive(note):
        raise RunError("nobody drives this run", expected="a run that is under way")
    os.kill(note["pid"], signal.SIGTERM)


def _started(pid: int) -> int | None:
    """When a process began, in the kernel's ticks: with its id, it is no other process. None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] == "Z" else int(fields[19])


def _parts(error: BaseException) -> dict[str, str | None]:
    if isinstance(error, RaytrecError):
        return error.parts
    return {"what": f"{type(error).__name__}: {error}"}


def _write(folder: Path, note: dict[str, Any]) -> None:
    from raytrec.driver.recorder import write_json

    try:
        write_json(folder / NOTE, note)
    except OSError:  # a full disk: the run itself says so
        return


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    if sys.stderr is None or sys.stderr.isatty():
        yield
        return
    before = sys.stderr
    try:
        file = open(path, "a", buffering=1)  # noqa: SIM115
    except OSError:  # a full disk: the run itself says so
        yield
        return
    sys.stderr = _Both(before, file)
    try:
        yield
    finally:
        sys.stderr = before
        with suppress(OSError):  # what the disk has not taken
            file.close()


class _Both:
    """A stream that also goes to a file."""

    def __init__(self, stream: TextIO, file: TextIO):
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # no room on the disk; or a thread that outlives the run
            self._file.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
