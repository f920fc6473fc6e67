"""Files and folders that a process removes when it has used them, and the next one where it was killed."""

from __future__ import annotations

import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path


def owner() -> str:
    """The part of a name by which others see whether the process that made it has ended."""
    return f"{socket.gethostname()}-{os.getpid()}"


def remove_leftovers(folder: str | Path, pattern: str, keep: str | None = None) -> None:
    """Removes what processes of this host that have ended left in a folder, as far as that is possible.

    Args:
        pattern: of names: {owner} is where they have `owner()`, * is anything. Names that have another
            host's owner stay, because its processes cannot be seen from here.
        keep: folders in which there is a file of this name stay.
    """
    parts = {"{owner}": rf"{re.escape(socket.gethostname())}-(\d+)", "*": ".*"}
    split = re.split(r"(\{owner\}|\*)", pattern)
    names = re.compile("".join(parts.get(part) or re.escape(part) for part in split), re.DOTALL)
    with suppress(OSError):
        for path in Path(folder).iterdir():
            found = names.fullmatch(path.name)
            if found and _has_ended(int(found[1])) and not (keep and (path / keep).exists()):
                _remove(path)


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # of another user
        return False
    return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
