"""Runs the trials of a search: Ray Tune places them, successive halving stops those that fall behind."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from time import monotonic
from typing import Any

from raytrec.cluster.lifeline import Lifeline, RayLost
from raytrec.cluster.session import started_here
from raytrec.common.errors import RunError
from raytrec.common.leftovers import owner, remove_leftovers
from raytrec.driver.driver_state import ask_to_stop, driver_of, is_alive
from raytrec.driver.launch import SAME_S
from raytrec.driver.session import run_in_session
from raytrec.tuning.console import TuneConsole
from raytrec.tuning.folder import keep
from raytrec.tuning.room import cpus_of_local_ray, trials_at_once
from raytrec.tuning.search import Search
from raytrec.tuning.trials import FAILED, INTERRUPTED, RUNNING, STOPPED, Trial

TRIES = 2  # more, of a trial whose processes die: it resumes from its last checkpoint
# Of Ray Tune, which is not to write files of its own, to speak, or to take Ctrl-C.
SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}


def run_trials(search: Search, console: TuneConsole, at_once: int | None) -> int | None:
    """Runs what is left of a search.

    Returns:
        The signal that has ended it early; None: all trials are over.

    Raises:
        RunError: Ray could not be started or reached, or was lost and not to be had again.
    """
    if not search.left:
        return None
    runner = _Runner(search, console, at_once)
    run_in_session(search.config, console, runner.work, cpus_of_local_ray(search.configs, at_once))
    return runner.signal


class _Runner:
    """What happens to the trials of a search while they run.

    Attributes:
        signal: that asked the search to end.
    """

    def __init__(self, search: Search, console: TuneConsole, at_once: int | None):
        self._search, self._console, self._at_once = search, console, at_once
        self._trials = {trial.number: trial for trial in search.trials}
        self._asked: set[tuple[int, int]] = set()  # (trial, process of its driver) that was told to end
        self._signalled_at = 0.0
        self.signal: int | None = None

    @contextmanager
    def signals(self) -> Iterator[None]:
        """A block in which Ctrl-C and SIGTERM let all trials save and end; a second one ends it at once.

        To be entered when Ray has been started, which brings handlers of its own.
        """
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in kinds}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.signal is not None and monotonic() - self._signalled_at < SAME_S:
            return  # `timeout` and others send each signal twice
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal, self._signalled_at = number, monotonic()
        self._console.note("ending: trials that run save their state first")

    def work(self) -> None:
        """Runs what is left in a Ray that has been started."""
        from ray import tune

        from raytrec.tuning.actor import TrialActor
        from raytrec.tuning.schedule import Halving, Queue

        search, left = self._search, self._search.left
        limit = trials_at_once([search.configs[trial.number - 1] for trial in left], self._at_once)
        self._console.begin(limit)
        lifeline = Lifeline(search.config.scaling.hang_timeout_s, own=started_here())
        queue = Queue(map(self._told, left), lambda: self.signal is not None)
        halving = Halving(
            search.figure,
            search.trials,
            self._fall_behind,
            grace_rows=search.grace_rows,
            most_rows=search.most_rows,
            factor=search.settings.factor,
        )
        remove_leftovers(gettempdir(), "raytrec-tune-{owner}-*")
        with (
            TemporaryDirectory(prefix=f"raytrec-tune-{owner()}-") as scratch,
            _quiet(),
            self.signals(),
            _with_its_error(),
        ):
            tune.run(
                TrialActor,
                name="search",
                storage_path=scratch,
                num_samples=len(left),
                search_alg=queue,
                scheduler=halving,
                max_concurrent_trials=limit,
                resources_per_trial=tune.PlacementGroupFactory([_place_here()]),
                max_failures=TRIES,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                trial_name_creator=_name,
                trial_dirname_creator=_name,
                callbacks=[_watcher(self, lifeline)],
                raise_on_failed_trial=False,
                verbose=0,
            )

    def _told(self, trial: Trial) -> dict[str, Any]:
        """What a trial's actor is told."""
        return {
            "number": trial.number,
            "folder": str(trial.folder),
            "here": os.getcwd(),
            "rows": trial.batch_rows,
            "figure": asdict(self._search.figure),
        }

    # What happens to a trial.

    def began(self, number: int) -> None:
        trial = self._trials[number]
        if trial.state != STOPPED:
            trial.state, trial.error = RUNNING, ""
            self._console.began(trial)
            self._keep()

    def heard(self, number: int, result: dict[str, Any]) -> None:
        """What a trial says of itself, about twice a second."""
        trial, before = self._trials[number], self._trials[number].value
        trial.points = {step: value for step, value in result["points"]}
        trial.step = max(trial.step, result["step"])
        if not isnan(trial.value) and trial.value != before:
            self._console.evaluated(trial)
        if result["done"]:
            self._ended(trial, result["state"], result["error"])
        elif self.signal is not None:
            self._ask_to_end(trial)
        self._console.show()

    def died(self, number: int, error: str) -> None:
        """The processes of a trial have died more often than it is tried."""
        trial = self._trials[number]
        self._ended(trial, FAILED, f"it was tried {TRIES + 1} times: {error} ({trial.folder}/run.log)")

    def _ended(self, trial: Trial, state: str, error: str) -> None:
        if state == STOPPED and trial.state != STOPPED:  # nobody but the search's end, or somebody outside
            state = INTERRUPTED
        trial.state, trial.error = state, error
        self._keep()
        self._console.ended(trial)

    def _keep(self) -> None:
        try:
            keep(self._search)
        except OSError as error:  # what trials have come to is in their own folders, too
            self._console.warn(f"the state of the search cannot be written: {error.strerror}")

    def _fall_behind(self, number: int, step: int) -> None:
        """The scheduler stops a trial; one that has been trained to its end ends by itself."""
        trial = self._trials[number]
        if step < trial.total and trial.state == RUNNING:
            trial.state = STOPPED
            self._keep()
            self._ask_to_end(trial)

    def _ask_to_end(self, trial: Trial) -> None:
        """Asks the process that drives a trial, as soon as there is one, once: a second time it would not
        save."""
        note = driver_of(trial.folder)
        driver = (trial.number, note.get("pid", 0))
        if driver in self._asked or note.get("status") != "RUNNING" or not is_alive(note):
            return
        self._asked.add(driver)
        with suppress(RunError, OSError):  # it has just ended
            ask_to_stop(note)


class _Lost(BaseException):
    """A part of Ray has ended; no Exception, upon which Ray Tune would ask that Ray to end its trials."""


@contextmanager
def _with_its_error() -> Iterator[None]:
    """A block out of which a _Lost comes as the RayLost that it is."""
    try:
        yield
    except _Lost as lost:
        raise lost.args[0] from None


def _watcher(runner: _Runner, lifeline: Lifeline) -> Any:
    from ray.tune import Callback

    class Watcher(Callback):
        """Tells the runner what Ray Tune hears of trials; looks after Ray itself."""

        def on_step_begin(self, iteration: int, trials: list, **info: Any) -> None:
            try:
                lifeline.check()
            except RayLost as lost:
                raise _Lost(lost) from None

        def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            runner.began(trial.config["number"])

        def on_trial_result(
            self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
        ) -> None:
            runner.heard(trial.config["number"], result)

        def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            runner.died(trial.config["number"], _last_error(trial))

    return Watcher()


def _last_error(trial: Any) -> str:
    """What Ray Tune has noted last of a trial's errors, in a line."""
    with suppress(OSError):
        lines = Path(trial.error_file or "").read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "its processes died"


def _place_here() -> dict[str, float]:
    """What keeps the actors of trials, which need next to nothing, on this node: signals reach them here."""
    import ray

    me = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == me)
    return {f"node:{node['NodeManagerAddress']}": 0.001}


def _name(trial: Any) -> str:
    return f"trial-{trial.config['number']:03}"


@contextmanager
def _quiet() -> Iterator[None]:
    """A block in which Ray Tune keeps what it would say to itself: the console says it."""
    os.environ |= SETTINGS
    loggers = [logging.getLogger(name) for name in ("ray.tune", "ray.air", "ray.train")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
