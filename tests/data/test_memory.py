"""Freed memory is kept while it is used again, and handed back at the end of an epoch."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes
from raytrec.data import memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

memory.keep_memory()
before = resident_mib()
pieces = [ctypes.c_void_p(libc.malloc(1 << 20)) for _ in range(100)]
for piece in pieces:
    ctypes.memset(piece, 1, 1 << 20)
for piece in pieces[:-1]:  # the last stays at the top
    libc.free(piece)
print(resident_mib() - before)
memory.give_back()
print(resident_mib() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_freed_memory_is_kept_and_handed_back():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kept, left = map(float, done.stdout.split())
    assert kept > 90 and left < 10
