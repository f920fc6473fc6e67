"""What a killed process leaves behind is removed by the next one."""

import os
import re
import signal
import subprocess
import sys

from raytrec.common.leftovers import owner, remove_leftovers

MAKE = """
import os, sys, time
from pathlib import Path
from raytrec.common.leftovers import owner
folder = Path(sys.argv[1], f"scratch-{owner()}-a")
folder.mkdir()
(folder / "file").touch()
Path(sys.argv[1], f"page.html.{owner()}.partial").touch()
print("made", flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_made_stays_while_it_lives_and_is_removed_after_it(tmp_path):
    maker = subprocess.Popen([sys.executable, "-c", MAKE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert maker.stdout.readline() == "made\n"
        remove(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.wait(60)
    remove(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_leftover_stays(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    gone = re.sub(r"\d+$", str(ended.pid), owner())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").touch()
    (tmp_path / f"scratch-{gone}-link").symlink_to(tmp_path / "elsewhere")
    stay = {
        "elsewhere",
        "scratch-1",
        f"scratch-{owner()}-mine",
        f"scratch-other{gone}-a",
        f"scratch-{gone}",
        f"other-{gone}-a",
        f"page.html.{gone}.partial.bak",
        f"pageXhtml.{gone}.partial",
    }
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


def test_a_folder_that_is_not_there_has_no_leftovers(tmp_path):
    remove(tmp_path / "missing")
    assert not os.path.exists(tmp_path / "missing")


def remove(folder):
    remove_leftovers(folder, "scratch-{owner}-*", keep="error.txt")
    remove_leftovers(folder, "page.html.{owner}.partial")
