"""Keeping freed memory, instead of handing it back to the system and asking for it again."""

from __future__ import annotations

import ctypes
from functools import cache

# glibc's mallopt(3): parameters, from <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 64 << 20  # at the heap's top; larger pieces still go back
LARGEST_BYTES = 32 << 20  # the most that glibc allows


@cache
def keep_memory() -> None:
    """For processes that make and drop arrays of a few MiB all the time: reading and collating.

    By default glibc gives such arrays back to the system at once, and each new one is paid for page by page,
    which costs more than filling it. Where the C library is another one, nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
