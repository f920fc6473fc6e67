"""Pages are written whole or not at all."""

import signal
import subprocess
import sys

from raytrec.report.html import write_page

VALUES = {"names": ["a", "b"], "folders": ["/a", "/b"], "results": [], "config": {}, "pictures": []}
KILLED = f"""
import os, sys
from pathlib import Path
from raytrec.report.html import write_page
Path.replace = lambda *_: os.kill(os.getpid(), {int(signal.SIGKILL)})
write_page(Path(sys.argv[1]), "compare.html.j2", **{VALUES!r})
"""


def test_a_page_whose_writing_was_killed_leaves_nothing_once_it_is_written_again(tmp_path):
    page = tmp_path / "report.html"
    page.write_text("before")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(page)], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert page.read_text() == "before" and len(list(tmp_path.iterdir())) == 2
    write_page(page, "compare.html.j2", **VALUES)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert page.read_text() != "before"
