"""Locks, temporary files, signals and exit of processes on one host.

The names of temporary files contain their owner: the host and the process id. A process removes its temporary files
after use. If the process was killed, a later process removes them.
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
    """Lock an open file or folder exclusively (flock) until it is closed or this process ends.

    Args:
        file: Open file, or the descriptor of an open file or folder.
        wait: True to wait until other processes release the lock.

    Returns:
        True if the lock was acquired; False if the file system does not support locks.

    Raises:
        BlockingIOError: Another process, or another open file of this process, holds the lock, and `wait` is False.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:  # ENOLCK, EOPNOTSUPP
        return False
    return True


def create_file(path: Path, data: bytes | str, mode: int = 0o600) -> None:
    """Create a new file with the given content; by default, only this user can read the file.

    The file has its permission bits (`mode` without the umask) from the start. With write_text and chmod, other users
    could open the file in between.

    Raises:
        FileExistsError: The file exists.
        OSError: The file cannot be written; an incomplete file may remain.
    """
    content = data.encode() if isinstance(data, str) else data
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)


def get_owner_name() -> str:
    """Return HOST-PID of this process, which the names of its temporary files contain."""
    return f"{socket.gethostname()}-{os.getpid()}"


def remove_leftovers(folder: str | Path, pattern: str, keep: str | None = None) -> None:
    """Remove files and folders left by processes of this host that have ended; errors are ignored.

    Args:
        folder: Folder to search.
        pattern: Pattern of names, which must contain {owner} once. {owner} stands for `get_owner_name()` of any process
            on this host, and * for any text. Files of other hosts stay, because their processes are not visible here.
        keep: Name of a file; folders that contain a file with this name are not removed. None: all are removed.
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
    """Handle SIGHUP (the end of a terminal or SSH session) like SIGTERM, unless SIGHUP is ignored (nohup).

    This function must be called in the main thread.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


@contextmanager
def exit_after_block() -> Iterator[None]:
    """End the process at interpreter exit, once the atexit functions registered in this block or later have run.

    Atexit functions registered before the block, and Python's finalization, do not run. The exit status is that of the
    SystemExit raised in the block, 1 after another error, else 0.

    ray.shutdown() leaves threads behind (Ray 2.60: the GCS client, gRPC's event engine, the metrics exporter)
    that no call ends. These threads run while Python finalizes and C++ destroys its global objects, and may read freed
    memory: once, a successful process ended with a segmentation fault.
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
