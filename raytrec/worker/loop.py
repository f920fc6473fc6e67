"""Worker functions of each rank (training, evaluation, parity check), and a run's row orders and numbers of steps.

The driver imports this module, so torch is imported only when a rank calls a function.
"""

from __future__ import annotations

from raytrec.common import messages
from raytrec.config.run_config import RunConfig
from raytrec.data.order import Order
from raytrec.worker.context import WorkerContext, WorkerTask

PARITY_STEPS = 20
AUTO_TARGET_ROWS, MAX_AUTO_EPOCHS, MIN_AUTO_STEPS = 1_000_000, 10, 100  # for train.epochs: auto


def train_worker(task: WorkerTask) -> None:
    """Train, evaluate and save as one rank of a Ray Train worker group.

    If an earlier group of the same run was interrupted, training resumes from its newest checkpoint.

    Raises:
        Exception: As for `WorkerContext.enter`, Trainer and `Trainer.run`, including the signal messages.Restart.
    """
    from raytrec.worker.trainer import Trainer

    Trainer(WorkerContext.enter(task)).run()


def evaluate_worker(task: WorkerTask) -> None:
    """Evaluate the task's checkpoint on its dataset "test", as one rank of a Ray Train worker group.

    The metrics are reported to the driver. Errors are those of `WorkerContext.enter`, `load_step` and `evaluate`.
    """
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
    """Compare sharded training with training in a single process, and report the findings to the driver.

    The tables are shrunk for the comparison; the plan is computed for their full size. Errors are those of
    `WorkerContext.enter` and `build_step`.
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
    """Return the number of epochs (train.epochs) for `rows` rows of training data.

    With `auto`, the number is from 1 to MAX_AUTO_EPOCHS, so that the epochs have at most AUTO_TARGET_ROWS rows in total
    if possible. The number is larger if the run would otherwise have fewer than MIN_AUTO_STEPS steps.
    """
    if config.train.epochs != "auto":
        return config.train.epochs
    epochs = min(MAX_AUTO_EPOCHS, max(1, AUTO_TARGET_ROWS // rows))
    return max(epochs, -(-MIN_AUTO_STEPS // max(1, make_train_order(config).steps(rows))))


def count_total_steps(config: RunConfig, rows: int) -> int:
    """Return the number of steps in the whole run: epochs × steps per epoch, at most train.max_steps."""
    steps = resolve_epochs(config, rows) * make_train_order(config).steps(rows)
    return min(steps, config.train.max_steps or steps)


def resolve_evaluation_interval(config: RunConfig, total: int) -> int | None:
    """Return the number of steps between evaluations (train.eval_every_steps); None if there is no fixed interval.

    With `auto`, the interval is a tenth of `total`, the number of steps in the run, rounded up.
    """
    every = config.train.eval_every_steps
    return -(-total // 10) if every == "auto" else None if every == "next_folder" else every


def list_pauses(total: int, every: int | None, start: int = 0) -> list[int]:
    """Return the steps after which training pauses to evaluate: multiples of `every`, if not None, and `total`.

    Pauses before `start` are omitted; a pause at `start` itself is included, except at 0.
    """
    return [*range(-(-max(start, 1) // every) * every, total, every), total] if every else [total]
