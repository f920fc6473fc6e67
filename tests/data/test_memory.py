"""Freed memory is kept while it is used again, and handed back at the end of an epoch."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, threading
import numpy as np
from raytrec.data import memory

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

def epoch():
    arrays = [np.ones(1 << 17) for _ in range(30)]  # 30 MiB

def rss_after_epochs(threads):
    for _ in range(3):
        running = [threading.Thread(target=epoch) for _ in range(threads)]
        [t.start() for t in running], [t.join() for t in running]
    return resident_mib()

memory.keep_memory()
before = resident_mib()
kept = rss_after_epochs(6) - before
memory.give_back()
print(kept, resident_mib() - before)
memory.give_back()  # soon after: nothing happens
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_what_epochs_leave_in_arenas_is_handed_back():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kept, left = map(float, done.stdout.split())
    assert kept > 60, "or there is nothing to hand back"
    assert left < kept - 10, f"{left:.0f} MiB of {kept:.0f} are still there"
