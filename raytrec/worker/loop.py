"""Worker functions that run on every rank: training, evaluation of a checkpoint, and the parity check."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from raytrec.common import messages
from raytrec.config.run_config import RunConfig
from raytrec.data.order import Order
from raytrec.worker.context import WorkerContext, WorkerTask

PARITY_STEPS = 20
AUTO_TARGET_ROWS, MAX_AUTO_EPOCHS, MIN_AUTO_STEPS = 1_000_000, 10, 100  # for train.epochs: auto


def train_worker(task: WorkerTask) -> None:
    """Train, evaluate and save as one rank of a Ray Train worker group.

    If an earlier group of the same run was interrupted, training resumes from its newest checkpoint.
    """
    from raytrec.checkpoint.state import LogicalState
    from raytrec.embeddings.sharding import describe_plan
    from raytrec.metrics.selection import Selection
    from raytrec.metrics.sums import MetricSums
    from raytrec.worker.build import begin_or_resume, build_step
    from raytrec.worker.checkpointing import CheckpointManager, Stopped
    from raytrec.worker.evaluate import EarlyStopping, can_shrink, evaluate, evaluate_shrunk, shrink
    from raytrec.worker.nonfinite import RecentBatches
    from raytrec.worker.observers import make_observers
    from raytrec.worker.process import freeze_gc
    from raytrec.worker.progress import Progress, RankRun
    from raytrec.worker.step_timing import compute_flop_rates

    context = WorkerContext.enter(task)
    config, order = task.config, make_train_order(task.config)
    train, evaluation = context.stream("train", order), make_evaluation_order(config)
    valid, test, items = (context.stream(name, evaluation) for name in ("valid", "test", "items"))
    valid, test = valid or test, test or valid
    epoch_steps, total = order.steps(train.dataset.rows), count_total_steps(config, train.dataset.rows)

    context.enter_phase("building the model", "plan")
    if config.train.compile:
        context.heartbeat.watch_compiler()
    step, plan = build_step(config, task.schema, context.device, fill=False, steps=total)
    selection = Selection.from_config(config, task.schema)
    window = MetricSums(selection, context.device)
    state, progress = LogicalState(step.model, step.optimizer), Progress(window)
    about = begin_or_resume(context, step, state, progress)
    freeze_gc()
    stopping = EarlyStopping(config.train.early_stopping, progress, context.device)
    epochs = train.epochs(resolve_epochs(config, train.dataset.rows), progress.step)
    batches = RecentBatches(context.heartbeat.count_batches(epochs), progress.step)
    folders: dict[int, Any] = {}
    by_folder = config.train.eval_every_steps == "next_folder"
    if by_folder:
        parts = valid.dataset.split_after_first_folder(order.batch_rows)
        folders = {first: valid.narrow(part) for first, part in parts.items()}
    shrinks = "valid" in task.datasets and not by_folder and can_shrink(step)
    evaluate_valid = evaluate_shrunk if shrinks else evaluate
    run = RankRun(context, step, plan, state, progress, batches, total)
    observers = make_observers(run)
    checkpoints = CheckpointManager(run, observers, about)
    context.report(
        messages.Start(
            total=total,
            step=progress.step,
            workers=context.world,
            plan=describe_plan(plan),
            metrics=selection.describe_metrics(training=True),
        )
    )
    try:
        for observer in observers:
            observer.begin()
        pauses = list_pauses(total, resolve_evaluation_interval(config, total), progress.step)
        for pause in sorted({*pauses, *(first for first in folders if progress.step <= first < total)}):
            if stopping.over:
                break
            progress.clock.resume()
            for outputs in step.train(batches, pause - progress.step):
                rows = order.global_rows(train.dataset.rows, progress.step % epoch_steps)
                progress.count(rows, outputs)
                if progress.step % config.train.log_every_steps == 0 or progress.step == total:
                    progress.end_window()
                progress.report(context)
                context.heartbeat.tick("step", progress.step)
                for observer in observers:
                    observer.after_step(rows)
                checkpoints.after_step(outputs)
            progress.clock.pause(context.device)
            progress.report(context, wait=True)
            if (progress.step < total or stopping.restores) and not progress.evaluated:
                held_out = folders.get(progress.step, valid)
                figures, curves, *_ = evaluate_valid(step, held_out, context.device, selection, items)
                progress.evaluation = {"step": progress.step, **figures}
                stopping.after_evaluation()
                context.report(messages.Eval(step=progress.step, figures=figures, curves=curves))
                checkpoints.after_evaluation()
        if (best := stopping.best_step()) not in (None, progress.step):
            checkpoints.roll_back(best)
        if shrinks and progress.deep_share is None:
            context.enter_phase("scaling the deep part on held-out rows", "evaluate")
            _, _, progress.deep_share = evaluate_shrunk(step, valid, context.device, selection)
            shrink(step, progress.deep_share)
        checkpoints.finish(again=progress.deep_share is not None or best is not None)
        stopping.report(context)
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
        epochs.close()
        for observer in observers:
            observer.close()

    result = progress.result() | stopping.result() | {"world_size": context.world}
    rows = min(order.batch_rows, train.dataset.rows)
    result |= compute_flop_rates(step.flops, rows, progress.clock.rows_per_s, context.device, config.train.matmul)
    if test:
        context.enter_phase("evaluating", "evaluate")
        figures, curves = evaluate(step, test, context.device, selection, items)
        context.report(messages.Final(step=progress.step, figures=figures, curves=curves))
        result |= selection.result(figures)
    context.report(messages.Result(step=progress.step, figures=result, unsaved=checkpoints.find_unsaved_error()))
    return context.close()


def evaluate_worker(task: WorkerTask) -> None:
    """Load a checkpoint and evaluate it as one rank of a Ray Train worker group."""
    from raytrec.metrics.selection import Selection
    from raytrec.worker.build import load_step
    from raytrec.worker.evaluate import evaluate

    context = WorkerContext.enter(task)
    step = load_step(context)
    context.enter_phase("evaluating", "evaluate")
    selection = Selection.from_config(task.config, task.schema)
    order = make_evaluation_order(task.config)
    test, items = (context.stream(name, order) for name in ("test", "items"))
    figures, _ = evaluate(step, test, context.device, selection, items)
    figures = selection.result(figures) | {"world_size": context.world}
    context.report(messages.Result(step=0, figures=figures))
    context.close()


def check_worker(task: WorkerTask) -> None:
    """Compare sharded training with training in a single process, and report the findings.

    The tables are shrunk for the comparison; the plan is computed for their full size.
    """
    from raytrec.checks.parity.compare import compare, shrink
    from raytrec.embeddings.sharding import describe_plan
    from raytrec.worker.build import build_step, compute_run_plan

    context = WorkerContext.enter(task)
    context.enter_phase("planning", "plan")
    plan = compute_run_plan(task.config, task.schema, context.device)
    config, schema = shrink(task.config, task.schema, plan)
    context.enter_phase(f"training {PARITY_STEPS} steps, sharded and in a single process", "plan")
    rows = max(24, 8 * context.world)
    findings = compare(build_step, config, schema, context.device, rows=rows, steps=PARITY_STEPS)
    figures = {
        "world_size": context.world,
        "plan": describe_plan(plan),
        "findings": [finding.record() for finding in findings],
    }
    context.report(messages.Result(step=0, figures=figures))
    context.close()


def make_train_order(config: RunConfig) -> Order:
    """Return the order in which the rows of data.train are read.

    Together with (epoch, step), the order defines which rows have been consumed.
    """
    data = config.data
    return Order(
        batch_rows=data.global_batch_size,
        lanes=data.lanes,
        shuffle=data.shuffle,
        window=data.window,
        seed=config.run.seed,
        drop_last=data.drop_last,
    )


def make_evaluation_order(config: RunConfig) -> Order:
    """Return the order of evaluations: every row once, in file order, split over the ranks."""
    return Order.evaluation(config.data.global_batch_size, config.data.lanes)


def resolve_epochs(config: RunConfig, rows: int) -> int:
    """Return the number of epochs (train.epochs) for `rows` rows of training data."""
    if config.train.epochs != "auto":
        return config.train.epochs
    epochs = min(MAX_AUTO_EPOCHS, max(1, AUTO_TARGET_ROWS // rows))
    return max(epochs, -(-MIN_AUTO_STEPS // max(1, make_train_order(config).steps(rows))))


def count_total_steps(config: RunConfig, rows: int) -> int:
    """Return the number of steps in the whole run: epochs × steps per epoch, at most train.max_steps."""
    steps = resolve_epochs(config, rows) * make_train_order(config).steps(rows)
    return min(steps, config.train.max_steps or steps)


def resolve_evaluation_interval(config: RunConfig, total: int) -> int | None:
    """Return the number of steps between evaluations (train.eval_every_steps); None if there is no fixed interval."""
    every = config.train.eval_every_steps
    return -(-total // 10) if every == "auto" else None if every == "next_folder" else every


def list_pauses(total: int, every: int | None, start: int = 0) -> list[int]:
    """Return the steps, from `start` on, after which training pauses for an evaluation; the last is `total`."""
    return [*range(-(-max(start, 1) // every) * every, total, every), total] if every else [total]
