"""Save checkpoints during training, and execute the coordinator's commands to save, restart or stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from raytrec.checkpoint.files import get_step_folder, steps
from raytrec.checkpoint.index import InsufficientSpaceError, read_index
from raytrec.checkpoint.restore import gather_ids, load_with_ids
from raytrec.checkpoint.save import CheckpointWriter, NonfiniteStateError, Saved
from raytrec.checkpoint.snapshot import RowSnapshot
from raytrec.common import messages
from raytrec.common.errors import ErrorParts, RunError
from raytrec.common.messages import Command, Restart
from raytrec.common.storage import quote_for_shell
from raytrec.config.features import resolve_features
from raytrec.deltas.publish import DeltaPublisher
from raytrec.worker.consensus import Decision, StepConsensus
from raytrec.worker.nonfinite import LossMonitor, add_advice, make_loss_error
from raytrec.worker.observers import Observer
from raytrec.worker.progress import RankRun
from raytrec.worker.step import StepOutputs


class Stopped(Exception):
    """Signal, raised on all ranks after a last save, that the run stops at the request of a user or the cluster."""


class CheckpointManager:
    """Manager of a run's checkpoints on one rank, which also executes the coordinator's commands.

    All ranks must call the constructor and the public methods together.

    Args:
        run: Run to save.
        observers: Observers whose `before_save` is called before each save.
        about: Entry "about" of the restored checkpoint's index; None at the start of a run.
    """

    def __init__(self, run: RankRun, observers: Sequence[Observer], about: Mapping[str, Any] | None = None):
        self._run, self._context, self._config = run, run.context, run.context.task.config
        self._step, self._state, self._progress = run.step, run.state, run.progress
        self._observers, section, heartbeat = observers, self._config.checkpoint, run.context.heartbeat
        best = run.progress.window.selection.best(section.best_metric) if section.keep_best else None
        rows = RowSnapshot(run.step.model, run.state.tables, heartbeat.tick) if section.async_save else None
        if rows is not None and run.step.managed is not None:
            run.step.managed.on_write = rows.preserve_rows
        self._deltas: DeltaPublisher | None = None
        if self._config.export.deltas:
            self._deltas = DeltaPublisher(
                self._config,
                run.step.model,
                run.state,
                run.step.managed,
                None if about is None else about.get("deltas", {}),
                run.progress.step,
                heartbeat.confirm,
                self._warn,
            )
        self._saver = CheckpointWriter(
            run.context.task.checkpoint, section, self._confirm, run.state.unbounded, best, rows
        )
        self._newest: int | None = run.progress.step or None  # step of the newest checkpoint
        self._error: RunError | None = None  # error of the last checkpoint
        self._saver.last_step = self._newest
        self._consensus, self._losses = StepConsensus(), LossMonitor()
        self._saved_at, self._requested, self._pending = monotonic(), False, Command.GO
        self._is_due = self._deltas is not None and self._deltas.lacks_export()  # services wait for an export
        run.step.drain_every = section.every_steps
        heartbeat.find_unfinished = self._find_unfinished_step

    def after_step(self, outputs: StepOutputs) -> None:
        """Start the ranks' joint decision for this step, and act on the decision of an earlier step.

        Raises:
            Restart, Stopped: The coordinator restarts or stops the group. The state has been saved, unless a warning
                states that this save failed.
            RunError: A loss was not finite; see also `save`.
        """
        step, command = self._progress.step, self._context.heartbeat.command
        is_due = self._is_due or monotonic() - self._saved_at > (self._config.checkpoint.every_s or inf)
        if self._context.index == 0 and command == Command.GO and not self._requested:
            if is_due:
                command, self._requested = Command.SAVE, True
            elif self._deltas is not None and self._deltas.take_request():
                command = Command.DELTA
        self._losses.add(step, outputs.loss)
        decision = self._consensus.exchange(command, self._losses.poll_status(), self._saver.busy)
        decision = decision or Decision(Command.GO, 0, None, True)
        self._raise_if_nonfinite(decision)
        saving_step = self._saver.last_step
        if not decision.busy and saving_step is not None and saving_step < step - self._consensus.lag:
            self._collect_save()
        self._execute(decision.command)

    def _execute(self, command: Command) -> None:
        """Execute a command (SAVE at multiples of checkpoint.every_steps; no RESTART or STOP after the last step).

        If ids of later batches have already been mapped to rows, the pipeline trains on these batches first.
        """
        step, every = self._progress.step, self._config.checkpoint.every_steps
        if command < Command.SAVE and every and step % every == 0:
            command = Command.SAVE
        self._pending = max(self._pending, command)
        if self._pending != Command.GO and self._step.is_map_ahead:
            return self._step.drain()
        command, self._pending = self._pending, Command.GO
        if command == Command.DELTA:
            self._context.heartbeat.tick("save")
            self._cut_delta()
            self._context.heartbeat.tick("step")
        elif command == Command.SAVE:
            self.save()
        elif command in (Command.RESTART, Command.STOP) and step < self._run.last_step:
            self.save(wait=True)
            raise {Command.RESTART: Restart, Command.STOP: Stopped}[command](f"at step {step}")

    def after_evaluation(self) -> None:
        """Save the evaluated state (see `save`) if checkpoint.keep_best is set, because it may be one of the best."""
        if self._config.checkpoint.keep_best:
            self.save(again=True)

    def _cut_delta(self, last: bool = False) -> dict[str, Any]:
        """Start to write a delta, the changes since the last one; return its index entry, {} without export.deltas."""
        return self._deltas.cut(self._progress.step, last) if self._deltas is not None else {}

    def _confirm(self) -> None:
        """Wait until the delta of the same step has been written, and check that this group still owns the run."""
        if self._deltas is not None:
            self._deltas.wait_until_written()
        self._context.heartbeat.confirm()

    def save(self, *, wait: bool = False, again: bool = False, last: bool = False) -> Saved | None:
        """Start saving a checkpoint of this step, unless a save of this step has already been started.

        Args:
            wait: True to wait until the save has ended.
            again: True to save even if a save of this step has already been started.
            last: True if the run ends with this state.

        Returns:
            Outcome of the last save, if `wait` is True and the outcome has not been collected yet; else None.

        Raises:
            RunError: A loss up to this step was not finite, or a live check that is set to stop failed. With
                checks.finite set to stop, also raised if the state of a save was not finite.
        """
        heartbeat, step = self._context.heartbeat, self._progress.step
        decision = self._consensus.finish()
        if decision is not None:  # None: the decision has already been read
            if decision.through < step:  # GPUs are still computing; the copy would wait for them anyway
                decision = self._consensus.agree(self._losses.poll_status(wait=True))
            self._raise_if_nonfinite(decision)
        if again or self._saver.last_step != step:
            heartbeat.tick("save")
            self._collect_save()
            for observer in self._observers:
                observer.before_save()
            ids, about_ids = gather_ids(self._step.maps)
            about = self._run.describe() | about_ids | self._cut_delta(last)
            self._saver.save(step, self._state.tensors(), about, ids)
            self._saved_at, self._requested, self._is_due = monotonic(), False, False
        elif last:
            self._cut_delta(last)
        saved = None
        if wait:
            heartbeat.tick("save")
            saved = self._collect_save()
            if self._deltas is not None:
                self._deltas.collect()
        heartbeat.tick("step")
        return saved

    def roll_back(self, step: int) -> None:
        """Save the current state, and restore weights, optimizer state and managed ids of an earlier step.

        The counts of the run are not restored, because they determine which rows the run has trained on. If
        the step has no checkpoint, the current state is kept, with a warning.

        Raises:
            RunError: See `save`; or the checkpoint of the step cannot be loaded (CheckpointError).
        """
        self._context.enter_phase(f"restoring the weights of step {step}", "restore")
        self.save(wait=True)
        root = self._context.task.checkpoint
        exists = torch.tensor(step in steps(root), device=self._context.device)
        dist.broadcast(exists, src=0)
        if not exists:
            return self._warn(f"the best step, {step}, has no checkpoint; the weights of the last step are kept")
        folder = get_step_folder(root, step)
        load_with_ids(folder, self._state.tensors(), self._step.maps, read_index(folder)["about"])
        self._state.refresh_kernels()
        if self._deltas is not None:
            self._deltas.mark_all()

    def finish(self, *, again: bool = False) -> None:
        """Save the last checkpoint of the run. If the save fails, `find_unsaved_error` returns the error later.

        Args:
            again: True to save even if a checkpoint of this step exists, or its save has failed.

        Raises:
            RunError: See `save`.
        """
        self._context.enter_phase("saving the checkpoint", "save")
        saved = self.save(wait=True, again=again, last=True)
        self._error = saved.error if saved else None
        if self._error is None:
            self._close()

    def find_unsaved_error(self) -> ErrorParts | None:
        """Return the parts of the error that prevented saving the model; None if the model is saved.

        This is a collective operation: every rank must call it. If the save in `finish` has failed, this method tries
        once more, because disk space may have been freed.
        """
        if self._error is not None:
            self.finish(again=True)
        if (error := self._error) is None:
            return None
        self._close()
        if isinstance(error, NonfiniteStateError):
            return error.parts
        from_step = f"resume from the checkpoint of step {self._newest}" if self._newest else "train from the beginning"
        resume = f"raytrec train --resume {quote_for_shell(self._config.run.dir)}"
        return RunError(
            f"the trained model is not saved: {error.what}",
            where=error.where,
            expected=error.expected,
            do=f"{'free up space' if isinstance(error, InsufficientSpaceError) else 'resolve this error'}, and "
            f"{from_step}: {resume}, or submit its job again",
        ).parts

    def _close(self) -> None:
        self._saver.close()
        if self._deltas is not None:
            self._deltas.close()

    def _collect_save(self) -> Saved | None:
        """Wait for the last save, and report and return its outcome; None if no save was started since the last call.

        Nothing is reported to Ray Train. Ray Train would write a record to the same storage, and end the run if the
        storage is full (ray 2.60.0, CheckpointManager). raytrec does not use Ray Train's checkpoints.
        """
        saved = self._saver.collect_outcome()
        if saved is None:
            return None
        if saved.error:
            where = saved.error.where or saved.folder
            self._warn(f"the checkpoint of step {saved.step} was not saved: {saved.error.what} ({where})")
        else:
            self._newest = saved.step
        if saved.note:
            self._warn(saved.note)
        if self._deltas is not None:
            self._deltas.collect(block=False)
        self._context.report(
            messages.Saved(
                step=saved.step,
                folder=saved.folder,
                error=str(saved.error) if saved.error else None,
                blocked_s=saved.blocked_s,
                seconds=saved.seconds,
                delta=self._deltas.written.get(saved.step) if self._deltas else None,
            )
        )
        if isinstance(saved.error, NonfiniteStateError):
            error = add_advice(saved.error, self._config, self._context.task.checkpoint, self._newest)
            if self._config.checks.finite == "stop":
                raise error
            return replace(saved, error=error)
        return saved

    def _warn(self, text: str) -> None:
        self._context.report(messages.Warn(text=text))

    def _find_unfinished_step(self) -> tuple[int, str] | None:
        """Return the GPU's first unfinished step and its phase, or None; called by the heartbeat's thread."""
        device = self._context.device
        if device.type != "cuda":
            return None
        torch.cuda.set_device(device)  # set per thread; otherwise GPU 0, the default, would be initialized as well
        try:
            step = self._losses.unfinished
            return None if step is None else (step, self._step.phases.unfinished_phase or "")
        except RuntimeError:  # the GPU has failed; the training thread raises the error
            return None

    def _raise_if_nonfinite(self, decision: Decision) -> None:
        """If some rank's loss was not finite, write this rank's batch of the first such step, and raise RunError."""
        if decision.bad is None:
            return
        if decision.through < decision.bad:  # another rank may find an earlier step
            decision = self._consensus.agree(self._losses.poll_status(wait=True))
        batch, schema = self._run.batches.at(decision.bad - 1), self._context.task.schema  # batches count from 0
        sequences = resolve_features(schema, self._config.model).sequences
        raise make_loss_error(batch, schema, self._config.run.dir, decision.bad, self._context.index, sequences)
