"""How the processes of trials are run: tried again, stopped, and ended with the search."""

import os
import signal
import sys
from threading import Thread
from time import sleep

import pytest
from test_searching import prepared
from waiting import wait_for

from raytrec.tuning import runner
from raytrec.tuning.folder import write_search
from raytrec.tuning.search import Settings, State

# What takes the place of `raytrec train`: {} is what it does in the folder of its run.
TRIAL = """\
import json, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
begun = folder / "begun"
begun.write_text(begun.read_text() + "x" if begun.exists() else "x")
def evaluate(step, value):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({{"kind": "eval", "step": step, "{key}": value}}) + "\\n")
{body}
"""
STOPS = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"


@pytest.fixture
def run(tiny_data, tmp_path, monkeypatch):
    """Runs a search whose trials do something else; its trials, and the signal that ended it."""
    monkeypatch.setattr(runner, "TRIAL_POLL_INTERVAL_S", 0.01)

    def inner(body, trials=1, at_once=1):
        steps = {"eval_every_steps": 1, "max_steps": 20}
        search = prepared(tiny_data, tmp_path, settings=Settings(trials, "auc"), train=steps)
        write_search(search)
        script = TRIAL.format(key=search.figure.key, body=body)
        monkeypatch.setattr(runner, "TRAIN_COMMAND", (sys.executable, "-c", script))
        running = runner.Runner(search, runner.TuneConsole("search"))
        running.run(at_once)
        return search.trials, running.signal

    return inner


def begun(trial):
    return len((trial.folder / "begun").read_text())


def test_a_trial_whose_process_dies_is_tried_again(run):
    (trial,), _ = run("begun.read_text() == 'xxx' or os.kill(os.getpid(), signal.SIGKILL)")
    assert trial.state == State.FINISHED and begun(trial) == 3 and not trial.error


def test_a_trial_whose_process_always_dies_has_failed(run):
    (trial,), _ = run("os.kill(os.getpid(), signal.SIGKILL)")
    assert trial.state == State.FAILED and begun(trial) == 3
    assert trial.error == "the process died 3 times, most recently with exit status -9"


@pytest.mark.parametrize(
    "body, error",
    [
        ("sys.exit('warning: a\\nerror: it is broken\\n  where:    here')", "it is broken\n  where:    here"),
        ("raise ValueError('odd')", "ValueError: odd"),
        ("sys.exit(1)", "exit status 1"),
    ],
)
def test_the_error_of_a_trial_is_what_it_printed_last(run, body, error):
    trials, _ = run(body, trials=2)
    assert [(trial.state, trial.error) for trial in trials] == [(State.FAILED, error)] * 2
    assert all(begun(trial) == 1 for trial in trials)


def test_a_trial_that_falls_behind_is_asked_to_end(run):
    good, bad = "evaluate(1, 1.0); evaluate(20, 1.0)", STOPS + "evaluate(1, 0.1); time.sleep(30)"
    bad = bad.replace("\n", "; ")
    (first, second), _ = run(f"if folder.name == 'trial-001': {good}\nelse: {bad}", trials=2)
    assert (first.state, second.state) == (State.FINISHED, State.STOPPED)
    assert (first.value, second.value) == (1.0, 0.1)


READY = "(folder / 'ready').touch(); time.sleep(30)"


def signal_when_ready(folder, trials, *numbers):
    """Send signals to this process, one after the other, once so many trials are ready."""

    def send():
        wait_for(lambda: len([*folder.rglob("ready")]) == trials, "trials that are ready", 120)
        for number in numbers:
            os.kill(os.getpid(), number)
            sleep(0.5)

    Thread(target=send, daemon=True).start()


def test_a_signal_ends_all_trials_once_they_have_saved(run, tmp_path):
    signal_when_ready(tmp_path, 2, signal.SIGTERM)
    trials, ended_by = run(STOPS + READY, trials=3, at_once=2)
    assert ended_by == signal.SIGTERM
    assert [trial.state for trial in trials] == [State.INTERRUPTED] * 2 + [State.WAITING]


def test_a_second_signal_kills_them(run, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "DUPLICATE_SIGNAL_WINDOW_S", 0.1)
    signal_when_ready(tmp_path, 1, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run("signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY)
