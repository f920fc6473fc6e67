"""Write lines and files to a run folder. While the folder cannot be written, `Journal` keeps them in memory."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any

from raytrec.checkpoint.index import reason
from raytrec.common.formatting import format_bytes, format_count
from raytrec.common.messages import EVENTS, Message
from raytrec.common.processes import create_file

MAX_PENDING_BYTES = 32 << 20  # maximum total size of pending writes; beyond it, the oldest writes are dropped


class Journal:
    """Writer of JSON lines and small files in a run folder, in the order of the calls.

    Methods raise no OSError. A line that cannot be written completely is removed from its file again (`append_to`).
    Lines and files that cannot be written are kept in memory, and the next call writes them first. Beyond
    MAX_PENDING_BYTES, the oldest are dropped.

    Args:
        folder: Run folder.
        notify: Function called with a message when the folder cannot be written, and when it is writable again.
    """

    def __init__(self, folder: Path, notify: Callable[[str], None]):
        self._folder, self._notify = folder, notify
        self._waiting: deque[tuple[str, bytes, bool]] = deque()  # (file name, data, True to replace the file)
        self._bytes, self._lost, self._trouble = 0, 0, ""
        self._begun: set[str] = set()  # files whose last line is known to be complete

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Append an entry, whose values JSON can represent, to the file `name` of the run folder as a line of JSON."""
        self._enqueue(name, _to_line(entry))
        self.write()

    def put(self, name: str, text: str) -> None:
        """Write `text` to the file `name` of the run folder, and replace any previous content."""
        self._enqueue(name, text.encode(), replaces=True)
        self.write()

    def write(self) -> None:
        """Write pending lines and files until a write fails.

        The user is notified, and an event is added to events.jsonl, at the first failure and after recovery.
        """
        while self._waiting:
            name, data, replaces = self._waiting[0]
            try:
                self._write(name, data, replaces)
            except OSError as error:
                return self._record_failure(reason(error))
            self._waiting.popleft()
            self._bytes -= len(data)
        if self._trouble:
            self._trouble = ""
            lost = f" (lost so far: {format_count(self._lost, 'record')})" if self._lost else ""
            self._notify(f"the run folder is writable again; all pending records were written{lost}")
            self.add(EVENTS, {"event": "room", "unix_s": time()})

    def missing(self) -> str | None:
        """Retry pending writes; return a message if the run folder still lacks records, or lost some, else None."""
        self.write()
        lines = len(self._waiting) + self._lost
        if not lines:
            return None
        why = f" ({self._trouble})" if self._trouble else ""
        return f"the run folder lacks {format_count(lines, 'record')}{why}: {self._folder}"

    def _enqueue(self, name: str, data: bytes, replaces: bool = False) -> None:
        self._waiting.append((name, data, replaces))
        self._bytes += len(data)
        while self._bytes > MAX_PENDING_BYTES:
            self._bytes -= len(self._waiting.popleft()[1])
            self._lost += 1

    def _record_failure(self, why: str) -> None:
        if self._trouble:
            return
        self._trouble = why
        self._notify(
            f"cannot write to the run folder ({why}): {self._folder}; training continues, and "
            f"up to {format_bytes(MAX_PENDING_BYTES)} of records stay in memory until they can be written"
        )
        self._enqueue(EVENTS, _to_line({"event": "full", "unix_s": time(), "error": why}))

    def _write(self, name: str, data: bytes, replaces: bool) -> None:
        path = self._folder / name
        if replaces:
            write_atomically(path, data)
            return
        start = b"" if name in self._begun else _get_missing_newline(path)
        append_to(path, start + data)
        self._begun.add(name)


def append_line(folder: Path, message: Message) -> None:
    """Append a message to the file of its class (Message.FILE, not None) in a run folder.

    Raises:
        OSError: The message cannot be written; see `append_to`.
    """
    append_to(folder / message.FILE, _to_line(message.line()))


def append_to(path: Path, data: bytes) -> None:
    """Append data to a file, either completely or not at all; create the file if it does not exist.

    Raises:
        OSError: The data cannot be written; the content of the file is unchanged, unless truncating also fails.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size, remaining = os.fstat(descriptor).st_size, memoryview(data)
        try:
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write or replace a file, either completely or not at all.

    The data is first written to NAME.partial in the same folder, which is removed if an error occurs. Two processes
    must not write the same file at the same time.

    Args:
        path: Path of the file, in an existing folder.
        data: Content of the file.
        mode: Permission bits of the file, from which the umask is removed.

    Raises:
        OSError: The data cannot be written; an existing file is unchanged.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        create_file(partial, data, mode)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def _to_line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _get_missing_newline(path: Path) -> bytes:
    """Return a line feed if the file's last line is incomplete (because a driver died), else b""."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            return b"" if file.read(1) == b"\n" else b"\n"
    return b""
