"""Training of one rank, from building the model to the final evaluation."""

from __future__ import annotations

from contextlib import suppress

from raytrec.checkpoint.state import LogicalState
from raytrec.common import messages
from raytrec.data.stream import Stream
from raytrec.embeddings.sharding import describe_plan
from raytrec.metrics.selection import Selection
from raytrec.metrics.sums import MetricSums
from raytrec.worker.build import begin_or_resume, build_step
from raytrec.worker.checkpointing import CheckpointManager, Stopped
from raytrec.worker.context import WorkerContext
from raytrec.worker.evaluate import EarlyStopping, can_shrink, evaluate, evaluate_shrunk, shrink
from raytrec.worker.loop import (
    count_total_steps,
    list_pauses,
    make_evaluation_order,
    make_train_order,
    resolve_epochs,
    resolve_evaluation_interval,
)
from raytrec.worker.nonfinite import RecentBatches
from raytrec.worker.observers import make_observers
from raytrec.worker.process import freeze_gc
from raytrec.worker.progress import Progress, RankRun
from raytrec.worker.step_timing import compute_flop_rates


class Trainer:
    """Training run of one rank. The constructor builds the model and restores the newest checkpoint, if any.

    All ranks of a worker group must call the constructor and `run` together.

    Args:
        context: Context of the rank.

    Raises:
        Exception: As for `build_step`, `begin_or_resume`, Selection and EarlyStopping.
    """

    def __init__(self, context: WorkerContext):
        self._context, task, config = context, context.task, context.task.config
        self._order, evaluation = make_train_order(config), make_evaluation_order(config)
        train = context.stream("train", self._order)
        valid, test, self._items = (context.stream(name, evaluation) for name in ("valid", "test", "items"))
        self._valid, self._test, self._train_rows = valid or test, test or valid, train.dataset.rows
        total = count_total_steps(config, self._train_rows)

        context.enter_phase("building the model", "plan")
        if config.train.compile:
            context.heartbeat.watch_compiler()
        step, plan = build_step(config, task.schema, context.device, fill=False, steps=total)
        self._selection = Selection.from_config(config, task.schema)
        progress = Progress(MetricSums(self._selection, context.device))
        state = LogicalState(step.model, step.optimizer)
        about = begin_or_resume(context, step, state, progress)
        freeze_gc()

        self._epochs = train.epochs(resolve_epochs(config, self._train_rows), progress.step)
        batches = RecentBatches(context.heartbeat.count_batches(self._epochs), progress.step)
        run = RankRun(context, step, plan, state, progress, batches, total)
        self._config, self._total = config, total
        self._step, self._progress, self._batches = step, progress, batches
        self._stopping = EarlyStopping(config.train.early_stopping, progress, context.device)
        self._folders = self._split_valid_by_folder()
        self._shrinks = "valid" in task.datasets and not self._folders and can_shrink(step)
        self._observers = make_observers(run)
        self._checkpoints = CheckpointManager(run, self._observers, about)
        context.report(
            messages.Start(
                total=total,
                step=progress.step,
                workers=context.world,
                plan=describe_plan(plan),
                metrics=self._selection.describe_metrics(training=True),
            )
        )

    def run(self) -> None:
        """Train, evaluate and save, and report the result to the driver, or that the run has been stopped.

        Raises:
            messages.Restart: The coordinator requests another worker group; raised after a last save.
            RunError: A loss or the saved state was not finite, a live check that is set to stop has failed, an
                evaluation did not read each row once, or the checkpoint of the best step cannot be loaded.
        """
        context, progress = self._context, self._progress
        try:
            self._train()
            self._finish()
        except Stopped:
            progress.report(context, wait=True)
            context.report(messages.Stopped(step=progress.step))
            return context.close()
        except messages.Restart:
            progress.report(context, wait=True)
            context.close()
            raise
        except Exception:
            with suppress(Exception):  # an error because the driver has exited must not hide this one
                context.heartbeat.send()
            raise
        finally:
            self._epochs.close()
            for observer in self._observers:
                observer.close()
        self._report_result()
        return context.close()

    def _train(self) -> None:
        """Train until the last step or until early stopping ends the run, with pauses for evaluations."""
        for observer in self._observers:
            observer.begin()
        first, total = self._progress.step, self._total
        pauses = list_pauses(total, resolve_evaluation_interval(self._config, total), first)
        for pause in sorted({*pauses, *(at for at in self._folders if first <= at < total)}):
            if self._stopping.over:
                break
            self._train_until(pause)
            if (self._progress.step < total or self._stopping.restores) and not self._progress.evaluated:
                self._evaluate()

    def _train_until(self, pause: int) -> None:
        """Train until the run has completed `pause` steps."""
        context, progress = self._context, self._progress
        epoch_steps, log_every = self._order.steps(self._train_rows), self._config.train.log_every_steps
        progress.clock.resume()
        for outputs in self._step.train(self._batches, pause - progress.step):
            rows = self._order.global_rows(self._train_rows, progress.step % epoch_steps)
            progress.count(rows, outputs)
            if progress.step % log_every == 0 or progress.step == self._total:
                progress.end_window()
            progress.report(context)
            context.heartbeat.tick("step", progress.step)
            for observer in self._observers:
                observer.after_step(rows)
            self._checkpoints.after_step(outputs)
        progress.clock.pause(context.device)
        progress.report(context, wait=True)

    def _evaluate(self) -> None:
        """Evaluate the validation data (test data if there is none); with next_folder, the folder trained next."""
        context, progress = self._context, self._progress
        held_out = self._folders.get(progress.step, self._valid)
        evaluate_valid = evaluate_shrunk if self._shrinks else evaluate
        figures, curves, *_ = evaluate_valid(self._step, held_out, context.device, self._selection, self._items)
        progress.evaluation = {"step": progress.step, **figures}
        self._stopping.after_evaluation()
        context.report(messages.Eval(step=progress.step, figures=figures, curves=curves))
        self._checkpoints.after_evaluation()

    def _finish(self) -> None:
        """Restore the best weights (restore_best), scale the deep part (can_shrink), and save the last checkpoint."""
        progress = self._progress
        if (best := self._stopping.best_step()) not in (None, progress.step):
            self._checkpoints.roll_back(best)
        if self._shrinks and progress.deep_share is None:
            self._context.enter_phase("choosing the scale of the deep part on held-out rows", "evaluate")
            *_, progress.deep_share = evaluate_shrunk(self._step, self._valid, self._context.device, self._selection)
            shrink(self._step, progress.deep_share)
        self._checkpoints.finish(again=progress.deep_share is not None or best is not None)
        if progress.step < self._total:
            self._stopping.report(self._context)

    def _report_result(self) -> None:
        """Evaluate the test data (validation data if there is none), if any, and report all metrics of the run."""
        context, progress, device = self._context, self._progress, self._context.device
        result = progress.result() | self._stopping.result(self._total) | {"world_size": context.world}
        rows, rows_per_s = min(self._order.batch_rows, self._train_rows), progress.clock.rows_per_s
        result |= compute_flop_rates(self._step.flops, rows, rows_per_s, device, self._config.train.matmul)
        if self._test:
            context.enter_phase("evaluating", "evaluate")
            figures, curves = evaluate(self._step, self._test, device, self._selection, self._items)
            context.report(messages.Final(step=progress.step, figures=figures, curves=curves))
            result |= self._selection.result(figures)
        unsaved = self._checkpoints.find_unsaved_error()
        context.report(messages.Result(step=progress.step, figures=result, unsaved=unsaved))

    def _split_valid_by_folder(self) -> dict[int, Stream]:
        """Return the streams that are evaluated during training if train.eval_every_steps is next_folder; else {}.

        Each stream contains the folder that is trained next. Its key is the number of steps completed before.
        """
        if self._config.train.eval_every_steps != "next_folder":
            return {}
        parts = self._valid.dataset.split_after_first_folder(self._order.batch_rows)
        return {first: self._valid.narrow(part) for first, part in parts.items()}
