"""The plan that a configuration would have on machines that are not here: no processes, no data."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchrec.distributed.planner import Topology

from raytrec.common.errors import ConfigError
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.embeddings.optim import fuse
from raytrec.embeddings.per_table import table_optimizers
from raytrec.embeddings.planner.footprint import GIB, Footprint, footprint, kernel_on, map_share
from raytrec.embeddings.planner.hosts import capacity
from raytrec.embeddings.planner.plan import describe, plan_for, sharders_for_planning
from raytrec.embeddings.planner.validation import host_room, validate_constraints
from raytrec.embeddings.pooling import PooledEmbeddings

ENOUGH_GIB = 1e6  # of a disk that nobody has said the size of


@dataclass(frozen=True)
class PlannedTable:
    """The plan of one table.

    Attributes:
        ranks: that hold a part of it.
        gib, host_gib, disk_gib: of each of these ranks: GiB of weights, optimizer state and cache on its
            device (its GPU, or its memory), in its host's memory beside a GPU, and in files.
    """

    table: str
    rows: int
    dim: int
    sharding_type: str
    compute_kernel: str
    ranks: list[int]
    gib: list[float]
    host_gib: list[float]
    disk_gib: list[float]


def dry_run(
    config: RunConfig,
    schema: Schema,
    hosts: int = 1,
    gpus: int = 8,
    memory_gib: float = 80,
    host_memory_gib: float | None = None,
    disk_gib: float = ENOUGH_GIB,
) -> list[PlannedTable]:
    """The plan on `hosts` × `gpus` GPUs, or workers on CPU (scaling.device), as a run there would make it.

    The dense layers, small beside the tables, are not counted; as in a run, 15 % of each GPU are kept
    free for them and for activations.

    Args:
        hosts: machines. gpus: GPUs, or workers, of each.
        memory_gib: of each GPU or worker, where plan.memory_gib says nothing.
        host_memory_gib: of each host's main memory, where plan.host_memory_gib says nothing; default: twice
            that of its GPUs.
        disk_gib: of each host, for tables in files.

    Raises:
        ConfigError: tables that do not fit, or pins that cannot be kept.
    """
    device = "cpu" if config.scaling.device == "cpu" else "cuda"
    world, memory = hosts * gpus, int((config.plan.memory_gib or memory_gib) * GIB)
    if min(hosts, gpus) < 1:
        raise ConfigError(f"{hosts} hosts with {gpus} GPUs each", expected="at least one of each")
    if config.plan.ranks_per_host not in (None, gpus):
        raise ConfigError(
            f"plan.ranks_per_host is {config.plan.ranks_per_host}, and hosts have {gpus} GPUs",
            where="plan.ranks_per_host",
            expected=f"{gpus}, or nothing",
        )
    free = memory - map_share(schema, world)
    share = int(host_memory_gib * GIB) // gpus if host_memory_gib else 2 * memory
    constraints = validate_constraints(
        config, schema, device, world=world, ranks_per_host=gpus, memory=free, host_share=share
    )
    room = host_room(config, schema, constraints, world, share)
    dtypes = {table: pin.dtype for table, pin in constraints.items()}
    tables = PooledEmbeddings(schema, dtypes, resolve_features(schema, config.model).sequences)
    optimizers = table_optimizers(config, schema)
    fuse(tables.collections, optimizers, device)  # from which the planner knows of the optimizers' state
    with _ranks_per_host(gpus), _quiet():
        topology = Topology(
            world_size=world,
            local_world_size=gpus,
            compute_device=device,
            **capacity(device, free, room, int(disk_gib * GIB) // gpus),
        )
        offered = sharders_for_planning(config, schema, world)
        plan = plan_for(topology, constraints, schema, config, tables, offered)
    if isinstance(plan, ConfigError):
        raise plan
    shards = {
        table: spec.sharding_spec.shards if spec.sharding_spec else None
        for module in plan.plan.values()
        for table, spec in module.items()
    }
    out = []
    for entry in describe(plan):
        name, table = entry["table"], schema.tables[entry["table"]]
        held: dict[int, Footprint] = {}
        for rank, rows, dim in _parts(shards[name], table, world):
            part = Table.model_construct(rows=rows, dim=dim)
            pin, kernel = constraints[name], kernel_on(device, entry["compute_kernel"])
            size = footprint(part, pin.dtype, optimizers[name].name, kernel, pin.load_factor)
            before = held.get(rank, Footprint(0, 0))
            held[rank] = Footprint(*(a + b for a, b in zip(before, size, strict=True)))
        kind = entry["sharding_type"], entry["compute_kernel"]
        sizes = ([size / GIB for size in each] for each in zip(*held.values(), strict=True))
        out.append(PlannedTable(name, table.rows, table.dim, *kind, list(held), *sizes))
    return out


def gib_of_ranks(plan: list[PlannedTable], world: int) -> list[float]:
    """GiB of all tables on each rank's device."""
    total = [0.0] * world
    for table in plan:
        for rank, gib in zip(table.ranks, table.gib, strict=True):
            total[rank] += gib
    return total


def gib_of_hosts(plan: list[PlannedTable], hosts: int, gpus: int, place: str = "host_gib") -> list[float]:
    """GiB of all tables in each host's main memory.

    Args:
        place: or on its disk: disk_gib.
    """
    total = [0.0] * hosts
    for table in plan:
        for rank, gib in zip(table.ranks, getattr(table, place), strict=True):
            total[rank // gpus] += gib
    return total


def _parts(shards: list | None, table: Table, world: int) -> list[tuple[int, int, int]]:
    """(rank, rows, columns) of each shard; None: every rank has all of it."""
    if shards is None:
        return [(rank, table.rows, table.dim) for rank in range(world)]
    return [(shard.placement.rank(), *shard.shard_sizes) for shard in shards]


@contextmanager
def _ranks_per_host(count: int) -> Iterator[None]:
    """TorchRec reads it from the environment wherever it needs it; see hosts.settle_hosts."""
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
