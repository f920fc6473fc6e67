"""The plan for machines that are not here."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from raytrec.common.errors import ConfigError
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.embeddings.optim import fuse
from raytrec.embeddings.planner.constraints import table_optimizers
from raytrec.embeddings.planner.footprint import GIB, Footprint, footprint, kernel_on
from raytrec.embeddings.planner.hosts import Hosts
from raytrec.embeddings.planner.plan import describe, plan_for, sharders_for_planning, validated
from raytrec.embeddings.pooling import PooledEmbeddings

ENOUGH_GIB = 1e6  # of a disk whose size is not given


@dataclass(frozen=True)
class PlannedTable:
    """The plan of one table.

    Attributes:
        ranks: that hold a part of it.
        gib, host_gib, disk_gib: of each of these ranks: GiB of weights, optimizer state and cache on its
            device (its GPU, or its memory), in the memory of a GPU's host, and in files.
        shards: (rank, rows, columns) of each.
        dtype: fp32 or fp16.
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
    shards: list[tuple[int, int, int]]
    dtype: str


def dry_run(
    config: RunConfig,
    schema: Schema,
    hosts: int = 1,
    gpus: int = 8,
    memory_gib: float = 80,
    host_memory_gib: float | None = None,
    disk_gib: float = ENOUGH_GIB,
    gpu: str = "",
    network: float | None = None,
) -> list[PlannedTable]:
    """The plan on `hosts` × `gpus` GPUs, or workers on CPU (scaling.device), as a run there would make it.

    The dense layers, which are small, are not counted; as in a run, 15 % of each GPU are kept
    free for them and for activations.

    Args:
        hosts: machines. gpus: GPUs, or workers, of each.
        memory_gib: of each GPU or worker, unless plan.memory_gib is set.
        host_memory_gib: of each host's main memory; default: twice that of its GPUs.
        disk_gib: of each host, for tables in files.
        gpu: name of the GPUs (embeddings.planner.machines), whose bandwidths the planner then takes.
        network: 10⁹ bytes a second between hosts, for each GPU; default: as such GPUs have at most.

    Raises:
        ConfigError: tables that do not fit, or constraints that cannot be met.
    """
    device = "cpu" if config.scaling.device == "cpu" else "cuda"
    world, memory = hosts * gpus, int((config.plan.memory_gib or memory_gib) * GIB)
    if min(hosts, gpus) < 1:
        raise ConfigError(f"{hosts} hosts with {gpus} GPUs each", expected="at least one of each")
    share = int(host_memory_gib * GIB) // gpus if host_memory_gib else 2 * memory
    there = Hosts(
        gpus, (), memory, share, int(disk_gib * GIB) // gpus, frozenset([gpu] if gpu else []), network
    )
    optimizers = table_optimizers(config, schema)
    with _ranks_per_host(gpus), _quiet():
        constraints, topology = validated(there, world, config, schema, device)
        dtypes = {table: constraint.dtype for table, constraint in constraints.items()}
        tables = PooledEmbeddings(schema, dtypes, resolve_features(schema, config.model).sequences)
        fuse(tables.collections, optimizers, device)  # from which the planner knows of the optimizers' state
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
        parts = _parts(shards[name], table, world)
        for rank, rows, dim in parts:
            part = Table.model_construct(rows=rows, dim=dim)
            constraint, kernel = constraints[name], kernel_on(device, entry["compute_kernel"])
            size = footprint(part, constraint.dtype, optimizers[name].name, kernel)
            before = held.get(rank, Footprint(0, 0))
            held[rank] = Footprint(*(a + b for a, b in zip(before, size, strict=True)))
        gib, host_gib, disk_gib = ([size / GIB for size in each] for each in zip(*held.values(), strict=True))
        out.append(
            PlannedTable(
                name,
                table.rows,
                table.dim,
                entry["sharding_type"],
                entry["compute_kernel"],
                list(held),
                gib,
                host_gib,
                disk_gib,
                parts,
                constraints[name].dtype,
            )
        )
    return out


def gib_of_ranks(plan: list[PlannedTable], world: int) -> list[float]:
    """GiB of all tables on each rank's device."""
    return gib_of_hosts(plan, world, 1, "gib")


def gib_of_hosts(plan: list[PlannedTable], hosts: int, gpus: int, place: str = "host_gib") -> list[float]:
    """GiB of all tables in each host's main memory.

    Args:
        place: or on its disk: disk_gib; or on its devices: gib.
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
