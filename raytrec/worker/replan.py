"""The plan of a run that resumes with another number of workers."""

from __future__ import annotations

from collections.abc import Callable

import ray
import torch.distributed as dist
from torchrec.distributed.types import ShardingPlan

from raytrec.common.errors import ConfigError
from raytrec.common.messages import REPLANNED, Event, Warn
from raytrec.config.schema import Schema
from raytrec.embeddings.planner.recorded import Recorded, with_recorded
from raytrec.worker.context import WorkerContext

WAIT_S = 60.0
SHOWN = 5  # tables, those that are looked up most
INSTEAD = "plan.replan: planned by the schema's statistics, because"


def plan_by_records(context: WorkerContext, make: Callable[[Schema], ShardingPlan]) -> ShardingPlan:
    """The plan by what the run has looked up, if plan.replan asks for that and the run has had another number
    of workers; else, and where such a plan does not fit, by the schema. A collective.

    Args:
        make: gives the plan by a schema's statistics, the same on all ranks.
    """
    config, schema = context.task.config, context.task.schema
    if config.plan.replan == "never":
        return make(schema)
    agreed: list[dict[str, float]] = [_recorded_lengths(context) if context.index == 0 else {}]
    dist.broadcast_object_list(agreed)
    (lengths,) = agreed
    if not lengths:
        return make(schema)
    try:
        plan = make(with_recorded(config, schema, lengths))
    except ConfigError as error:  # a restart does not fail for it
        context.report(Warn(text=f"{INSTEAD} by what the run has looked up: {error.what}"))
        return make(schema)
    most = sorted(lengths, key=lambda table: -lengths[table])[:SHOWN]
    shown = ", ".join(f"{table} {lengths[table]:.1f}" for table in most)
    reason = f"by the lookups of {len(lengths)} tables that the run has recorded: {shown} ids of a row"
    context.report(Event(event=REPLANNED, details={"reason": reason, "ids_of_a_row": lengths}))
    return plan


def _recorded_lengths(context: WorkerContext) -> dict[str, float]:
    """Table → ids of a row, as the coordinator knows them; empty if the plan does not go by them."""
    config, schema = context.task.config, context.task.schema
    try:
        recorded: Recorded = ray.get(context.task.coordinator.recorded.remote(), timeout=WAIT_S)
    except ray.exceptions.RayError as error:
        context.report(Warn(text=f"{INSTEAD} the coordinator does not answer: {type(error).__name__}"))
        return {}
    if not recorded.workers - {context.world}:
        return {}
    lengths = recorded.lengths(config, schema)
    if not lengths:
        context.report(Warn(text=f"{INSTEAD} the run has recorded no lookups (tracking.every_steps)"))
    return lengths
