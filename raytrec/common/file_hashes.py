"""Compute the SHA-256 of files, in a child process of low priority, and of raytrec's code.

    python -I -S file_hashes.py FOLDER < JSON list of names

The script prints a JSON mapping of these names, which are relative to FOLDER, to checksums (hex). If a file cannot be
read, it prints a traceback and exits with status 1. It runs at the lowest CPU priority, leaves the page cache as it
was, and ends with its parent. It imports only the standard library, so it starts quickly.
"""

import ctypes
import hashlib
import json
import mmap
import os
import signal
import sys
from contextlib import suppress
from itertools import groupby
from pathlib import Path

CHUNK_BYTES = 8 << 20  # a multiple of the page size
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


def hash_file(path: str) -> str:
    """Return the SHA-256 of a file in hex, and drop the pages that reading added to the page cache.

    Otherwise, reading a large file would evict pages that other processes need. No pages are dropped if this process
    neither owns the file nor may write to it.

    Raises:
        OSError: The file cannot be read.
    """
    digest, buffer, start = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES)), 0
    with open(path, "rb", buffering=0) as file:
        resident = _find_resident_pages(file.fileno())
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            page, start = start // mmap.PAGESIZE, start + count
            for is_resident, run in groupby(resident[page : -(-start // mmap.PAGESIZE)]):
                first, page = page, page + len(list(run))
                if not is_resident:
                    size = (page - first) * mmap.PAGESIZE
                    os.posix_fadvise(file.fileno(), first * mmap.PAGESIZE, size, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


def _find_resident_pages(file: int) -> bytes:
    """Return one byte per page of an open file: 1 if the page is in memory, else 0.

    The kernel reports all pages of a file as resident if this process is neither its owner nor may write to it.
    """
    size = os.fstat(file).st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    if size:
        with mmap.mmap(file, 0, access=mmap.ACCESS_COPY) as mapped:
            first = ctypes.c_char.from_buffer(mapped)
            _LIBC.mincore(ctypes.byref(first), ctypes.c_size_t(size), pages)
            del first  # a mapping with pointers cannot be closed
    return bytes(page & 1 for page in pages)


def compute_code_hash() -> str:
    """Return the first 16 hex digits of the SHA-256 of the paths and contents of raytrec's Python files.

    Raises:
        OSError: A file cannot be read.
    """
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(19)
    with suppress(OSError):  # some containers forbid SCHED_IDLE
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    print(json.dumps({name: hash_file(os.path.join(sys.argv[1], name)) for name in json.load(sys.stdin)}))
