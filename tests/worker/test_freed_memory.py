"""What a step frees is there for the next one, without a page fault; in the thread that trains, too."""

import subprocess
import sys

import pytest

STEPS = """
import ctypes, resource, threading
from raytrec.worker.memory import keep_freed_memory

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [library.malloc(size) for size in [4 << 20] * 40 + [100_000] * 100 + [40 << 20]]
    for block, size in zip(blocks, [4 << 20] * 40 + [100_000] * 100 + [40 << 20]):
        library.memset(block, 1, size)
    for block in blocks:
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def measure():
    as_it_is = [step() for _ in range(3)]
    assert keep_freed_memory()
    print(as_it_is[-1], [step() for _ in range(4)][-1])

if THREAD:
    thread = threading.Thread(target=measure)
    thread.start(), thread.join()
else:
    measure()
"""


@pytest.mark.skipif("linux" not in sys.platform, reason="glibc's setting")
@pytest.mark.parametrize("thread", [False, True])
def test_a_step_takes_no_page_from_the_kernel_that_the_one_before_has_freed(thread):
    code = STEPS.replace("THREAD", str(thread))
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, after = map(int, out.split())
    assert before > 1000, "glibc keeps it by itself: worker/memory.py is not needed"
    assert after < 100
