"""How much memory tables take, and which are in files.

On CPU tables are in files because memory does not hold all of them: TorchRec's planner, which weighs a GPU's
memory against its host's, has no files. No torch here, for the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import bytes_text
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.embeddings.constraints import TableConstraint, table_optimizers
from raytrec.embeddings.kernels import (
    CACHING_KERNEL,
    MMAP_KERNEL,
    UVM_KERNELS,
    kernel_on,
    make_room,
    memory_filesystem,
    mmap_folder,
)
from raytrec.embeddings.optimizers import optimizer_of

GIB = 1024**3
DTYPE_BYTES = {"fp32": 4, "fp16": 2}
# Bytes in a map of managed ids (embeddings/managed/key_map.py), six in ten slots of which are used: of a row
# (key, sightings, last step, row), and of an id that waits for one.
ID_BYTES, WAITING_BYTES = 41, 35
CACHED = 0.2  # of a table's rows, in the GPU's cache of fused_uvm_caching: FBGEMM's default (1.8.0)
WEIGHTS, STATE, CACHE = "weights", "optimizer state", "cache"
Constraints = dict[str, TableConstraint]


class Footprint(NamedTuple):
    """Bytes of a table, or of a part of it: weights, optimizer state, cache."""

    device: int
    host: int
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


def parts_of(table: Table, dtype: str, optimizer: str, kernel: str | None = None) -> dict[str, Footprint]:
    """What a table takes, or a part of it: weights, optimizer state and cache.

    Of a device; with a UVM kernel on a GPU also of its host's memory, with fused_mmap on CPU of its disk.

    Args:
        kernel: of `kernel_on`.
    """
    values, width, optimizer_ = table.rows * table.dim, DTYPE_BYTES[dtype], optimizer_of(optimizer)
    weights, state = values * width, values * optimizer_.bytes_per("value")
    row_state = table.rows * optimizer_.bytes_per("row")
    if kernel == MMAP_KERNEL:
        return {WEIGHTS: Footprint(0, 0, weights), STATE: Footprint(0, 0, state + row_state)}
    if kernel not in UVM_KERNELS:
        return {WEIGHTS: Footprint(weights, 0), STATE: Footprint(state + row_state, 0)}
    # FBGEMM (1.8.0, construct_split_state) keeps state of one value a row on the GPU, and for the cache 4
    # bytes a row and 16 a slot in addition to the slots' weights.
    cache = table.rows * (4 + CACHED * (16 + table.dim * width)) if kernel == CACHING_KERNEL else 0
    return {
        WEIGHTS: Footprint(0, weights),
        STATE: Footprint(row_state, state),
        CACHE: Footprint(int(cache), 0),
    }


def added(sizes: Iterable[Footprint]) -> Footprint:
    """The sum of at least one."""
    return Footprint(*map(sum, zip(*sizes, strict=True)))


def footprint(table: Table, dtype: str, optimizer: str, kernel: str | None = None) -> Footprint:
    """The sum of `parts_of`."""
    return added(parts_of(table, dtype, optimizer, kernel).values())


def footprints(
    config: RunConfig, schema: Schema, constraints: Constraints, device: str
) -> dict[str, Footprint]:
    """Table → the bytes that it takes with its optimizer state, of each table with a constraint.

    Args:
        device: that ranks train on, cpu or cuda.
    """
    optimizers = table_optimizers(config, schema)
    return {
        table: footprint(
            schema.tables[table],
            constraint.dtype,
            optimizers[table].name,
            kernel_on(device, constraint.kernel),
        )
        for table, constraint in constraints.items()
    }


def map_share(schema: Schema, world: int) -> int:
    """Bytes of each rank's device, in addition to its tables, for the maps of managed ids: of every map each
    rank has an equal part, wherever the table's rows are.

    Args:
        world: number of ranks.
    """
    of_tables = (
        table.rows * (ID_BYTES + (WAITING_BYTES if table.ids.admit_after > 1 else 0))
        for table in schema.tables.values()
        if table.ids
    )
    return -(-sum(of_tables) // world)


def move_to_files(
    constraints: Constraints, schema: Schema, config: RunConfig, memory: int
) -> Iterator[Constraints]:
    """On CPU, the constraints with more and more tables in files, as far as plan.compute_kernels allows that
    and nothing else is set for these tables; the first one that has a plan is meant.

    Those with the fewest lookups for their bytes go first: a file is slow at lookups. The first constraints
    are as few in files as memory holds the rest of; if ranks cannot share that, twice as many are tried.

    Args:
        memory: bytes for tables of all ranks together.
    """
    movable = _movable(constraints, schema, config)
    found = footprints(config, schema, constraints, "cpu")
    sizes = {table: size.device for table, size in found.items()}
    left, count = sum(sizes.values()), 0 if "fused" in config.plan.compute_kernels else len(movable)
    while count < len(movable) and left - sum(sizes[table] for table in movable[:count]) > memory:
        count += 1
    while True:
        yield constraints | {table: _in_file(constraints[table]) for table in movable[:count]}
        if count == len(movable):
            return
        count = min(max(1, 2 * count), len(movable))


def disk_refusal(
    constraints: Constraints, schema: Schema, config: RunConfig, memory: int, free: int
) -> ConfigError | None:
    """On CPU, why the disk does not hold the tables that have to be in files; None where it does.

    Args:
        memory: bytes for tables of all ranks together.
        free: the same of the disk.
    """
    chosen = next(move_to_files(constraints, schema, config, memory))
    sizes = {
        table: size.disk for table, size in footprints(config, schema, chosen, "cpu").items() if size.disk
    }
    need, folder = sum(sizes.values()), mmap_folder(config)
    kind = memory_filesystem(folder) if sizes else None
    if kind is None and need <= free:
        return None
    why = f"it is on {kind}, in memory itself" if kind else f"{bytes_text(free)} are free there"
    return ConfigError(
        f"tables {', '.join(sizes)} take {bytes_text(need)} of disk, with optimizer state, and {why}",
        where=f"plan.mmap_dir, {folder}",
        expected="a folder on a disk with room for them, and for checkpoints if those go there, too",
        do=make_room(config),
    )


def _movable(constraints: Constraints, schema: Schema, config: RunConfig) -> list[str]:
    """The tables that may be in files, the largest for their lookups first."""
    if MMAP_KERNEL not in config.plan.compute_kernels:
        return []
    optimizers, features = table_optimizers(config, schema), dict.fromkeys(schema.tables, 0)
    for spec in schema.sparse.values():
        features[spec.table] += 1
    tables = [
        table
        for table, constraint in constraints.items()
        if constraint.kernel is None
        and set(constraint.sharding) - {"data_parallel"}
        and "cpu" in optimizer_of(optimizers[table].name).devices
    ]
    return sorted(tables, key=lambda table: (features[table] / schema.tables[table].rows, table))


def _in_file(constraint: TableConstraint) -> TableConstraint:
    kinds = tuple(kind for kind in constraint.sharding if kind != "data_parallel")
    return replace(constraint, kernel=MMAP_KERNEL, sharding=kinds)
