"""How the command's process ends: everything of Python's comes to its end, nothing after it is run."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, ctypes, sys, threading, time
from raytrec.common.process_exit import ends_at_once

libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)  # in the place of C++ that frees

def work():
    time.sleep(0.2)
    print("thread")

with ends_at_once():
    atexit.register(print, "atexit")
    threading.Thread(target=work).start()
    {last}
"""


def end(last):
    run = [sys.executable, "-c", PROGRAM.format(last=last)]
    return subprocess.run(run, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("last", "code"),
    [("pass", 0), ("sys.exit()", 0), ("sys.exit(130)", 130), ("sys.exit('no')", 1), ("raise KeyError(7)", 1)],
)
def test_all_of_pythons_end_and_nothing_after_it(last, code):
    ended = end(last)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == "thread\natexit\n"
    assert ("KeyError: 7" in ended.stderr) == ("KeyError" in last)


def test_the_command_ends_so():
    blocker = "import ctypes; c = ctypes.CDLL(None); "
    blocker += "c.__cxa_atexit(ctypes.cast(c.abort, ctypes.c_void_p), None, None); "
    for arguments, code in ((["--help"], 0), (["report", "/nowhere/at/all"], 1)):
        program = f"{blocker}import sys; sys.argv[1:] = {arguments}; from raytrec.cli import main; main()"
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert ended.returncode == code, ended.stderr
