"""Record, check and profile the steps of a run with observers.

All ranks have the same observers, and some of their methods are collectives. To add an observer, write a subclass
of Observer and add it to `make_observers`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import time

from torch.profiler import ProfilerAction, profile

from raytrec.checks.live.agreement import NETWORK
from raytrec.checks.live.outcome import CHECKPOINT, START, STEP, CheckedRun, Outcome, Position
from raytrec.checks.live.registry import LiveChecks, make_stop_error, select_enabled_checks
from raytrec.common import messages
from raytrec.common.file_hashes import compute_code_hash
from raytrec.common.machine import get_installed_versions
from raytrec.compat.torch_ import record_memory, save_memory
from raytrec.embeddings.taps import Taps
from raytrec.tracking.history import select_recorded_ranks
from raytrec.worker.loop import resolve_evaluation_interval
from raytrec.worker.process import SystemMonitor
from raytrec.worker.progress import RankRun
from raytrec.worker.statistics import Statistics

PROFILE_FOLDER = "profile"  # subfolder of the run folder


class Observer:
    """Base class of observers. Its methods do nothing; subclasses override some of them."""

    def begin(self) -> None:
        """Prepare for the first step."""

    def after_step(self, rows: int) -> None:
        """Observe a finished step with `rows` rows in its global batch."""

    def before_save(self) -> None:
        """Check the state before it is saved; an exception prevents the save."""

    def close(self) -> None:
        """Release resources at the end of training, even after an error."""


class RankRecorder(Observer):
    """Observer that reports a RankLine every tracking.every_steps steps and at the last step.

    With early stopping, a line is also reported at multiples of train.eval_every_steps, where training may end. A line
    contains the time spent in each phase, the machine's load, and statistics of this rank's shards
    (docs/monitoring.md). Only the ranks of tracking.history.select_recorded_ranks report.
    """

    def __init__(self, run: RankRun, statistics: Statistics):
        self._run, self._statistics, config = run, statistics, run.context.task.config
        self._first: dict[str, float] = {}  # phase → seconds in the first step
        self._begun = self._first_step = run.progress.step
        self._system, self._every = SystemMonitor(run.context.device), config.tracking.every_steps
        interval = resolve_evaluation_interval(config, run.last_step)
        self._may_end_every = interval if config.train.early_stopping else None

    def after_step(self, rows: int) -> None:
        """Add the step to the statistics, and report a line at the end of an interval."""
        step = self._run.progress.step
        batch = self._run.batches.at(step - 1)  # batches are counted from 0
        self._statistics.add(batch.changed if batch else None)
        if step == self._begun + 1:
            self._first = self._run.step.phases.take()
        if self.wants_probe(step):
            self._record(step)

    def close(self) -> None:
        """Stop measuring the machine's load."""
        self._system.close()

    def wants_probe(self, step: int) -> bool:
        """Return True if a step is the last of an interval; the taps record the lookups of such steps."""
        ends_early = self._may_end_every is not None and step % self._may_end_every == 0
        return step % self._every == 0 or step == self._run.last_step or ends_early

    def _record(self, step: int) -> None:
        context, phases, first = self._run.context, self._run.step.phases.take(), self._first
        phases = {name: seconds + first.get(name, 0.0) for name, seconds in phases.items()}
        line = messages.RankLine(
            step=step,
            first_step=self._first_step,
            unix_s=time(),
            rank=context.index,
            world=context.world,
            attempt=context.attempt,
            steps=step - self._first_step,
            seconds=sum(phases.values()),
            phases_s=phases,
            system=self._system.sample(),
            first_s=first,
            tables=self._statistics.collect(),
        )
        if context.index in select_recorded_ranks(context.world):
            context.report_from_any_rank(line)
        self._first_step, self._first = step, {}


class CheckRunner(Observer):
    """Observer that runs the live checks, which are collectives.

    The checks run at the start, in the first step, every checks.every_steps steps and, with checks.at_checkpoints,
    before checkpoints. `begin`, `after_step` and `before_save` raise a RunError if a check that is set to stop failed.
    """

    def __init__(self, run: RankRun, checks: LiveChecks):
        self._run, self._config, self._checks = run, run.context.task.config, checks
        self._expected_rows, self._checked_at = 0, -1
        self._due, self._prepared = True, False

    def begin(self) -> None:
        """Run the checks scheduled for the start."""
        context = self._run.context
        about = {
            "config": context.task.config.to_yaml(),
            "schema": context.task.schema.to_yaml(),
            "training data": context.task.fingerprint,
            "raytrec's code": compute_code_hash(),
            **({NETWORK: context.network} if context.device.type == "cuda" else {}),
            **get_installed_versions(),
        }
        self._report(self._checks.evaluate(START, Position(self._run.progress.step, about=about)))

    def after_step(self, rows: int) -> None:
        """Run the checks if they have been prepared for this step."""
        self._expected_rows += rows
        if self._prepared:
            self._due = self._prepared = False
            self._check(STEP)

    def before_save(self) -> None:
        """Run the checks scheduled for checkpoints, unless this step has already been checked."""
        if self._config.checks.at_checkpoints and self._checked_at != self._run.progress.step:
            self._check(CHECKPOINT)

    def wants_probe(self, step: int) -> bool:
        """Return True if the next step, `step`, is to be checked, and prepare the checks."""
        every = self._config.checks.every_steps
        self._due |= bool(every and step % every == 0)
        batch = self._run.batches.at(step - 1)  # None for the first step after a pause
        if self._due and batch is not None:
            self._prepared = True
            self._checks.prepare(batch)
        return self._prepared

    def _check(self, moment: str) -> None:
        progress, step = self._run.progress, self._run.progress.step
        self._checked_at, batch = step, self._run.batches.at(step - 1)
        expected = None if self._config.data.on_error == "skip" else self._expected_rows
        position = Position(step, batch and batch.step, expected, progress.reported, progress.window.selection.ratios)
        self._report(self._checks.evaluate(moment, position))

    def _report(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self._run.context.report(replace(outcome, unix_s=time()))
        if error := make_stop_error(outcomes, self._config):
            raise error


class ProbeScheduler(Observer):
    """Observer that lets taps (hooks on lookups and layers) record the steps that other observers probe."""

    def __init__(self, run: RankRun, taps: Taps, wanting: list[RankRecorder | CheckRunner]):
        self._run, self._taps, self._observers = run, taps, wanting

    def begin(self) -> None:
        """Enable recording for the first step if an observer requests it."""
        self.after_step(0)

    def after_step(self, rows: int) -> None:
        """Discard the records of this step, and enable recording for the next step if an observer requests it."""
        self._taps.forget()
        requests = [observer.wants_probe(self._run.progress.step + 1) for observer in self._observers]
        self._taps.is_probing = any(requests)


class StepProfiler(Observer):
    """Observer that profiles the steps in train.profile and writes to profile/ in the run folder.

    rank-R.json.gz is a trace of operators, kernels and collectives for Perfetto or chrome://tracing; on GPUs,
    rank-R.pickle is the allocator's history for pytorch.org/memory_viz. If the folder is not shared by all
    nodes, the files of each rank are on its node.
    """

    def __init__(self, run: RankRun):
        config = run.context.task.config
        steps = config.train.profile.range
        self._context, self._progress = run.context, run.progress
        self._steps = steps[: max(0, run.last_step + 1 - steps.start)]
        self._folder = Path(str(config.run.dir)) / PROFILE_FOLDER
        self._profile: profile | None = None
        self._first = 0  # first step of the profile

    def begin(self) -> None:
        """Start the profile if it begins with the first step; warn if it begins after the last one."""
        if not self._steps:
            text = "no profile is written, because train.profile.steps begins after the last step of the run"
            self._context.report(messages.Warn(text=text))
        self._start_before(self._progress.step + 1)

    def after_step(self, rows: int) -> None:
        """Start, continue or end the profile."""
        step = self._progress.step
        if self._profile is None:
            self._start_before(step + 1)
        elif step + 1 in self._steps:
            self._profile.step()
        else:
            self.close()

    def close(self) -> None:
        """Stop and write the profile if one is running."""
        if self._profile is None:
            return
        context, name = self._context, f"rank-{self._context.index}"
        context.enter_phase("writing the profile", "save")
        self._profile.stop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            if context.device.type == "cuda":
                save_memory(self._folder / f"{name}.pickle")
        except (OSError, RuntimeError) as error:
            text = f"the profile of rank {context.index} could not be written to {self._folder}: {error}"
            context.report_from_any_rank(messages.Warn(text=text))
        else:
            last = max(self._first, self._progress.step)  # its first step may have failed
            steps = f"step {last}" if last == self._first else f"steps {self._first} to {last}"
            details = {"step": last, "reason": f"{steps}; see {self._folder}"}
            context.report(messages.Event(event=messages.PROFILED, details=details))
        self._profile = None

    def _start_before(self, step: int) -> None:
        if step not in self._steps:
            return
        self._first = step
        if self._context.device.type == "cuda":
            record_memory()
        self._profile = profile(schedule=lambda _: ProfilerAction.RECORD, record_shapes=True)
        self._profile.step_num = step  # the step number in the trace
        self._profile.start()


def make_observers(run: RankRun) -> list[Observer]:
    """Return the configured observers in the order of their calls. Every rank must call this collective operation."""
    config, schema, step = run.context.task.config, run.context.task.schema, run.step
    observers: list[Observer] = []
    if config.train.profile:
        observers.append(StepProfiler(run))
    recorded, checked = config.tracking.every_steps, bool(select_enabled_checks(config))
    if not (recorded or checked):
        return observers
    taps = Taps(step.model, step.head, list(schema.sparse))
    probing: list[RankRecorder | CheckRunner] = []
    if recorded:
        id_figures = step.managed.collect_figures if step.managed is not None else dict
        probing.append(RankRecorder(run, Statistics(schema, run.state.tables, taps, id_figures)))
    if checked:
        checked_run = CheckedRun(
            config,
            schema,
            run.state.tables,
            run.state.dense,
            taps,
            run.context.device,
            dict(step.head.model.named_parameters()),
            run.state.unbounded,
            step.maps,
        )
        if len(checks := LiveChecks(checked_run)):
            probing.append(CheckRunner(run, checks))
    return [*observers, *probing, ProbeScheduler(run, taps, probing)]
