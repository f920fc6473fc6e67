"""Test that runs lose no work if their terminal, log or encoding fails."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from test_survive import assert_resumes_like, brief, events, large, run_file  # noqa: F401 (fixtures)

pytestmark = pytest.mark.survive

# Make the terminal of file descriptor 0 the controlling terminal, as a login does.
ON_TERMINAL = """
import fcntl, signal, termios
from raytrec.cli import main
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
main()
"""


def test_closed_terminal_saves_and_ends_the_run(brief, large, tmp_path):  # noqa: F811
    """The kernel sends SIGHUP, and output to the terminal fails from then on."""
    run, config = tmp_path / "run", run_file(large, tmp_path, train__epochs=2)
    terminal, side = pty.openpty()
    streams = {"stdin": side, "stdout": side, "stderr": side, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", ON_TERMINAL, "train", str(config)], **streams)
    os.close(side)
    try:
        began = time.monotonic()
        while not events(run, "saved"):
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 1 << 16)
            assert process.poll() is None and time.monotonic() - began < 240
        os.close(terminal)
        assert process.wait(timeout=150) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert_resumes_like(run, brief)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_run_completes_if_output_cannot_be_written(large, tmp_path, encoding):  # noqa: F811
    """The cases are a log on a full disk and an encoding without the table characters."""
    config = run_file(large, tmp_path, train__max_steps=2)
    command = [sys.executable, "-m", "raytrec", "train", str(config)]
    with open("/dev/full", "w") as full:
        log = {"stdout": full, "stderr": full} if encoding == "ascii" else {"stdout": subprocess.PIPE}
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        ended = subprocess.run(command, env=environment, timeout=300, **log)
    assert ended.returncode == (1 if encoding == "ascii" else 0)  # 1: the result is not in the log
    assert json.loads((tmp_path / "run" / "result.json").read_text())
