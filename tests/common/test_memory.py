"""Freed memory is retained for reuse, and returned to the kernel at the end of an epoch."""

import subprocess
import sys

import pytest

EPOCH = """
import ctypes
from raytrec.common import memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

memory.retain_freed_memory()
before = resident_mib()
pieces = [ctypes.c_void_p(libc.malloc(1 << 20)) for _ in range(100)]
for piece in pieces:
    ctypes.memset(piece, 1, 1 << 20)
for piece in pieces[:-1]:  # the last block stays at the top of the heap
    libc.free(piece)
print(resident_mib() - before)
memory.trim_memory()
print(resident_mib() - before)
"""
STEPS = """
import ctypes, resource, threading
from raytrec.common.memory import retain_freed_memory

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
SIZES = [4 << 20] * 8 + [100_000] * 100 + [16 << 20]

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [library.malloc(size) for size in SIZES]
    for block, size in zip(blocks, SIZES):
        library.memset(block, 1, size)
    for block in blocks:
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def measure():
    as_it_is = [step() for _ in range(3)]
    assert retain_freed_memory()
    print(as_it_is[-1], [step() for _ in range(4)][-1])

if THREAD:
    thread = threading.Thread(target=measure)
    thread.start(), thread.join()
else:
    measure()
"""
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="requires glibc")


def run_and_parse_output(code):
    """Run the code in a process and return the printed numbers."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return map(float, done.stdout.split())


def test_freed_memory_is_retained_until_trimmed():
    kept, left = run_and_parse_output(EPOCH)
    assert kept > 90 and left < 10


@pytest.mark.parametrize("thread", [False, True])
def test_retained_memory_avoids_page_faults_in_later_steps(thread):
    before, after = run_and_parse_output(STEPS.replace("THREAD", str(thread)))
    assert before > 1000, "glibc retains freed memory by default; retain_freed_memory is unnecessary"
    assert after < 100
