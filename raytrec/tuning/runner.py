"""Run trials as child processes, and stop trials that fall behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections import Counter, deque
from contextlib import suppress
from math import isnan
from tempfile import TemporaryFile
from time import monotonic, sleep
from typing import Any

import numpy as np

from raytrec.cluster.session import ray_session, starts_local_ray
from raytrec.common.errors import RunError
from raytrec.common.formatting import format_count
from raytrec.common.machine import get_build_device, list_usable_gpus
from raytrec.common.terminal import to_plain_text
from raytrec.compat.ray_core import list_alive_nodes
from raytrec.config.run_config import RunConfig
from raytrec.driver.console import RunConsole
from raytrec.driver.driver_state import hold_run_lock
from raytrec.driver.launch import DUPLICATE_SIGNAL_WINDOW_S
from raytrec.driver.nodes import build_worker_bundle, count_local_cpus
from raytrec.driver.run import PREVIOUS_DRIVER_TIMEOUT_S
from raytrec.tuning.folder import write_trials
from raytrec.tuning.search import ENDED_STATES, Search, State, Trial
from raytrec.worker.loop import resolve_evaluation_interval

# --allow-code: the user has already allowed the search to run the code that its configurations name.
TRAIN_COMMAND = (sys.executable, "-P", "-m", "raytrec", "train", "--allow-code", "--resume")
TRIAL_POLL_INTERVAL_S = 0.5  # interval between polls of the trials
MAX_STARTS = 3  # maximum number of starts of a trial whose process dies; each start resumes from the last checkpoint
FAILED = 1  # exit status of a failed run
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit statuses of a run that saved after a signal
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


class SuccessiveHalving:
    """Asynchronous successive halving (Li et al., MLSys 2020, https://arxiv.org/abs/1810.05934).

    The age of a trial is the number of rows it has processed, so batch sizes may differ between trials. At ages of
    g, g·f, g·f², … rows, or at its next evaluation, the loss of a trial is compared with the losses of trials that
    reached this age earlier. A trial falls behind if its loss exceeds the 1/f quantile of these losses. f is the
    search's reduction factor (Settings.factor), and g the number of rows in its grace period (Settings.grace_steps).
    """

    def __init__(self, search: Search):
        steps = search.settings.grace_steps or resolve_evaluation_interval(search.config, search.trials[0].total) or 1
        rows: float = steps * search.config.data.global_batch_size
        self._figure = search.figure
        self._share = 1 / search.settings.factor
        self._rungs: dict[float, dict[int, float]] = {}  # age → trial → loss
        while rows < max(trial.rows(trial.total) for trial in search.trials):
            self._rungs[rows], rows = {}, rows * search.settings.factor

    def falls_behind(self, trial: Trial) -> bool:
        """Record a trial's new evaluations, and return True if the trial falls behind in any of them."""
        behind = False
        for step, value in sorted(trial.points.items()):
            reached = [age for age in self._rungs if age <= trial.rows(step)]
            if not reached or trial.number in (others := self._rungs[reached[-1]]):
                continue
            loss = self._figure.loss(value)
            behind |= bool(others) and loss > np.quantile(list(others.values()), self._share)
            others[trial.number] = loss
        return behind


class TuneConsole(RunConsole):
    """Console output of a search: a line for each event, and a live line with the state of the search."""

    def show(self, search: Search) -> None:
        """Update the live line, or print it at intervals if there is no terminal."""
        states = Counter(trial.state for trial in search.trials)
        ended = [trial for trial in search.trials if trial.state in (*ENDED_STATES, State.FAILED)]
        parts = [f"{number} {state}" for state, number in states.items() if state != State.WAITING]
        if best := search.best:
            parts.append(f"best {best.number}: {search.value_text(best)}")
        text = f"{len(ended)}/{len(search.trials)} trials  {', '.join(parts)}"
        done = sum(trial.total if trial in ended else trial.step for trial in search.trials)
        total = sum(trial.total for trial in search.trials)
        self._progress.update(self._task, total=total, completed=done, figures=to_plain_text(text))
        self._plain(text, always=False)


class TrialProcess(subprocess.Popen):
    """Child process that trains a trial with `raytrec train --resume`.

    Args:
        trial: Trial to train.
        environment: Environment variables in addition to the current ones.
    """

    def __init__(self, trial: Trial, environment: dict[str, str]):
        self.trial, self._stop_requested = trial, False
        self._log = TemporaryFile()  # noqa: SIM115
        super().__init__(
            [*TRAIN_COMMAND, str(trial.folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=os.environ | environment,
            start_new_session=True,  # signals to the process group must reach only the search
            preexec_fn=_set_parent_death_signal,
        )

    def request_stop(self) -> None:
        """Signal the process to save and end. Further calls do nothing, because a second signal would kill it."""
        if not self._stop_requested:
            self._stop_requested = True
            self.terminate()

    def outcome(self, status: int) -> tuple[State, str]:
        """Return (state of the trial, error text) for an exit status.

        RUNNING means that the process died without saving. The error text is empty unless the trial failed or died.
        """
        if status == 0:
            return State.FINISHED, ""
        if status == FAILED:
            self._log.seek(0)
            text = self._log.read().decode(errors="replace").strip()
            _, separator, message = f"\n{text}".rpartition("\nerror: ")
            return State.FAILED, message if separator else text.rpartition("\n")[2] or "exit status 1"
        if self._stop_requested or status in STOPPED:
            return State.STOPPED if self.trial.state == State.STOPPED else State.INTERRUPTED, ""
        return State.RUNNING, f"the process died {MAX_STARTS} times, most recently with exit status {status}"


def _set_parent_death_signal() -> None:
    """Make Linux send SIGTERM to the new process if the search is killed, so that the trial saves a checkpoint."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Runner:
    """Scheduler that starts a search's trials as processes, stops weak trials and records the results.

    Args:
        search: Search whose trials are run and updated; at least one trial.
        console: Console for progress and warnings.

    Attributes:
        signal: Number of the signal that requested the end of the search; None if there was no signal.
    """

    def __init__(self, search: Search, console: TuneConsole):
        self.signal: int | None = None
        self._signalled_at = 0.0
        self._search, self._console, self._halving = search, console, SuccessiveHalving(search)
        self._waiting = deque(trial for trial in search.trials if trial.state not in ENDED_STATES)
        for trial in search.trials:  # registers evaluations from before a resume
            self._halving.falls_behind(trial)

    def run(self, at_once: int | None) -> None:
        """Run the remaining trials until all have ended or a signal is received.

        On the first Ctrl-C or SIGTERM, all running trials save and end; a second signal kills them. `at_once`
        is the maximum number of concurrent trials; None: as many as fit.

        Raises:
            RunError: The cluster cannot be reached.
            KeyboardInterrupt: A second signal was received.
        """
        if not self._waiting:
            return
        places = allocate_environments([trial.config for trial in self._waiting], at_once)
        remaining, label = format_count(len(self._waiting), "trial"), self._search.figure.label
        self._console.note(f"running {remaining}, at most {len(places)} at a time, compared by {label}")
        running: dict[int, TrialProcess] = {}  # index in `places` → process
        handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            while running or (self._waiting and self.signal is None):
                for place, environment in enumerate(places):
                    if place not in running and self._waiting and self.signal is None:
                        running[place] = self._begin(self._waiting.popleft(), environment)
                sleep(TRIAL_POLL_INTERVAL_S)
                for place, process in list(running.items()):
                    status = process.poll()  # poll before reading evaluations, so that none is missed
                    self._poll_trial(process)
                    if status is not None:
                        self._record_end(process, status)
                        del running[place]
                self._console.show(self._search)
        except KeyboardInterrupt:
            for process in running.values():
                process.kill()
                process.wait()
            raise
        finally:
            for process in running.values():  # after an error
                process.request_stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.signal is not None and monotonic() - self._signalled_at < DUPLICATE_SIGNAL_WINDOW_S:
            return  # `timeout` and other tools send each signal twice
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal, self._signalled_at = number, monotonic()
        self._console.note("stopping: running trials save a checkpoint first")

    def _begin(self, trial: Trial, environment: dict[str, str]) -> TrialProcess:
        patience = PREVIOUS_DRIVER_TIMEOUT_S + trial.config.scaling.shutdown_grace_s
        with suppress(RunError), hold_run_lock(trial.folder, patience, self._console.note):
            pass  # waits until the process of a killed search has saved
        trial.state, trial.error = State.RUNNING, ""
        suffix = f" again from its newest checkpoint, if any (last step: {trial.step})" if trial.step else ""
        self._console.note(f"trial {trial.number} starts{suffix}: {trial.values_text}")
        self._write_record()
        return TrialProcess(trial, environment)

    def _poll_trial(self, process: TrialProcess) -> None:
        """Read a trial's progress, and stop its process if the trial or the search is to end."""
        trial, previous = process.trial, process.trial.value
        trial.read_evaluations(self._search.figure.key)
        if not isnan(trial.value) and trial.value != previous:
            at = f"step {max(trial.points)}/{trial.total}"
            self._console.note(f"trial {trial.number}  {at}  {self._search.value_text(trial)}")
        if self._halving.falls_behind(trial) and trial.step < trial.total:
            trial.state = State.STOPPED
            self._write_record()
        if self.signal is not None or trial.state == State.STOPPED:
            process.request_stop()

    def _record_end(self, process: TrialProcess, status: int) -> None:
        trial = process.trial
        trial.state, trial.error = process.outcome(status)
        if trial.state == State.RUNNING:
            trial.deaths += 1
            if trial.deaths < MAX_STARTS:
                self._console.warn(
                    f"the process of trial {trial.number} died with exit status {status}; the trial is restarted"
                )
                trial.error = ""  # the trial has not failed
                return self._waiting.appendleft(trial)
            trial.state = State.FAILED
        self._write_record()
        if trial.state == State.FAILED:
            return self._console.warn(f"trial {trial.number} failed: {trial.error.splitlines()[0]}")
        at = f"step {trial.step}/{trial.total}"
        self._console.note(f"trial {trial.number} {trial.state} at {at}: {self._search.value_text(trial)}")

    def _write_record(self) -> None:
        try:
            write_trials(self._search)
        except OSError as error:  # the trial folders contain the results as well
            self._console.warn(f"cannot write the state of the search to {self._search.folder}: {error.strerror}")


def allocate_environments(configs: list[RunConfig], at_once: int | None) -> list[dict[str, str]]:
    """Return one mapping of environment variables for each trial that can run at the same time.

    On this machine, each trial starts its own Ray instance. If trials use GPUs, the variables select the GPUs of each
    trial, and the list may be shorter than `at_once`. On a cluster, no variables are needed, and a trial waits until
    all of its workers fit.

    Args:
        configs: Configurations of the trials.
        at_once: Maximum number of concurrent trials; None: as many as fit.

    Raises:
        RunError: The cluster cannot be reached.
    """
    scaling = configs[0].scaling
    workers = max(config.scaling.max_workers for config in configs)
    if not starts_local_ray(scaling.address):
        if not at_once:
            with ray_session(scaling.address):
                at_once = min(map(_count_concurrent_trials, configs))
        return [{}] * at_once
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    at_once = at_once or max(1, processors // max(map(count_local_cpus, configs)))
    gpus = list_usable_gpus() if scaling.device != "cpu" and get_build_device() != "cpu" else []
    if not gpus:
        return [{}] * at_once
    shares = [gpus[i : i + workers] for i in range(0, len(gpus) - workers + 1, workers)] or [gpus]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares[:at_once]]


def _count_concurrent_trials(config: RunConfig) -> int:
    """Return the number of trials with this configuration that fit on an otherwise idle cluster, at least 1."""
    scaling, nodes = config.scaling, [node["Resources"] for node in list_alive_nodes()]
    gpus = scaling.device == "cuda" or (scaling.device == "auto" and any(node.get("GPU") for node in nodes))
    places = build_worker_bundle(config, "cuda" if gpus else "cpu")
    workers = sum(int(min(node.get(name, 0) // n for name, n in places.items())) for node in nodes)
    return max(1, workers // scaling.max_workers)
