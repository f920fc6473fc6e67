"""What a rank records of itself while it trains, and what the ranks check together."""

from __future__ import annotations

import hashlib
from pathlib import Path
from time import time
from typing import Any

import raytrec
from raytrec.checkpoint.state import LogicalState
from raytrec.checks.live.runner import CHECKS, LiveChecks, Outcome, Position, verdict
from raytrec.config.sequences import looked_up, read_by_id
from raytrec.embeddings.taps import Taps
from raytrec.worker.checkpointing import versions
from raytrec.worker.context import Rank
from raytrec.worker.nonfinite import Recent
from raytrec.worker.progress import Progress
from raytrec.worker.statistics import Statistics
from raytrec.worker.step import Head, Step
from raytrec.worker.system import System


class Observation:
    """Statistics every tracking.every_steps steps, checks every checks.every_steps; made on all ranks.

    A step that is to be looked at closely is announced to the taps one step before.

    Args:
        batches: what is being trained; remembers the batch of the next step, as far as it has been read.
        last_step: where the run ends.
    """

    def __init__(
        self, rank: Rank, step: Step, state: LogicalState, progress: Progress, batches: Recent, last_step: int
    ):
        config, schema = rank.task.config, rank.task.schema
        self._rank, self._config, self._progress, self._batches = rank, config, progress, batches
        self._last_step, self._phases, self._first_step = last_step, step.phases, progress.step
        self._expected_rows, self._checked_at, self._prepared = 0, -1, False
        head = next(module for module in step.model.modules() if isinstance(module, Head))
        recorded, checked = config.tracking.every_steps, checks_any(config)
        lookups = looked_up(schema, read_by_id(schema, config.model))
        self._taps = Taps(step.model, head, list(lookups.sparse)) if recorded or checked else None
        self._statistics = Statistics(schema, state.tables, self._taps) if recorded else None
        self._system = System(rank.device) if recorded else None
        self._checks = None
        if checked:
            parameters = dict(head.model.named_parameters())
            self._checks = LiveChecks(
                config,
                lookups,
                state.tables,
                state.dense,
                self._taps,
                rank.device,
                parameters,
                state.unbounded,
            )
        self._check_due = checked

    def begin(self) -> None:
        """Checks what must hold before the first step; a collective.

        Raises:
            RunError: a check that is set to stop has failed.
        """
        if self._checks:
            self._report(self._checks.at_start(about(self._rank), self._progress.step))
        self._look_ahead()

    def after_step(self, rows: int) -> None:
        """Records and checks what is due; a collective.

        Args:
            rows: of the global batch.

        Raises:
            RunError: a check that is set to stop has failed.
        """
        if not self._taps:
            return
        step = self._progress.step
        self._expected_rows += rows
        if self._statistics:
            batch = self._batches.at(step - 1)
            self._statistics.add(batch.changed if batch else None)
            if self._recorded_at(step):
                self._record()
        if self._prepared:
            self._check_due = self._prepared = False
            self._check(self._checks.after_step)
        self._taps.forget()
        self._look_ahead()

    def close(self) -> None:
        """Ends what runs beside training."""
        if self._system:
            self._system.close()

    def before_save(self) -> None:
        """Checks what can be checked between steps, so that no bad state is kept; a collective.

        Raises:
            RunError: a check that is set to stop has failed.
        """
        if self._checks and self._config.checks.at_checkpoints and self._checked_at != self._progress.step:
            self._check(self._checks.at_checkpoint)

    def _look_ahead(self) -> None:
        """Has the next step probed, if it is to be recorded or checked."""
        if not self._taps:
            return
        coming, every = self._progress.step + 1, self._config.checks.every_steps
        self._check_due |= bool(self._checks and every and coming % every == 0)
        batch = self._batches.at(coming - 1)  # of the first step after a pause nothing has been read yet
        if self._check_due and batch is not None:
            self._taps.probing = self._prepared = True
            self._checks.prepare(batch)
        self._taps.probing |= self._recorded_at(coming)

    def _recorded_at(self, step: int) -> bool:
        every = self._config.tracking.every_steps
        return bool(every) and (step % every == 0 or step == self._last_step)

    def _record(self) -> None:
        """Sends this rank's line (docs/watch.md) to the driver."""
        rank, step, phases = self._rank, self._progress.step, self._phases.take()
        rank.say(
            kind="rank",
            step=step,
            first_step=self._first_step,
            unix_s=time(),
            rank=rank.index,
            world=rank.world,
            attempt=rank.attempt,
            steps=step - self._first_step,
            seconds=sum(phases.values()),
            phases_s=phases,
            system=self._system.sample(),
            tables=self._statistics.collect(),
        )
        self._first_step = step

    def _check(self, check: Any) -> None:
        step, batch = self._progress.step, self._batches.at(self._progress.step - 1)
        self._checked_at = step
        expected = None if self._config.data.on_error == "skip" else self._expected_rows
        self._report(check(Position(step, batch and batch.step, expected, self._progress.reported)))

    def _report(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self._rank.tell(kind="check", unix_s=time(), **outcome.record())
        if error := verdict(outcomes, self._config):
            raise error


def checks_any(config: Any) -> bool:
    """Whether any check is on."""
    return any(getattr(config.checks, check.name) != "off" for check in CHECKS)


def about(rank: Rank) -> dict[str, Any]:
    """What must be the same on all ranks."""
    return {
        "config": rank.task.config.to_yaml(),
        "schema": rank.task.schema.to_yaml(),
        "training data": rank.task.fingerprint,
        "raytrec's code": code_hash(),
        **versions(),
    }


def code_hash() -> str:
    """SHA-256 of raytrec's own Python files."""
    folder, digest = Path(raytrec.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
