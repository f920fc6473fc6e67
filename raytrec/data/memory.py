"""Keeping freed memory for a while, instead of handing it back to the system and asking for it again."""

from __future__ import annotations

import ctypes
from functools import cache
from threading import Lock
from time import monotonic

# glibc's mallopt(3): parameters, from <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 64 << 20  # at the heap's top; larger pieces still go back
LARGEST_BYTES = 32 << 20  # the most that glibc allows
TRIM_EVERY_S = 5.0  # it takes some milliseconds, and the memory is then paid for again

_trimmed_s, _lock = 0.0, Lock()


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


def give_back() -> None:
    """Hands freed memory back: call it where many arrays have come to their end, as at the end of an epoch.

    glibc keeps freed memory for each of its arenas (8 for each core), and each epoch's threads use others. So
    a process would grow by some MiB with every epoch, up to KEPT_BYTES for every arena. What is at an
    arena's top stays (but the heap's own), so a process still grows in its first epochs, and is flat then.
    """
    global _trimmed_s
    with _lock:
        if monotonic() - _trimmed_s < TRIM_EVERY_S:
            return
        _trimmed_s = monotonic()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
