"""Process exit: Python's exit handlers run, C exit handlers do not; the next process removes leftovers."""

import re
import signal
import subprocess
import sys

import pytest

from raytrec.common.processes import get_owner_name, remove_leftovers

LEFTOVER_PROGRAM = """
import os, sys, time
from pathlib import Path
from raytrec.common.processes import get_owner_name
folder = Path(sys.argv[1], f"scratch-{get_owner_name()}-a")
folder.mkdir()
(folder / "file").touch()
Path(sys.argv[1], f"page.html.{get_owner_name()}.partial").touch()
print("made", flush=True)
time.sleep(600)
"""


def test_leftovers_are_removed_only_after_their_owner_ends(tmp_path):
    maker = subprocess.Popen([sys.executable, "-c", LEFTOVER_PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert maker.stdout.readline() == "made\n"
        remove(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.wait(60)
    remove(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_remove_leftovers_keeps_other_files(tmp_path):
    remove(tmp_path / "missing")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    gone = re.sub(r"\d+$", str(ended.pid), get_owner_name())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").touch()
    (tmp_path / f"scratch-{gone}-link").symlink_to(tmp_path / "elsewhere")
    stay = {"elsewhere", "scratch-1", f"scratch-{get_owner_name()}-mine", f"scratch-other{gone}-a", f"scratch-{gone}"}
    stay |= {f"other-{gone}-a", f"page.html.{gone}.partial.bak", f"pageXhtml.{gone}.partial"}
    for name in stay - {"elsewhere"}:
        (tmp_path / name).touch()
    (tmp_path / f"page.html.{gone}.partial").touch()
    for name in ("kept", "empty"):
        (tmp_path / f"scratch-{gone}-{name}").mkdir()
    (tmp_path / f"scratch-{gone}-kept/error.txt").touch()
    remove(tmp_path)
    stay.add(f"scratch-{gone}-kept")
    assert {path.name for path in tmp_path.iterdir()} == stay
    assert (tmp_path / "elsewhere/file").exists()


def remove(folder):
    remove_leftovers(folder, "scratch-{owner}-*", keep="error.txt")
    remove_leftovers(folder, "page.html.{owner}.partial")


EXIT_PROGRAM = """
import atexit, ctypes, sys, threading, time
from raytrec.common.processes import exit_after_block

libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)  # like a crash in C++ cleanup

def work():
    time.sleep(0.2)
    print("thread")

with exit_after_block():
    atexit.register(print, "atexit")
    threading.Thread(target=work).start()
    {last}
"""


def run_program(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("last", "code"),
    [("pass", 0), ("sys.exit()", 0), ("sys.exit(130)", 130), ("sys.exit('no')", 1), ("raise KeyError(7)", 1)],
)
def test_exit_after_block_skips_c_exit_handlers(last, code):
    ended = run_program(EXIT_PROGRAM.format(last=last))
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == "thread\natexit\n"
    assert ("KeyError: 7" in ended.stderr) == ("KeyError" in last)


@pytest.mark.slow
def test_command_skips_c_exit_handlers():
    blocker = "import ctypes; c = ctypes.CDLL(None); "
    blocker += "c.__cxa_atexit(ctypes.cast(c.abort, ctypes.c_void_p), None, None); "
    for arguments, code in ((["--help"], 0), (["report", "/nowhere/at/all"], 1)):
        ended = run_program(f"{blocker}import sys; sys.argv[1:] = {arguments}; from raytrec.cli import main; main()")
        assert ended.returncode == code, ended.stderr
