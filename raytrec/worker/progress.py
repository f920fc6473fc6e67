"""Counts of a run, and the entry that describes the run in its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import time
from typing import Any

from torchrec.distributed.types import ShardingPlan

from raytrec.checkpoint.state import LogicalState
from raytrec.common import messages
from raytrec.common.formatting import null_nonfinite
from raytrec.common.machine import get_installed_versions
from raytrec.common.redaction import hide_all
from raytrec.embeddings.sharding import describe_plan
from raytrec.metrics.sums import MetricSums
from raytrec.tasks.outputs import StepOutputs
from raytrec.worker.context import WorkerContext
from raytrec.worker.nonfinite import MAX_STEPS_IN_FLIGHT, AsyncHostCopy, RecentBatches
from raytrec.worker.step import Step
from raytrec.worker.step_timing import Stopwatch

COUNTS = ("step", "rows", "trained", "nan_steps")  # attributes of Progress that checkpoints store


@dataclass
class Progress:
    """Counts of a run since its first start, over all restarts. Training metrics are reported per window of steps.

    Attributes:
        step: Number of completed steps; with the steps per epoch, it determines the rows that remain.
        rows: Number of rows in the completed steps, including unreadable rows.
        trained: Number of these rows without unreadable rows and skipped steps, in the windows whose sums were read.
        nan_steps: Number of steps skipped because their loss was not finite (train.on_nan: skip).
        window: Sums for the metrics of the current window, the steps since the last report (train.log_every_steps).
        clock: Stopwatch that measures the training time and counts the rows processed in it.
        reported: Metrics of the most recent window whose sums have been read.
        evaluation: "step" and metrics of the last evaluation during training (train.eval_every_steps); {} if none.
        early_stopping: "best" value of the metric so far and its "step", both missing if there is none, and the number
            of evaluations "since" then; {} without early stopping, and before the first evaluation.
        deep_share: Factor by which the deep part was scaled at the end, chosen on held-out rows
            (worker.evaluate.evaluate_shrunk); None if the deep part was not scaled.
    """

    window: MetricSums
    step: int = 0
    rows: int = 0
    trained: int = 0
    nan_steps: int = 0
    clock: Stopwatch = field(default_factory=Stopwatch)
    reported: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    early_stopping: dict[str, Any] = field(default_factory=dict)
    deep_share: float | None = None
    _pending: tuple[int, dict[str, Any], AsyncHostCopy] | None = None  # finished window: step, counts, sums
    _ready: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    @property
    def evaluated(self) -> bool:
        """Return True if the current step has been evaluated."""
        return self.evaluation.get("step") == self.step

    @property
    def last_evaluation(self) -> dict[str, Any] | None:
        """Return the evaluation of the current step, with NaN and infinity replaced by None; None if not evaluated."""
        return null_nonfinite(self.evaluation) if self.evaluated else None

    def count(self, rows: int, outputs: StepOutputs) -> None:
        """Count a training step that processed `rows` rows across all ranks, and add its outputs to the window."""
        self.step, self.rows = self.step + 1, self.rows + rows
        self.nan_steps += outputs.skipped
        self.window.add(outputs)
        self.clock.step(rows)

    def result(self) -> dict[str, Any]:
        """Return the counts, the speed and, if it was chosen, the deep share of training by name, for result.json."""
        return {
            "train.rows": self.trained,
            "train.skipped_rows": self.rows - self.trained,
            "train.nan_steps": self.nan_steps,
            "train.steps": self.step,
            "train.samples_per_s": self.clock.rows_per_s,
        } | ({} if self.deep_share is None else {"train.deep_share": self.deep_share})

    def record(self) -> dict[str, Any]:
        """Return the counts and all other values that `resume` restores by name, as JSON values for a checkpoint.

        This is a collective operation: every rank must call it.
        """
        self._read_pending()
        return {name: getattr(self, name) for name in COUNTS} | {
            "window": self.window.total(),
            "seconds": self.clock.seconds,
            "timed_rows": self.clock.rows,
            "evaluation": self.last_evaluation,
            "early_stopping": self.early_stopping,
            "deep_share": self.deep_share,
        }

    def resume(self, record: dict[str, Any]) -> None:
        """Continue from the counts that `record` returned in an earlier process."""
        for name in COUNTS:
            setattr(self, name, record[name])
        self.window.resume(record["window"])
        self.clock.seconds, self.clock.rows = record["seconds"], record["timed_rows"]
        self.evaluation = record["evaluation"] or {}
        self.early_stopping = dict(record["early_stopping"])
        self.deep_share = record.get("deep_share")

    def end_window(self) -> None:
        """End the current window, and start the reduction of its sums over ranks.

        This is a collective operation: every rank must call it.
        """
        self._read_pending()
        counts = {
            "rows": self.rows,
            "rows_per_s": self.clock.rows_per_s,
            "skipped_rows": 0,  # set when the sums have been read
            "nan_steps": self.nan_steps,
        }
        self._pending = self.step, counts, AsyncHostCopy(self.window.take())

    def report(self, context: WorkerContext, wait: bool = False) -> None:
        """Report all ended windows whose sums are available.

        On a GPU, a window is reported two steps late, because the host does not wait for the last steps.

        Args:
            context: Context of the rank.
            wait: True to wait for the sums and report all ended windows.
        """
        if self._pending and (
            wait or context.device.type != "cuda" or self.step >= self._pending[0] + MAX_STEPS_IN_FLIGHT
        ):
            self._read_pending()
        for step, figures in self._ready:
            context.report(messages.Train(step=step, figures=figures))
        self._ready = []

    def _read_pending(self) -> None:
        if self._pending is None:
            return
        step, counts, sums = self._pending
        figures = self.reported = self.window.figures(sums.wait())
        self.trained += int(figures["rows"])
        counts["skipped_rows"] = counts["rows"] - self.trained
        self._ready.append((step, figures | counts))
        self._pending = None


@dataclass
class RankRun:
    """State of the run on one rank, created by the training loop and used by observers and checkpoints.

    Attributes:
        step: Model of the rank with its optimizer and pipeline.
        plan: Sharding plan of the model.
        state: State of the model and its optimizer, under names that do not depend on the plan.
        batches: Iterator over training batches, which keeps recent batches, including those read ahead.
        last_step: Last step of the run.
    """

    context: WorkerContext
    step: Step
    plan: ShardingPlan
    state: LogicalState
    progress: Progress
    batches: RecentBatches
    last_step: int

    def describe(self) -> dict[str, Any]:
        """Return the index entry "about" for a checkpoint of the current state, without managed ids and deltas.

        This is a collective operation: every rank must call it.
        """
        task, config = self.context.task, self.context.task.config
        train = task.datasets.get("train")  # missing if batches do not come from files
        return {
            "name": config.run.name,
            "saved_unix_s": time(),
            "progress": self.progress.record(),
            "evaluation": self.progress.last_evaluation,
            "data": task.fingerprint,
            "text_ids": dict(train.text_ids) if train else {},
            "config": hide_all(config.model_dump(by_alias=True, mode="json")),  # checkpoints are shared
            "schema": task.schema.to_yaml(),
            "plan": describe_plan(self.plan),
            "world_size": self.context.world,
            "versions": get_installed_versions(),
        }
