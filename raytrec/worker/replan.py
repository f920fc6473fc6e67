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


def plan_by_records(context: WorkerContext, make: Callable[[Schema], ShardingPlan]) -> ShardingPlan:
    """The plan by what the run has looked up, if plan.replan asks for that and the run has had another number
    of workers; else, and where there is no such plan, by the schema. A collective.

    Args:
        make: gives the plan by a schema's statistics, the same on all ranks.
    """
    task, config, schema = context.task, context.task.config, context.task.schema
    if config.plan.replan == "never":
        return make(schema)
    recorded = [Recorded()]  # the same on all ranks, which then make plans alike
    if context.index == 0:
        recorded = [ray.get(task.coordinator.recorded.remote(), timeout=60)]
    dist.broadcast_object_list(recorded)
    if not recorded[0].workers - {context.world}:
        return make(schema)
    lengths = recorded[0].lengths(config, schema)
    try:
        if not lengths:
            raise ConfigError("the run has recorded no lookups (tracking.every_steps)")
        plan = make(with_recorded(config, schema, lengths))
    except ConfigError as error:  # a restart does not fail for it
        context.report(Warn(text=f"planned by the schema's statistics in spite of plan.replan: {error.what}"))
        return make(schema)
    most = sorted(lengths, key=lambda table: -lengths[table])[:5]
    shown = ", ".join(f"{table} {lengths[table]:.1f}" for table in most)
    reason = f"by the lookups of {len(lengths)} tables that the run has recorded: {shown} ids of a row"
    context.report(Event(event=REPLANNED, details={"reason": reason, "ids_of_a_row": lengths}))
    return plan
