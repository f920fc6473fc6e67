"""Settings of the memory allocator, and operations on pages of memory-mapped files."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Parameters of glibc's mallopt(3), from <malloc.h>. Up to TRIM_THRESHOLD_BYTES of freed memory at an arena's
# top are not returned to the system, blocks of up to LARGEST_BYTES are not mapped individually, and an arena
# grows by TOP_PAD_BYTES (else glibc returns the empty heaps of all threads except the main thread). A step of
# 1,024 rows takes 7 % less CPU time with these values; larger values, or steps of 8,192 rows, save nothing
# more.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
TRIM_THRESHOLD_BYTES, TOP_PAD_BYTES, LARGEST_BYTES = 64 << 20, 64 << 20, 32 << 20
MAP_FIXED, MAP_NORESERVE, PROT_NONE, MAP_FAILED = 0x10, 0x4000, 0, 2**64 - 1  # of mmap(2) on Linux, 64 bits
TRIM_INTERVAL_S = 5.0  # trimming takes milliseconds, and the memory must be allocated again
# Environment of ranks, read tasks and the process that forks them; glibc reads it when a process starts. By
# default, glibc keeps freed memory in up to eight arenas per core, and each arena grows to the largest need of
# any thread: a rank grew by 8 MiB per epoch until all arenas were in use.
ALLOCATOR_ENV = {"MALLOC_ARENA_MAX": "2"}

_trimmed_s, _lock = 0.0, Lock()
_LIBC = ctypes.CDLL(None)


@cache
def retain_freed_memory() -> bool:
    """Make glibc keep freed memory in this process, which helps if arrays of a few MiB are constantly allocated.

    Later calls have no effect, and return the first result.

    By default, glibc can return such arrays to the system as soon as they are freed. A new array then causes a page
    fault for each of its pages, which costs more than filling the page.

    Returns:
        True if the settings were applied; False if the C library is not glibc, or rejects a setting.
    """
    if not hasattr(_LIBC, "gnu_get_libc_version"):
        return False
    settings = {M_MMAP_THRESHOLD: LARGEST_BYTES, M_TRIM_THRESHOLD: TRIM_THRESHOLD_BYTES, M_TOP_PAD: TOP_PAD_BYTES}
    return all([_LIBC.mallopt(name, size) for name, size in settings.items()])


def trim_memory() -> None:
    """Return freed memory to the system; to be called when many arrays have been freed, such as after an epoch.

    glibc keeps freed memory in each arena, and the threads of each epoch use other arenas. Without this call, a
    process grows by a few MiB per epoch, up to TRIM_THRESHOLD_BYTES per arena. Memory at the top of all arenas
    except the main arena is not returned, so a process still grows in its first epochs. A call has no effect within
    `TRIM_INTERVAL_S` of the last effective call, or if the C library is not glibc.
    """
    global _trimmed_s
    with _lock:
        if monotonic() - _trimmed_s < TRIM_INTERVAL_S:
            return
        _trimmed_s = monotonic()
    if trim := getattr(_LIBC, "malloc_trim", None):
        trim(0)


def prefetch_pages(address: int, size: int) -> None:
    """Ask the system to read a range of a mapped file into memory (MADV_WILLNEED); errors are ignored.

    Prefetching is faster than page faults, each of which waits for the disk.

    Args:
        address: Address of the first byte.
        size: Size of the range in bytes.
    """
    _advise(address, size, mmap.MADV_WILLNEED)


def advise_random_access(address: int, size: int) -> None:
    """Disable read-ahead for a range of a mapped file that is accessed at random (MADV_RANDOM); errors are ignored.

    Args:
        address: Address of the first byte.
        size: Size of the range in bytes.
    """
    _advise(address, size, mmap.MADV_RANDOM)


def is_page_resident(address: int) -> bool:
    """Return True if a page of a mapped file is in memory; False if it is not, or if the address is not mapped.

    Args:
        address: Address of the page's first byte.
    """
    flags = ctypes.c_ubyte()
    _LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(flags))
    return bool(flags.value & 1)


def prefetch_rows(values: torch.Tensor, rows: torch.Tensor, sampled: int) -> None:
    """Prefetch the first and the last page of each row, unless the first pages of all sampled rows are in memory.

    Without prefetching, each page fault waits for the disk.

    Args:
        values: Rows of a table, mapped from files, [n, width].
        rows: Row numbers, int64 [N].
        sampled: Minimum size of the sample, which has fewer than 2 · sampled rows. All rows are sampled if N is
            smaller.
    """
    import torch

    address, width = values.data_ptr(), values.stride(0) * values.itemsize
    sample = rows[:: max(1, len(rows) // sampled)].tolist()
    page_bytes = mmap.PAGESIZE
    if all(is_page_resident((address + row * width) // page_bytes * page_bytes) for row in sample):
        return
    starts = address + rows * width
    pages = (torch.cat([starts, starts + (width - 1)]) // page_bytes).unique()
    is_first = torch.ones(len(pages) + 1, dtype=torch.bool)
    is_first[1:-1] = pages.diff() > 1
    run_starts = is_first.nonzero().squeeze(1)
    for page, count in zip(pages[run_starts[:-1]].tolist(), run_starts.diff().tolist(), strict=True):
        prefetch_pages(page * page_bytes, count * page_bytes)


def unmap_file(address: int, size: int) -> None:
    """Replace a range of a mapped file with zero-filled private memory of the process.

    Args:
        address: Address of the first byte, at a page boundary.
        size: Size of the range in bytes, a multiple of the page size.

    Raises:
        OSError: The system cannot provide the memory.
    """
    _map_pages(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_ANONYMOUS | MAP_FIXED)


def map_files(parts: Sequence[tuple[Path, int, int]]) -> ctypes.Array[ctypes.c_ubyte]:
    """Map ranges of files to consecutive addresses, and return their bytes, which are read-only until `allow_writing`.

    The files are unmapped when the result is no longer referenced.

    Args:
        parts: (file, offset, size) of each range, in bytes; at least one. All offsets, and all sizes except the last,
            must be multiples of the page size. Sizes must be above 0.

    Raises:
        OSError: A file cannot be opened or mapped, or the addresses cannot be reserved.
    """
    size = sum(part_size for _, _, part_size in parts)
    address = _map_pages(None, size, PROT_NONE, mmap.MAP_ANONYMOUS)  # reserves the addresses
    content = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(content, _LIBC.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size)).atexit = False
    for path, offset, part_size in parts:
        with path.open("rb") as file:
            # Without NORESERVE, the system would refuse to make a mapping larger than its memory writable.
            _map_pages(address, part_size, mmap.PROT_READ, MAP_FIXED | MAP_NORESERVE, file.fileno(), offset)
        address += part_size
    return content


def allow_writing(address: int, size: int) -> None:
    """Allow writing to files mapped by `map_files`; the process gets a private copy of each page that it writes.

    Args:
        address: Address of the first byte, at a page boundary.
        size: Size of the range in bytes.

    Raises:
        OSError: The system denies write access.
    """
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _map_pages(address: int | None, size: int, rights: int, flags: int, file: int = -1, offset: int = 0) -> int:
    """Create a private mapping (mmap(2)) and return its address; raise OSError if the system refuses."""
    map_pages = ctypes.CDLL(None, use_errno=True).mmap
    map_pages.restype = ctypes.c_void_p
    place, length = ctypes.c_void_p(address), ctypes.c_size_t(size)
    mapped = map_pages(place, length, rights, flags | mmap.MAP_PRIVATE, file, ctypes.c_long(offset))
    if mapped == MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped


def _advise(address: int, size: int, advice: int) -> None:
    first = address - address % mmap.PAGESIZE
    _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), advice)
