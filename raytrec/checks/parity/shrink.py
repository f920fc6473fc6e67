"""A configuration with its real plan on tables that fit one process."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.types import ShardingPlan

from raytrec.config.managed import ManagedIds
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.sections import TablePlan
from raytrec.embeddings.planner.constraints import resolve_constraints
from raytrec.embeddings.planner.plan import describe

ROWS = 199  # of a shrunk table: a prime, so that no number of ranks divides it
# Adam and Adagrad divide by the root of the second moment. Where a first gradient is nothing but the rounding
# of larger terms that cancel, about 1e-9 (that of an attention's bias of keys always is), they step by
# rounding ÷ eps; a larger eps makes nothing of that.
EPS = 1e-5


def shrink(config: RunConfig, schema: Schema, plan: ShardingPlan) -> tuple[RunConfig, Schema]:
    """The same features, dims, dtypes, ways of sharding, ranks and kernels; at most 199 rows a table, and an
    eps of at least 1e-5. Managed ids get rows at once."""
    config, schema = config.model_copy(deep=True), schema.model_copy(deep=True)
    constraints = resolve_constraints(config, schema)
    for table in schema.tables.values():
        table.rows, table.ids = min(table.rows, ROWS), table.ids and ManagedIds()
    optims: list[Any] = [config.optim.embeddings, config.optim.dense, *config.optim.tables.values()]
    for optim in optims:
        optim.eps = optim.eps and max(optim.eps, EPS)
    config.plan.colocate = []
    config.plan.tables = {
        entry["table"]: TablePlan(
            sharding_type=entry["sharding_type"],
            ranks=None if entry["sharding_type"] in ("row_wise", "data_parallel") else entry["ranks"],
            compute_kernel=entry["compute_kernel"],
            dtype=constraints[entry["table"]].dtype,
            stochastic_rounding=constraints[entry["table"]].stochastic_rounding,
        )
        for entry in describe(plan)
    }
    return config, schema
