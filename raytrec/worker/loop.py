"""What one rank does, top to bottom."""

from __future__ import annotations

from raytrec.config.run_config import RunConfig
from raytrec.data.order import Order
from raytrec.worker.context import Rank, Task

CHECK_STEPS = 20


def train_worker(task: Task) -> None:
    """Trains, evaluates and saves as one rank of a Ray Train worker group; goes on where an earlier group of
    the same run was interrupted."""
    from raytrec.common.messages import Restart
    from raytrec.embeddings.planner.plan import describe
    from raytrec.metrics.sums import Sums
    from raytrec.worker.build import build_step
    from raytrec.worker.checkpointing import Stopped, Survival
    from raytrec.worker.evaluate import evaluate
    from raytrec.worker.garbage import spare_what_stays
    from raytrec.worker.initial_state import begin
    from raytrec.worker.nonfinite import Recent
    from raytrec.worker.observe import Observation
    from raytrec.worker.progress import Progress

    rank = Rank.enter(task)
    config, order = task.config, train_order(task.config)
    train, valid, test = rank.streams(order, evaluation_order(config))
    epoch_steps, total = order.steps(train.dataset.rows), total_steps(config, train.dataset.rows)

    rank.phase("building the model", "plan")
    step, plan = build_step(config, task.schema, rank.device, fill=False)
    progress = Progress(Sums(rank.device))
    survival = Survival(rank, step, plan, progress, total)
    rank.phase("restoring", "restore")
    found = survival.restore()
    if not found.folder:
        begin(step, config, task.schema)
    spare_what_stays()
    reading = train.epochs(config.train.epochs, progress.step)
    batches = survival.batches = Recent(rank.pulse.reading(reading), progress.step)
    observation = Observation(rank, step, survival.state, progress, batches, total)
    survival.before_save = observation.before_save
    rank.tell(kind="start", total=total, step=progress.step, workers=rank.world, plan=describe(plan))
    try:
        observation.begin()
        for pause in pauses(total, config.train.eval_every_steps, progress.step):
            progress.clock.resume()
            for outputs in step.train(batches, pause - progress.step):
                rows = order.global_rows(train.dataset.rows, progress.step % epoch_steps)
                progress.count(rows, outputs)
                if progress.step % config.train.log_every_steps == 0 or progress.step == total:
                    rank.tell(kind="train", step=progress.step, **progress.report())
                observation.after_step(rows)
                survival.after_step(outputs)
            progress.clock.pause(rank.device)
            if progress.step < total and not progress.evaluated:
                figures, curves = evaluate(step, rank.watched(valid), rank.device)
                progress.evaluation = {"step": progress.step, **figures}
                rank.tell(kind="eval", curves=curves, **progress.evaluation)
                survival.after_evaluation()
        unsaved = survival.finish()
    except Stopped:
        rank.tell(kind="stopped", step=progress.step)
        return rank.leave()
    except Restart:
        rank.leave()
        raise
    finally:
        reading.close()
        observation.close()

    result = progress.result() | {"world_size": rank.world}
    if test:
        rank.phase("evaluating", "evaluate")
        figures, curves = evaluate(step, rank.watched(test), rank.device)
        rank.tell(kind="final", step=progress.step, curves=curves, **figures)
        result |= {f"eval.{name}": value for name, value in figures.items()}
    if unsaved:  # there may be room by now
        unsaved = survival.finish(again=True)
    rank.tell(kind="result", step=progress.step, figures=result, unsaved=unsaved and unsaved.parts)
    return rank.leave()


def evaluate_worker(task: Task) -> None:
    """Loads a checkpoint and evaluates it as one rank of a Ray Train worker group."""
    from raytrec.checkpoint.finite import not_finite, on_any_rank
    from raytrec.checkpoint.restore import load
    from raytrec.checkpoint.state import LogicalState
    from raytrec.worker.build import build_step
    from raytrec.worker.evaluate import evaluate

    rank = Rank.enter(task)
    rank.phase("loading the checkpoint", "restore")
    step, _ = build_step(task.config, task.schema, rank.device, fill=False)
    state = LogicalState(step.model, step.optimizer, with_optimizer=False)
    load(task.checkpoint, state.tensors())
    if found := on_any_rank(not_finite(state.tensors(), state.unbounded)):
        rank.tell(kind="warn", text=f"the checkpoint is NaN or infinite, its figures mean nothing: {found}")
    rank.phase("evaluating", "evaluate")
    stream = rank.stream("test", evaluation_order(task.config))
    figures, _ = evaluate(step, rank.watched(stream), rank.device)
    figures = {f"eval.{name}": value for name, value in figures.items()} | {"world_size": rank.world}
    rank.tell(kind="result", step=0, figures=figures)
    rank.leave()


def check_worker(task: Task) -> None:
    """Holds the configuration, with the plan of its real tables on shrunk ones, to a single process."""
    from raytrec.checks.parity.compare import compare
    from raytrec.checks.parity.shrink import shrink
    from raytrec.embeddings.planner.plan import describe
    from raytrec.worker.build import build_step, plan_of

    rank = Rank.enter(task)
    rank.phase("planning", "plan")
    plan = plan_of(task.config, task.schema, rank.device)
    config, schema = shrink(task.config, task.schema, plan)
    rank.phase(f"{CHECK_STEPS} steps, sharded and on one process", "plan")
    rows = max(24, 8 * rank.world)
    findings = compare(build_step, config, schema, rank.device, rows=rows, steps=CHECK_STEPS)
    figures = {
        "world_size": rank.world,
        "plan": describe(plan),
        "findings": [finding.record() for finding in findings],
    }
    rank.tell(kind="result", step=0, figures=figures)
    rank.leave()


def train_order(config: RunConfig) -> Order:
    """The order in which data.train is read; with (epoch, step) it says which rows have been consumed."""
    data = config.data
    return Order(
        batch_rows=data.global_batch_size,
        lanes=data.lanes,
        shuffle=data.shuffle,
        window=data.window,
        seed=config.run.seed,
        drop_last=data.drop_last,
    )


def evaluation_order(config: RunConfig) -> Order:
    """File order, dealt out over the ranks; every row once."""
    return Order.evaluation(config.data.global_batch_size, config.data.lanes)


def total_steps(config: RunConfig, rows: int) -> int:
    """Steps of the whole run: epochs × steps per epoch, at most train.max_steps."""
    steps = config.train.epochs * train_order(config).steps(rows)
    return min(steps, config.train.max_steps or steps)


def pauses(total: int, every: int | None, start: int = 0) -> list[int]:
    """The steps after which training pauses to evaluate, from `start` on; the last is the end."""
    return [*range(-(-max(start, 1) // every) * every, total, every), total] if every else [total]
