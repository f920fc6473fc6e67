"""Freed memory that is kept, and pages of mapped files."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from threading import Lock
from time import monotonic

# glibc's mallopt(3), parameters from <malloc.h>: freed memory of up to KEPT_BYTES at an arena's top is not
# given back to the system, blocks of up to LARGEST_BYTES are not mapped one by one, and an arena grows by
# HEAP_BYTES (of threads other than the main one, glibc would otherwise give an empty heap back). A step of
# 1,024 rows takes 7 % less processor time with these; larger ones save nothing more, nor at 8,192 rows.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT_BYTES, HEAP_BYTES, LARGEST_BYTES = 64 << 20, 64 << 20, 32 << 20
MAP_FIXED = 0x10  # of mmap(2) on Linux
TRIM_EVERY_S = 5.0  # it takes some milliseconds, and the memory is then paid for again
# For the environment of ranks, read tasks and what forks them, as glibc reads it when a process begins. It
# keeps freed memory in up to eight arenas a core, and each becomes as large as any thread's largest need: a
# rank grew by 8 MiB an epoch until all were in use.
FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}

_trimmed_s, _lock = 0.0, Lock()
_LIBC = ctypes.CDLL(None)


@cache
def keep_memory() -> bool:
    """For processes that allocate and free arrays of a few MiB all the time: reading, collating, training.

    By default glibc gives such arrays back to the system at once, and each new one is paid for page by page,
    which costs more than filling it.

    Returns:
        Whether the C library is glibc; another one is left as it is.
    """
    if not hasattr(_LIBC, "gnu_get_libc_version"):
        return False
    settings = {M_MMAP_THRESHOLD: LARGEST_BYTES, M_TRIM_THRESHOLD: KEPT_BYTES, M_TOP_PAD: HEAP_BYTES}
    return all([_LIBC.mallopt(name, size) for name, size in settings.items()])


def give_back() -> None:
    """Gives freed memory back to the system: for where many arrays have ended, as at the end of an epoch.

    glibc keeps freed memory for each of its arenas, and each epoch's threads use others. So a process would
    grow by some MiB with every epoch, up to KEPT_BYTES for every arena. What is at an arena's top stays (but
    the heap's own), so a process still grows in its first epochs, and is flat then.
    """
    global _trimmed_s
    with _lock:
        if monotonic() - _trimmed_s < TRIM_EVERY_S:
            return
        _trimmed_s = monotonic()
    if trim := getattr(_LIBC, "malloc_trim", None):
        trim(0)


def bring_in(address: int, size: int) -> None:
    """Asks the system to read a part of a mapped file at once that is about to be read from its begin to its
    end: ten times as fast as page after page. With other memory it does nothing.

    Args:
        address, size: of the part in memory, in bytes.
    """
    _advise(address, size, mmap.MADV_WILLNEED)


def expect_scattered(address: int, size: int) -> None:
    """Announces to the system that a mapped file is read here and there: a row brings in its page, not the
    megabytes around it.

    Args:
        address, size: as in `bring_in`.
    """
    _advise(address, size, mmap.MADV_RANDOM)


def is_here(address: int) -> bool:
    """Whether a page of a mapped file is in memory.

    Args:
        address: its first byte.
    """
    here = ctypes.c_ubyte()
    _LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(here))
    return bool(here.value & 1)


def unmap_file(address: int, size: int) -> None:
    """Puts memory of the process's own, all 0, in the place of a part of a mapped file.

    Args:
        address, size: of the part in memory, in bytes; whole pages.

    Raises:
        OSError: there is no memory for it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    place, rights = ctypes.c_void_p(address), mmap.PROT_READ | mmap.PROT_WRITE
    made = ctypes.CDLL(None, use_errno=True).mmap
    made.restype, none = ctypes.c_void_p, ctypes.c_long(0)
    if made(place, ctypes.c_size_t(size), rights, flags, -1, none) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _advise(address: int, size: int, advice: int) -> None:
    first = address - address % mmap.PAGESIZE
    _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), advice)
