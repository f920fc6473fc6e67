"""The state with which a rank begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from raytrec.checkpoint.index import read_index
from raytrec.checkpoint.managed import ids_to_read, take_over_ids
from raytrec.checkpoint.restore import load, restore
from raytrec.checkpoint.sound import why_no_progress
from raytrec.checkpoint.state import LogicalState, State, is_average, not_finite, on_any_rank
from raytrec.checkpoint.table_starts import schema_of, table_starts
from raytrec.common import messages
from raytrec.common.errors import RunError
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.tables import fill_tables
from raytrec.planning.memory import without_training
from raytrec.tasks.objective import Objective
from raytrec.worker.build import build_step
from raytrec.worker.step import Step

if TYPE_CHECKING:
    from raytrec.worker.context import WorkerContext
    from raytrec.worker.progress import Progress


def begin_or_resume(context: WorkerContext, step: Step, state: LogicalState, progress: Progress) -> None:
    """The state of the newest checkpoint of the run that is whole, else that of a new run; a collective."""
    if not _restore(context, step, state, progress):
        context.enter_phase("setting initial values", "plan")
        begin(step, context.task.config, context.task.schema, context.task.datasets["train"].log_odds)


def _restore(context: WorkerContext, step: Step, state: LogicalState, progress: Progress) -> bool:
    """Takes over the newest checkpoint of the run that is whole; False where there is none."""
    maps = step.maps

    def ids(about: dict[str, Any]) -> State:
        context.enter_phase("restoring", "restore")
        return ids_to_read(about, maps)

    found = restore(context.task.checkpoint, state, why_no_progress, ids)
    for reason in found.passed_over:
        context.report(messages.Warn(text=f"passed over a checkpoint: {reason}"))
    if found.folder:
        take_over_ids(maps, found.more, found.about)
        progress.resume(found.about["progress"])
        step.trained = progress.step
    return bool(found.folder)


def begin(step: Step, config: RunConfig, schema: Schema, log_odds: Sequence[float] = ()) -> None:
    """Set the initial weights: those of run.seed, then those of warm_start.from; a collective.

    Args:
        log_odds: Bias of each column of logits, for models whose last layer is a Linear called logit; empty:
            as drawn.
    """
    fill_tables(step.model, config.run.seed)
    last = getattr(step.head.model, "logit", None)
    if log_odds and last is not None and last.bias is not None:
        with torch.no_grad():
            last.bias.copy_(torch.tensor(log_odds))
    if not config.warm_start.from_:
        return
    index = read_index(config.warm_start.from_)
    starts = table_starts(config, schema_of(index["about"]), schema)
    rows = {table: start.rows for table, start in starts.items() if start.policy == "resize"}
    anew = {table for table, start in starts.items() if start.policy == "new"}
    state = LogicalState(step.model, step.optimizer, with_optimizer=config.warm_start.optimizer)
    # An average is of this run's steps alone, and begins with the first of them.
    tensors = {name: v for name, v in state.tensors(rows, anew).items() if not is_average(name)}
    if config.warm_start.dense == "matching":
        tensors = _matching(tensors, index["tensors"])
    taken = {table: m for table, m in step.maps.items() if starts[table].policy == "exact"}
    ids = ids_to_read(index["about"], taken)
    load(config.warm_start.from_, tensors | ids, rows)
    take_over_ids(taken, ids, index["about"], new_run=True)
    if found := on_any_rank(not_finite(tensors, state.unbounded)):
        raise RunError(
            f"the checkpoint is NaN or infinite: {found}",
            where=f"warm_start.from={config.warm_start.from_}",
            expected="finite weights and optimizer state to begin with",
            do="begin with an earlier checkpoint; if only optimizer state is, set warm_start.optimizer=false",
        )
    state.written()


def _matching(tensors: State, saved: dict[str, dict]) -> State:
    """Without dense values that the checkpoint does not have, or has in another shape."""
    return {
        name: value
        for name, value in tensors.items()
        if not name.startswith("dense/") or (name in saved and saved[name]["shape"] == list(value.shape))
    }


def load_step(context: WorkerContext, objective: type[Objective] = Objective) -> Step:
    """The model of the task's checkpoint, to be evaluated; a collective.

    Args:
        objective: see build.build_step.
    """
    task = context.task
    context.enter_phase("loading the checkpoint", "restore")
    step, _ = build_step(
        without_training(task.config), task.schema, context.device, fill=False, objective=objective
    )
    state = LogicalState(step.model, step.optimizer, with_optimizer=False)
    about = read_index(task.checkpoint)["about"]
    ids = ids_to_read(about, step.maps)
    load(task.checkpoint, state.tensors() | ids)
    take_over_ids(step.maps, ids, about)
    if found := on_any_rank(not_finite(state.tensors(), state.unbounded)):
        context.report(
            messages.Warn(text=f"the checkpoint is NaN or infinite, its figures mean nothing: {found}")
        )
    return step
