"""`train.profile`: what each rank does in some steps, as traces of torch.profiler."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerAction, profile

from raytrec.common import messages
from raytrec.compat.torch_ import record_memory, save_memory
from raytrec.worker.observers import Observer
from raytrec.worker.progress import RankRun

PROFILE = "profile"  # in the run folder


class StepProfiler(Observer):
    """Profiles the steps that train.profile asks for, and writes profile/ in the run folder.

    rank-R.json.gz is a trace of operators, kernels and collectives for Perfetto or chrome://tracing; on GPUs,
    rank-R.pickle is the allocator's history for pytorch.org/memory_viz. Where nodes share no folder, each
    rank's files are on its own.
    """

    def __init__(self, run: RankRun):
        config = run.context.task.config
        self._context, self._progress, self._steps = run.context, run.progress, config.train.profile.range
        self._folder = Path(str(config.run.dir)) / PROFILE
        self._profile: profile | None = None
        self._first = 0  # step of the profile

    def begin(self) -> None:
        self._start_before(self._progress.step + 1)

    def after_step(self, rows: int) -> None:
        step = self._progress.step
        if self._profile is None:
            self._start_before(step + 1)
        elif step + 1 in self._steps:
            self._profile.step()
        else:
            self.close()

    def close(self) -> None:
        """Writes what has been recorded."""
        if self._profile is None:
            return
        context, name = self._context, f"rank-{self._context.index}"
        context.enter_phase("writing the profile", "save")
        self._profile.stop()
        first, last = self._first, self._progress.step
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            if context.device.type == "cuda":
                save_memory(self._folder / f"{name}.pickle")
        except (OSError, RuntimeError) as error:
            context.report_from_all(messages.Warn(text=f"rank {context.index}: no profile: {error}"))
        else:
            done = {"step": last, "reason": f"steps {first} to {last}, {self._folder}"}
            context.report(messages.Event(event=messages.PROFILED, details=done))
        self._profile = None

    def _start_before(self, step: int) -> None:
        if step not in self._steps:
            return
        self._first = step
        if self._context.device.type == "cuda":
            record_memory()
        self._profile = profile(schedule=lambda _: ProfilerAction.RECORD, record_shapes=True)
        self._profile.step_num = step  # by which the trace names steps
        self._profile.start()
