"""What one rank does, top to bottom."""

from __future__ import annotations

from math import isfinite

from raytrec.config import RunConfig
from raytrec.data.order import Order
from raytrec.errors import RunError
from raytrec.train.rank import Clock, Rank, Task

CHECK_STEPS = 20


def train_worker(task: Task) -> None:
    """Trains, evaluates and saves as one rank of a Ray Train worker group."""
    from raytrec.embeddings.plan import describe
    from raytrec.train import checkpoint
    from raytrec.train.build import build_step
    from raytrec.train.evaluate import evaluate
    from raytrec.train.metrics import Sums

    rank = Rank.enter(task)
    config, order = task.config, train_order(task.config)
    train = rank.stream("train", order)
    batches = train.epochs(config.train.epochs)  # reads while the model is built
    rank.tell(kind="phase", text="building the model")
    step, plan = build_step(config, task.schema, rank.device)
    if config.run.start_from:
        checkpoint.load(step.model, config.run.start_from)
    valid = rank.stream("valid", evaluation_order(config)) or rank.stream("test", evaluation_order(config))
    test = rank.stream("test", evaluation_order(config)) or valid

    total = total_steps(config, train.dataset.rows)
    window, clock, done, rows, trained = Sums(rank.device), Clock(), 0, 0, 0
    rank.tell(kind="start", total=total, epochs=config.train.epochs, plan=describe(plan))
    for pause in pauses(total, config.train.eval_every_steps):
        clock.resume()
        for outputs in step.train(batches, pause - done):
            done += 1
            rows += order.global_rows(train.dataset.rows, (done - 1) % order.steps(train.dataset.rows))
            window.add(outputs)
            clock.step(rows)
            if done % config.train.log_every_steps == 0 or done == total:
                figures = window.reduce()
                if figures["rows"]:  # a window may have been left out as a whole (data.on_error)
                    stop_if_not_finite(figures, done)
                trained += figures["rows"]
                figures |= {"rows": rows, "rows_per_s": clock.rows_per_s, "skipped_rows": rows - trained}
                rank.tell(kind="train", step=done, **figures)
        if done < total:
            rank.tell(kind="eval", step=done, **evaluate(step, valid, rank.device))
    batches.close()

    rank.tell(kind="phase", text="saving the checkpoint")
    checkpoint.save(step.model, task.checkpoint)
    result = {"train.rows": trained, "train.skipped_rows": rows - trained}
    result |= {"train.steps": done, "train.samples_per_s": clock.rows_per_s}
    if test:
        rank.tell(kind="phase", text="evaluating")
        result |= {f"eval.{name}": value for name, value in evaluate(step, test, rank.device).items()}
    rank.tell(kind="result", step=done, figures=result)


def evaluate_worker(task: Task) -> None:
    """Loads a checkpoint and evaluates it as one rank of a Ray Train worker group."""
    from raytrec.train import checkpoint
    from raytrec.train.build import build_step
    from raytrec.train.evaluate import evaluate

    rank = Rank.enter(task)
    rank.tell(kind="phase", text="loading the checkpoint")
    step, _ = build_step(task.config, task.schema, rank.device)
    checkpoint.load(step.model, task.checkpoint)
    rank.tell(kind="phase", text="evaluating")
    figures = evaluate(step, rank.stream("test", evaluation_order(task.config)), rank.device)
    rank.tell(kind="result", step=0, figures={f"eval.{name}": value for name, value in figures.items()})


def check_worker(task: Task) -> None:
    """Holds the configuration, with the plan of its real tables on shrunk ones, to a single process."""
    from raytrec.checks.parity import compare
    from raytrec.checks.shrink import shrink
    from raytrec.embeddings.plan import describe
    from raytrec.train.build import build_step, plan_of

    rank = Rank.enter(task)
    rank.tell(kind="phase", text="planning")
    plan = plan_of(task.config, task.schema, rank.device)
    config, schema = shrink(task.config, task.schema, plan)
    rank.tell(kind="phase", text=f"{CHECK_STEPS} steps, sharded and on one process")
    rows = max(24, 8 * rank.world)
    findings = compare(build_step, config, schema, rank.device, rows=rows, steps=CHECK_STEPS)
    figures = {"plan": describe(plan), "findings": [finding.record() for finding in findings]}
    rank.tell(kind="result", step=0, figures=figures)


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


def pauses(total: int, every: int | None) -> list[int]:
    """The steps after which training pauses to evaluate; the last is the end."""
    return [*range(every, total, every), total] if every else [total]


def stop_if_not_finite(figures: dict[str, float], step: int) -> None:
    """Every rank sees the same global figures, so all stop together."""
    if not isfinite(figures["logloss"]):
        raise RunError(
            f"the loss is {figures['logloss']}",
            where=f"step {step}",
            expected="a finite loss",
            do="lower optim.dense.lr or optim.embeddings.lr; scale dense columns to about ±10",
        )
