"""Processes of one host: locks, names of owners, leftovers of killed processes, and the end of a process.

A process removes its temporary files after use. If it was killed, the next process removes them.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def lock_file(file: IO | int, wait: bool = False) -> bool:
    """Lock an open file or folder against other processes until it is closed or this process ends.

    Args:
        file: Open file, or descriptor of a file or folder.
        wait: Block until other processes release the lock.

    Returns:
        False on a file system without locks.

    Raises:
        BlockingIOError: Another process holds the lock, and wait is False.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:  # ENOLCK, EOPNOTSUPP
        return False
    return True


def create_file(path: Path, data: bytes | str, mode: int = 0o600) -> None:
    """Create a file that does not exist; by default, only this user can read it.

    The mode applies from the start: after write_text and chmod, others could have opened the file in between.

    Raises:
        FileExistsError: Another process has created the file. OSError: The file cannot be written.
    """
    content = data.encode() if isinstance(data, str) else data
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)


def get_owner_name() -> str:
    """Return the part of a file name that identifies this process on this host."""
    return f"{socket.gethostname()}-{os.getpid()}"


def remove_leftovers(folder: str | Path, pattern: str, keep: str | None = None) -> None:
    """Remove the files and folders of ended processes of this host; errors are ignored.

    Args:
        folder: Folder to search.
        pattern: Pattern of names, with {owner} in the place of `get_owner_name()` and * for any text. Names
            with the owner of another host stay, because that host's processes are not visible here.
        keep: Name of a file; folders that contain it stay.
    """
    parts = {"{owner}": rf"{re.escape(socket.gethostname())}-(\d+)", "*": ".*"}
    split = re.split(r"(\{owner\}|\*)", pattern)
    names = re.compile("".join(parts.get(part) or re.escape(part) for part in split), re.DOTALL)
    with suppress(OSError):
        for path in Path(folder).iterdir():
            match = names.fullmatch(path.name)
            if match and _has_ended(int(match[1])) and not (keep and (path / keep).exists()):
                _remove(path)


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # a process of another user
        return False
    return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def handle_hangup_as_sigterm() -> None:
    """Handle SIGHUP, sent when a terminal or an ssh session ends, like SIGTERM; under nohup, ignore it."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


@contextmanager
def exit_after_block() -> Iterator[None]:
    """End the process right after Python's exit functions that follow this block.

    ray.shutdown() leaves threads behind (Ray 2.60: the GCS client's, gRPC's event engine, the exporter of
    metrics) that no call ends. They run while Python finalizes and C++ destroys its global objects, and may
    read freed memory: once, a successful process ended with a segmentation fault. With this block, Python
    joins its threads, atexit functions run, output is flushed, and the process ends.
    """
    code = 1  # exit status after an uncaught error

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)

    atexit.register(end)  # functions are called in reverse order of registration
    try:
        yield
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
