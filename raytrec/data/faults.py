"""What happens to rows that cannot be read: the run stops, or they are skipped and counted (no torch)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from raytrec.common.errors import DataError

T = TypeVar("T")
# Seconds before the second, third and last try to read from a store that does not answer.
WAITS_S = (0.2, 1.0, 3.0)
SKIPPED = "skipped.jsonl"  # in the run folder: what has been skipped


@dataclass(frozen=True)
class Faults:
    """data.on_error as the read tasks know it.

    Attributes:
        skip: skip what cannot be read, instead of stopping.
        log: a file on storage that all nodes share, which gets one line of JSON for everything skipped:
            {what, where, rows}; None: no record.
    """

    skip: bool = False
    log: str | None = None

    def leave_out(self, error: DataError, rows: int | None) -> None:
        """Records rows that are skipped.

        Raises:
            DataError: the error itself, where the run is to stop.
        """
        if not self.skip:
            raise error
        if self.log:
            with open(self.log, "a") as file:  # short lines, appended whole by each process
                file.write(json.dumps({"what": error.what, "where": error.where, "rows": rows}) + "\n")


def retry_read(uri: str, read: Callable[[], T]) -> T:
    """The result of reading a file, tried again with growing pauses where the storage fails.

    A file that is not there is so the next time, too; and pyarrow's OSErrors about local files that come
    without an errno speak of their content.

    Raises:
        OSError: of the last try.
    """
    for wait in WAITS_S:
        try:
            return read()
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            raise
        except OSError as error:
            if "://" not in uri and error.errno is None:
                raise
            time.sleep(wait)
    return read()


def storage_hint(uri: str) -> str:
    """What else is expected of a remote place: pyarrow has one error for no answer and for bad content."""
    return f"storage that answers (it was asked {len(WAITS_S) + 1} times), and " if "://" in uri else ""
