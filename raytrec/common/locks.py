"""Locks between processes, and files that only one process creates."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO


def lock(file: IO | int, wait: bool = False) -> bool:
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
