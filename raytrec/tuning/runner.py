"""Runs trials as child processes; stops those that fall behind."""

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

from raytrec.cluster.session import ray_session, stays_here
from raytrec.common.errors import RunError
from raytrec.common.formatting import count
from raytrec.common.machine import built_for, usable_gpus
from raytrec.common.terminal import plain
from raytrec.compat.ray_core import alive_nodes
from raytrec.config.run_config import RunConfig
from raytrec.driver.console import RunConsole
from raytrec.driver.driver_state import hold_run_lock
from raytrec.driver.launch import SAME_S
from raytrec.driver.nodes import bundle, local_cpus
from raytrec.driver.run import PATIENCE_S
from raytrec.tuning.folder import write_trials
from raytrec.tuning.search import OVER, Search, State, Trial
from raytrec.worker.loop import evaluation_steps

# The search has been allowed the code that the configurations of its trials name.
COMMAND = (sys.executable, "-P", "-m", "raytrec", "train", "--allow-code", "--resume")
LOOK_AT_TRIALS_S = 0.5  # between two looks at the trials
TRIES = 3  # of a trial whose process dies: it resumes from its last checkpoint
FAILED = 1  # exit status of a run that failed
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # of one that has saved because of a signal
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


class Halving:
    """Asynchronous successive halving (Li et al., MLSys 2020, https://arxiv.org/abs/1810.05934).

    A trial's age is the rows that it was trained on, so that batch sizes may differ. At grace, grace×factor,
    grace×factor², … rows its loss is compared with those that others had at that age. It falls behind if
    it is not among the best 1 / factor of them.
    """

    def __init__(self, search: Search):
        steps = search.settings.grace_steps or evaluation_steps(search.config, search.trials[0].total) or 1
        rows: float = steps * search.config.data.global_batch_size
        self._figure = search.figure
        self._share = 1 / search.settings.factor
        self._rungs: dict[float, dict[int, float]] = {}  # age → trial → loss
        while rows < max(trial.rows(trial.total) for trial in search.trials):
            self._rungs[rows], rows = {}, rows * search.settings.factor

    def falls_behind(self, trial: Trial) -> bool:
        """Whether an evaluation that was not compared before is worse than those of others of its age."""
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
    """Shows how a search gets on: a line for each event, and a live line."""

    def show(self, search: Search) -> None:
        """Updates the live line; without a terminal, prints it now and then."""
        states = Counter(trial.state for trial in search.trials)
        ended = [trial for trial in search.trials if trial.state in (*OVER, State.FAILED)]
        parts = [f"{number} {state}" for state, number in states.items() if state != State.WAITING]
        if best := search.best:
            parts.append(f"best {best.number}: {search.value_text(best)}")
        text = f"{len(ended)}/{len(search.trials)} trials  {', '.join(parts)}"
        done = sum(trial.total if trial in ended else trial.step for trial in search.trials)
        total = sum(trial.total for trial in search.trials)
        self._progress.update(self._task, total=total, completed=done, figures=plain(text))
        self._plain(text, always=False)


class TrialProcess(subprocess.Popen):
    """The process that trains a trial.

    Args:
        environment: variables in addition to those of this process.
    """

    def __init__(self, trial: Trial, environment: dict[str, str]):
        self.trial, self._asked = trial, False
        self._log = TemporaryFile()  # noqa: SIM115
        super().__init__(
            [*COMMAND, str(trial.folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=os.environ | environment,
            start_new_session=True,  # signals to the search's group are for the search
            preexec_fn=_end_with_search,
        )

    def ask_to_end(self) -> None:
        """Asks it to save and end; only once, because a second signal would end it at once."""
        if not self._asked:
            self._asked = True
            self.terminate()

    def outcome(self, status: int) -> tuple[State, str]:
        """The state and error of the trial, by the exit status of its process; RUNNING: the process died."""
        if status == 0:
            return State.FINISHED, ""
        if status == FAILED:
            self._log.seek(0)
            text = self._log.read().decode(errors="replace").strip()
            _, found, message = f"\n{text}".rpartition("\nerror: ")
            return State.FAILED, message if found else text.rpartition("\n")[2] or "exit status 1"
        if self._asked or status in STOPPED:
            return State.STOPPED if self.trial.state == State.STOPPED else State.INTERRUPTED, ""
        return State.RUNNING, f"its process died {TRIES} times, last with exit status {status}"


def _end_with_search() -> None:
    """Run by a new process: the kernel sends it SIGTERM, upon which it saves, when the search is killed."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Runner:
    """Runs the trials of a search.

    Attributes:
        signal: that asked the search to end; None: none did.
    """

    def __init__(self, search: Search, console: TuneConsole):
        self.signal: int | None = None
        self._signalled_at = 0.0
        self._search, self._console, self._halving = search, console, Halving(search)
        self._waiting = deque(trial for trial in search.trials if trial.state not in OVER)
        self._deaths: Counter[int] = Counter()  # of a trial's process
        for trial in search.trials:  # what a resumed search has evaluated
            self._halving.falls_behind(trial)

    def run(self, at_once: int | None) -> None:
        """Runs the trials that are not over, until all have ended or a signal comes.

        The first Ctrl-C or SIGTERM lets all running trials save and end; the second one kills them.

        Args:
            at_once: trials that run at a time; None: as many as there is room for.

        Raises:
            RunError: the cluster cannot be reached. KeyboardInterrupt: at the second signal.
        """
        if not self._waiting:
            return
        places = find_room([trial.config for trial in self._waiting], at_once)
        left, label = count(len(self._waiting), "trial"), self._search.figure.label
        self._console.note(f"{left} to run, {len(places)} at a time, compared by {label}")
        running: dict[int, TrialProcess] = {}  # by place
        handlers = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            while running or (self._waiting and self.signal is None):
                for place, environment in enumerate(places):
                    if place not in running and self._waiting and self.signal is None:
                        running[place] = self._begin(self._waiting.popleft(), environment)
                sleep(LOOK_AT_TRIALS_S)
                for place, process in list(running.items()):
                    status = process.poll()  # before the last evaluations are read
                    self._look(process)
                    if status is not None:
                        self._note_end(process, status)
                        del running[place]
                self._console.show(self._search)
        except KeyboardInterrupt:
            for process in running.values():
                process.kill()
                process.wait()
            raise
        finally:
            for process in running.values():  # after an error
                process.ask_to_end()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.signal is not None and monotonic() - self._signalled_at < SAME_S:
            return  # `timeout` and others send each signal twice
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal, self._signalled_at = number, monotonic()
        self._console.note("ending: running trials save first")

    def _begin(self, trial: Trial, environment: dict[str, str]) -> TrialProcess:
        patience = PATIENCE_S + trial.config.scaling.shutdown_grace_s
        with suppress(RunError), hold_run_lock(trial.folder, patience, self._console.note):
            pass  # a process of a search that was killed has saved
        trial.state, trial.error = State.RUNNING, ""
        after = f", resumed after step {trial.step}" if trial.step else ""
        self._console.note(f"trial {trial.number} begins{after}: {trial.values_text}")
        self._write()
        return TrialProcess(trial, environment)

    def _look(self, process: TrialProcess) -> None:
        """Reads how far a trial is, and asks it to end if it falls behind or the search ends."""
        trial, before = process.trial, process.trial.value
        trial.read_evaluations(self._search.figure.key)
        if not isnan(trial.value) and trial.value != before:
            at = f"step {max(trial.points)}/{trial.total}"
            self._console.note(f"trial {trial.number}  {at}  {self._search.value_text(trial)}")
        if self._halving.falls_behind(trial) and trial.step < trial.total:
            trial.state = State.STOPPED
            self._write()
        if self.signal is not None or trial.state == State.STOPPED:
            process.ask_to_end()

    def _note_end(self, process: TrialProcess, status: int) -> None:
        trial = process.trial
        trial.state, trial.error = process.outcome(status)
        if trial.state == State.RUNNING:
            self._deaths[trial.number] += 1
            if self._deaths[trial.number] < TRIES:
                self._console.warn(f"the process of trial {trial.number} died; restarting")
                return self._waiting.appendleft(trial)
            trial.state = State.FAILED
        self._write()
        if trial.state == State.FAILED:
            return self._console.warn(f"trial {trial.number} failed: {trial.error.splitlines()[0]}")
        at = f"step {trial.step}/{trial.total}"
        self._console.note(f"trial {trial.number} {trial.state} at {at}: {self._search.value_text(trial)}")

    def _write(self) -> None:
        try:
            write_trials(self._search)
        except OSError as error:  # the results are in the folders of the trials, too
            self._console.warn(f"the state of the search cannot be written: {error.strerror}")


def find_room(configs: list[RunConfig], at_once: int | None) -> list[dict[str, str]]:
    """The places for trials that run at a time: an environment for each, with the GPUs that it may use.

    On this machine each trial starts its own Ray. On a cluster a trial waits for room for all of its workers.

    Raises:
        RunError: the cluster cannot be reached.
    """
    scaling = configs[0].scaling
    workers = max(config.scaling.max_workers for config in configs)
    if not stays_here(scaling.address):
        if not at_once:
            with ray_session(scaling.address):
                at_once = min(map(_trials_on_nodes, configs))
        return [{}] * at_once
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    at_once = at_once or max(1, processors // max(map(local_cpus, configs)))
    gpus = usable_gpus() if scaling.device != "cpu" and built_for() != "cpu" else []
    if not gpus:
        return [{}] * at_once
    shares = [gpus[i : i + workers] for i in range(0, len(gpus) - workers + 1, workers)] or [gpus]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares[:at_once]]


def _trials_on_nodes(config: RunConfig) -> int:
    """Trials of this configuration that the nodes would hold if nothing else ran there; at least one."""
    scaling, nodes = config.scaling, [node["Resources"] for node in alive_nodes()]
    gpus = scaling.device == "cuda" or (scaling.device == "auto" and any(node.get("GPU") for node in nodes))
    places = bundle(config, "cuda" if gpus else "cpu")
    workers = sum(int(min(node.get(name, 0) // n for name, n in places.items())) for node in nodes)
    return max(1, workers // scaling.max_workers)
