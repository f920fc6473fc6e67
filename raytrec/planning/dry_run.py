"""The plan for machines that are not here."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from raytrec.common.errors import ConfigError
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import table_optimizers
from raytrec.embeddings.optim import fuse
from raytrec.embeddings.pooling import PooledEmbeddings
from raytrec.embeddings.sharding import sharders_for_planning
from raytrec.planning.footprint import GIB
from raytrec.planning.held import PlannedTable, planned
from raytrec.planning.hosts import Hosts
from raytrec.planning.machines import Cluster
from raytrec.planning.plan import plan_for, validated


def dry_run(
    config: RunConfig, schema: Schema, cluster: Cluster, dense: Iterable[nn.Parameter] = ()
) -> list[PlannedTable]:
    """The plan on a cluster's GPUs, or workers on CPU (scaling.device), as a run there would make it.

    As in a run, 15 % of each GPU are kept free for dense layers and activations.

    Args:
        dense: weights of the dense layers, by whose shapes plans are compared.

    Raises:
        ConfigError: tables that do not fit, or constraints that cannot be met.
    """
    device = "cpu" if config.scaling.device == "cpu" else "cuda"
    gpus, world, machine = cluster.gpus, cluster.world, cluster.machine
    if min(cluster.hosts, gpus) < 1:
        raise ConfigError(f"{cluster.hosts} hosts with {gpus} GPUs each", expected="at least one of each")
    there = Hosts(
        gpus,
        (),
        int((config.plan.memory_gib or cluster.memory_gib) * GIB),
        int(cluster.host_memory_gib * GIB) // gpus,
        int(cluster.disk_gib * GIB) // gpus,
        frozenset([machine.gpu] if machine else []),
        machine.network_of_gpu if machine else None,
    )
    optimizers = table_optimizers(config, schema)
    with _ranks_per_host(gpus), _quiet():
        constraints, topology = validated(there, world, config, schema, device)
        tables = PooledEmbeddings(schema, constraints, resolve_features(schema, config.model).sequences)
        fuse(tables.collections, optimizers, device)  # from which the planner knows of the optimizers' state
        offered = sharders_for_planning(config, schema, world)
        plan = plan_for(there, topology, constraints, schema, config, tables, offered, dense)
    if isinstance(plan, ConfigError):
        raise plan
    return planned(plan, config, schema, world)


@contextmanager
def _ranks_per_host(count: int) -> Iterator[None]:
    """TorchRec reads it from the environment wherever it needs it; see hosts.agree_on_hosts."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings that topology and dense layers are made up, which is the point."""
    logger = logging.getLogger("torchrec.distributed.planner")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
