"""Processes of trials: retries, early stopping and shutdown with the search."""

import os
import signal
import sys
from threading import Thread
from time import sleep
from types import SimpleNamespace

import pytest
from searches import make_settings
from test_searching import prepare_test_search
from waiting import wait_for

from raytrec.tuning import runner
from raytrec.tuning.folder import write_search
from raytrec.tuning.search import State

# Replaces `raytrec train`; `body` is the code that runs in the folder of the trial.
TRIAL_SCRIPT = """\
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
EXIT_ON_SIGTERM = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"


@pytest.fixture
def run_trials(tiny_data, tmp_path, monkeypatch):
    """Return a function that runs a search of fake trials and returns its trials and end signal."""
    monkeypatch.setattr(runner, "TRIAL_POLL_INTERVAL_S", 0.01)

    def inner(body, trials=1, at_once=1):
        settings, steps = make_settings(trials=trials, metric="auc"), {"eval_every_steps": 1, "max_steps": 20}
        search = prepare_test_search(tiny_data, tmp_path, settings=settings, train=steps)
        write_search(search)
        script = TRIAL_SCRIPT.format(key=search.figure.key, body=body)
        monkeypatch.setattr(runner, "TRAIN_COMMAND", (sys.executable, "-c", script))
        running = runner.Runner(search, runner.TuneConsole("search"))
        running.run(at_once)
        return search.trials, running.signal

    return inner


def count_starts(trial):
    return len((trial.folder / "begun").read_text())


def test_trial_is_retried_if_its_process_dies(run_trials):
    (trial,), _ = run_trials("begun.read_text() == 'xxx' or os.kill(os.getpid(), signal.SIGKILL)")
    assert trial.state == State.FINISHED and count_starts(trial) == 3 and not trial.error


def test_trial_that_waits_for_its_restart_has_not_failed(tiny_data, tmp_path):
    """A signal can end the search before the restart; the outcome then lists errors of failed trials only."""
    search = prepare_test_search(tiny_data, tmp_path, settings=make_settings(trials=1))
    running, (trial,) = runner.Runner(search, runner.TuneConsole("search")), search.trials
    dead = SimpleNamespace(trial=trial, outcome=lambda status: (State.RUNNING, "the process died 3 times"))
    running._record_end(dead, -9)
    assert trial.deaths == 1 and trial.error == ""


def test_trial_fails_after_three_dead_processes(run_trials):
    (trial,), _ = run_trials("os.kill(os.getpid(), signal.SIGKILL)")
    assert trial.state == State.FAILED and count_starts(trial) == 3
    assert trial.error == "the process died 3 times, most recently with exit status -9"


@pytest.mark.slow
@pytest.mark.parametrize(
    "body, error",
    [
        ("sys.exit('warning: a\\nerror: it is broken\\n  where:    here')", "it is broken\n  where:    here"),
        ("raise ValueError('odd')", "ValueError: odd"),
        ("sys.exit(1)", "exit status 1"),
    ],
)
def test_trial_error_is_its_last_output(run_trials, body, error):
    trials, _ = run_trials(body, trials=2)
    assert [(trial.state, trial.error) for trial in trials] == [(State.FAILED, error)] * 2
    assert all(count_starts(trial) == 1 for trial in trials)


@pytest.mark.slow
def test_trial_that_falls_behind_is_stopped_by_sigterm(run_trials):
    good, bad = "evaluate(1, 1.0); evaluate(20, 1.0)", EXIT_ON_SIGTERM + "evaluate(1, 0.1); time.sleep(30)"
    bad = bad.replace("\n", "; ")
    (first, second), _ = run_trials(f"if folder.name == 'trial-001': {good}\nelse: {bad}", trials=2)
    assert (first.state, second.state) == (State.FINISHED, State.STOPPED)
    assert (first.value, second.value) == (1.0, 0.1)


SIGNAL_READY = "(folder / 'ready').touch(); time.sleep(30)"


def signal_when_ready(folder, trials, *numbers):
    """Send signals to this process one after the other once `trials` trials are ready."""

    def send():
        wait_for(lambda: len([*folder.rglob("ready")]) == trials, "trials that are ready", 120)
        for number in numbers:
            os.kill(os.getpid(), number)
            sleep(0.5)

    Thread(target=send, daemon=True).start()


@pytest.mark.slow
def test_signal_interrupts_running_trials(run_trials, tmp_path):
    signal_when_ready(tmp_path, 2, signal.SIGTERM)
    trials, ended_by = run_trials(EXIT_ON_SIGTERM + SIGNAL_READY, trials=3, at_once=2)
    assert ended_by == signal.SIGTERM
    assert [trial.state for trial in trials] == [State.INTERRUPTED] * 2 + [State.WAITING]


@pytest.mark.slow
def test_second_signal_kills_running_trials(run_trials, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "DUPLICATE_SIGNAL_WINDOW_S", 0.1)
    signal_when_ready(tmp_path, 1, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_trials("signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SIGNAL_READY)
