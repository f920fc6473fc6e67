"""Checksums in a low-priority process: they leave the page cache unchanged and end with their parent."""

import ctypes
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys

import psutil
import pytest
from waiting import wait_for

from raytrec.common import file_hashes
from raytrec.common.file_hashes import CHUNK_BYTES

COMMAND = [sys.executable, "-I", "-S", file_hashes.__file__]
PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
child.stdin.write(b'["pipe"]')
child.stdin.close()
print(child.pid, flush=True)
child.wait()
"""


def run_hashes(folder, names):
    run = subprocess.run([*COMMAND, str(folder)], input=json.dumps(names), capture_output=True, text=True, timeout=120)
    return json.loads(run.stdout)


def list_resident_pages(path):
    pages = (ctypes.c_ubyte * -(-path.stat().st_size // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(len(mapped)), pages) == 0
        del first
    return [page & 1 for page in pages]


def start_hanging_child(folder):
    """Return a parent process and its child, which waits for a writer of a pipe."""
    os.mkfifo(folder / "pipe")
    words = [sys.executable, "-c", PARENT, *COMMAND, str(folder)]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    wait_for(lambda: os.sched_getscheduler(child.pid) == os.SCHED_IDLE, "a low priority", 60)
    return parent, child


@pytest.mark.parametrize("size", [0, 1, 3 * mmap.PAGESIZE, CHUNK_BYTES + 5])
def test_checksums_are_those_of_hashlib(tmp_path, size):
    content = os.urandom(size)
    (tmp_path / "ä file").write_bytes(content)
    assert run_hashes(tmp_path, ["ä file"]) == {"ä file": hashlib.sha256(content).hexdigest()}


def test_only_pages_that_were_in_memory_stay_there(tmp_path):
    path, hot, pages = tmp_path / "table", range(300, 364), 2 * CHUNK_BYTES // mmap.PAGESIZE + 1
    path.write_bytes(os.urandom(pages * mmap.PAGESIZE - 7))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no pages beyond those read
        os.pread(file.fileno(), len(hot) * mmap.PAGESIZE, hot[0] * mmap.PAGESIZE)
    before = list_resident_pages(path)
    if sum(before) == pages:
        pytest.skip("files of this file system are always in memory")
    assert [page for page in range(pages) if before[page]] == [*hot]
    run_hashes(tmp_path, ["table"])
    assert list_resident_pages(path) == before


def test_child_has_low_priority_and_ends_with_its_parent(tmp_path):
    parent, child = start_hanging_child(tmp_path)
    with parent:
        assert child.nice() == 19
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child's end", 60)
