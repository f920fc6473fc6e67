"""Output to streams that are closed, full, or cannot encode the text."""

import io
import os
import signal
import subprocess
import sys

import pytest
from rich.table import Table

from raytrec.common.terminal import FaultTolerantStream, open_console, tolerate_stream_errors

CONFIG = [sys.executable, "-m", "raytrec", "config"]
HANGUP = """
import os, signal, sys
from raytrec.common.processes import handle_hangup_as_sigterm
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
handle_hangup_as_sigterm()
os.kill(os.getpid(), signal.SIGHUP)
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_unencodable_characters_are_replaced(encoding, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with tolerate_stream_errors():
        print("│ 1 – 2 … │")
        open_console().print("× µs")
    stream.flush()
    text = stream.buffer.getvalue().decode(encoding)
    assert text == ("│ 1 – 2 … │\n× µs\n".encode(encoding, "replace").decode(encoding))


@pytest.mark.parametrize("columns", [None, "80"])
def test_tables_in_pipes_are_as_wide_as_their_content(columns, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    table, name = Table("table", "rows"), "customer_transaction_category" * 5
    table.add_row(name, "3")
    open_console().print(table)
    shown = capsys.readouterr().out
    assert (name in shown) == (columns is None)
    assert max(map(len, shown.splitlines())) == (len(name) + 11 if columns is None else 80)


def test_closed_streams_drop_text():
    ends = os.pipe()
    os.close(ends[0])
    with open(ends[1], "w", buffering=1) as pipe:
        stream = FaultTolerantStream(lambda: pipe)
        assert stream.write("a\n") == 2 and isinstance(stream.error, BrokenPipeError)
        stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())
    closed = io.StringIO()
    closed.close()
    assert FaultTolerantStream(lambda: closed).write("a") == 1
    nothing = FaultTolerantStream(lambda: None)
    assert nothing.write("a") == 1 and not hasattr(nothing, "isatty")


@pytest.mark.parametrize(("target", "code", "message"), [("/dev/full", 1, "No space left"), ("closed", 0, "")])
def test_lost_output_is_an_error_unless_the_reader_has_exited(target, code, message):
    if target == "closed":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(target, os.O_WRONLY)
    ended = subprocess.run([*CONFIG, "--schema"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert ended.returncode == code and message in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(("ignored", "code"), [(False, 7), (True, 0)])
def test_hangup_is_handled_as_sigterm_except_under_nohup(ignored, code):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert subprocess.run([sys.executable, "-c", HANGUP], timeout=60).returncode == code
    finally:
        signal.signal(signal.SIGHUP, before)
