"""One driver at a time trains a run."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from raytrec.common.errors import RunError
from raytrec.driver.driver_state import driver_of

LOCK = "driver.lock"


@contextmanager
def hold_run_lock(folder: Path, patience_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Holds a run folder while the block runs; the lock goes with the process, however it ends.

    On file systems without locks there is none.

    Args:
        folder: of the run.
        patience_s: how long to wait for another driver, which may be saving its last checkpoint.
        say: told whom it waits for.

    Raises:
        RunError: another driver trains this run.
    """
    with _opened(folder) as file:
        _wait(file, folder, patience_s, say)
        yield


def _opened(folder: Path):
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOCK).open("a+")
    except OSError as error:
        raise RunError(f"cannot write the run folder: {error.strerror}", where=str(folder)) from None


def _wait(file, folder: Path, patience_s: float, say: Callable[[str], None]) -> None:
    deadline, told = time.monotonic() + patience_s, False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(folder)
        except OSError:  # ENOLCK, EOPNOTSUPP: a file system without locks
            return None
        if time.monotonic() > deadline:
            raise RunError(
                "this run is being trained already",
                where=f"{folder}, by {holder}",
                expected="one driver at a time",
                do="wait for it, stop it, or begin another run with run.name=NAME",
            )
        if not told:
            say(f"waiting for {holder} to let go of {folder}")
            told = True
        time.sleep(0.5)


def _holder(folder: Path) -> str:
    note = driver_of(folder)
    return "process {pid} on {host}".format(**note) if "pid" in note else "another process"
