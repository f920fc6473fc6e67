"""Plain progress lines: what the console writes is what is read back from a log."""

import pytest

from raytrec.driver import progress_log as lines
from raytrec.driver.console import RunConsole


@pytest.fixture
def written(monkeypatch, capsys):
    """A console that is no terminal, and a function for what it has written."""
    monkeypatch.setattr("raytrec.driver.console.PLAIN_EVERY_S", 0)
    monkeypatch.setenv("COLUMNS", "40")  # lines are not cut where a terminal would end
    return RunConsole("movielens-20261122-101500"), lambda: capsys.readouterr().err


def test_what_the_console_writes_is_read_back(written):
    console, out = written
    console.start(total=550, step=0)
    console.train(step=60, logloss=0.61234, ne=1.01, rows_per_s=None)
    console.train(step=120, logloss=0.51234, ne=0.9101, rows_per_s=80_000.4)
    console.eval(step=120, auc=0.78, ne=0.9, logloss=0.55, calibration=1.01, rows=100)
    console.note("run folder /shared/my [red] :eye: runs/movielens-20261122-101500")
    console.warn("something else")
    console.phase("starting the workers")
    told = [found for line in out().splitlines() if (found := lines.parse(line))]
    assert told == [
        ("train", {"step": 60, "total": 550, "logloss": 0.6123, "ne": 1.01}),
        ("train", {"step": 120, "total": 550, "rows_per_s": 80_000.0, "logloss": 0.5123, "ne": 0.9101}),
        ("eval", {"step": 120, "auc": 0.78, "ne": 0.9, "logloss": 0.55, "calibration": 1.01}),
        (
            "folder",
            {
                "name": "movielens-20261122-101500",
                "folder": "/shared/my [red] :eye: runs/movielens-20261122-101500",
            },
        ),
    ]


def test_lines_suit_a_log(written):
    console, out = written
    with console:
        console.start(total=550, step=0)
        console.train(step=60, logloss=0.6, ne=1.0, rows_per_s=80_000.0)
        console.train(step=550, logloss=0.5, ne=0.9, rows_per_s=80_000.0)
    text = out()
    assert "\x1b" not in text and "\r" not in text and text.isascii()
    assert "step 60/550 (10%)  80,000 rows/s  loss 0.6000  NE 1.0000\n" in text
    assert text.rstrip().endswith("step 550/550 (100%)  80,000 rows/s  loss 0.5000  NE 0.9000  ETA 0:00")


def test_figures_that_are_not_defined(written):
    console, out = written
    console.start(total=10, step=0)
    console.train(step=5, logloss=float("nan"), ne=float("nan"), rows_per_s=10.0)
    assert lines.parse(out().splitlines()[-1])[1] == {
        "step": 5,
        "total": 10,
        "rows_per_s": 10.0,
        "logloss": None,
        "ne": None,
    }


@pytest.mark.parametrize(
    "line", ["", "step 3/4", "warning: rank 1  step 3: x", "name  step 40: saved", "Traceback (most recent)"]
)
def test_lines_of_others(line):
    assert lines.parse(line) is None


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0:00"), (42.4, "0:42"), (3723, "1:02:03")])
def test_the_time_that_is_left(seconds, text):
    assert lines.remaining(seconds) == f"ETA {text}"
