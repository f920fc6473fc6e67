"""A checkpoint's model on all ranks, to evaluate it or to predict with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrec.checkpoint.finite import not_finite, on_any_rank
from raytrec.checkpoint.index import read_index
from raytrec.checkpoint.managed import ids_to_read, take_over_ids
from raytrec.checkpoint.restore import load
from raytrec.checkpoint.state import LogicalState
from raytrec.common import messages
from raytrec.tasks.objective import Objective
from raytrec.worker.build import build_step

if TYPE_CHECKING:
    from raytrec.worker.context import WorkerContext
    from raytrec.worker.step import Step


def load_step(context: WorkerContext, objective: type[Objective] = Objective) -> Step:
    """The model of the task's checkpoint; a collective.

    Args:
        objective: see build.build_step.
    """
    task = context.task
    context.enter_phase("loading the checkpoint", "restore")
    step, _ = build_step(task.config, task.schema, context.device, fill=False, objective=objective)
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
