"""How much memory tables take, and which are in files.

On CPU tables are in files because memory does not hold all of them: TorchRec's planner, which weighs a GPU's
memory against its host's, has no files. No torch here, for the driver.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import bytes_text
from raytrec.common.storage import in_shell, relative
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.embeddings.planner.constraints import TableConstraint, table_optimizers

GIB = 1024**3
DTYPE_BYTES = {"fp32": 4, "fp16": 2}
UVM_KERNELS = ("fused_uvm", "fused_uvm_caching")
CACHING_KERNEL = UVM_KERNELS[1]
MMAP_KERNEL = "fused_mmap"
# Bytes in a map of managed ids (embeddings/managed/key_map.py), six in ten slots of which are used: of a row
# (key, sightings, last step, row), and of an id that waits for one.
ID_BYTES, WAITING_BYTES = 41, 35
CACHED = 0.2  # of a table's rows, in the GPU's cache of fused_uvm_caching: FBGEMM's default (1.8.0)
WEIGHTS, STATE, CACHE = "weights", "optimizer state", "cache"
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
Constraints = dict[str, TableConstraint]


class Footprint(NamedTuple):
    """Bytes of a table, or of a part of it: weights, optimizer state, cache."""

    device: int
    host: int
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


def kernel_on(device: str, kernel: str | None) -> str | None:
    """A table's kernel as this device has it; None: the one that keeps all on the device, which on CPU, where
    there is no other memory, UVM kernels are, too.

    Args:
        device: cpu or cuda.
    """
    places = (*UVM_KERNELS, MMAP_KERNEL) if device == "cuda" else (MMAP_KERNEL,)
    return kernel if kernel in places else None


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


def kernels_to_choose(config: RunConfig, device: str, managed: bool) -> list[str]:
    """TorchRec's compute kernels that the planner may choose from on a device, where a table's is not set.

    Args:
        device: cpu or cuda.
        managed: of a table with managed ids, which has no cache: initial values of new ids are written to its
            rows, and a cached row would keep those of the id before.
    """
    if device == "cpu":
        return ["fused"]
    not_offered = {MMAP_KERNEL, CACHING_KERNEL} if managed else {MMAP_KERNEL}
    return [kernel for kernel in config.plan.compute_kernels if kernel not in not_offered]


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


def mmap_folder(config: RunConfig) -> Path:
    """Where this machine has these tables' files, which have no names: plan.mmap_dir, else the run folder.
    Where there is none of that name, the nearest folder above it, which is on the same disk."""
    folder = Path(config.plan.mmap_dir or config.run.dir or tempfile.gettempdir()).absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def free_disk(config: RunConfig) -> int:
    """Bytes that are free there."""
    return shutil.disk_usage(mmap_folder(config)).free


def make_room(config: RunConfig) -> str:
    """What to do about a disk without room for these tables; in a run that has begun, with --resume."""
    do, run = "make room, or set plan.mmap_dir to a folder on another disk", Path(config.run.dir or "")
    begun = config.run.dir and (run / "config.yaml").is_file()
    return f"{do}; then resume the run: raytrec train --resume {in_shell(relative(run))}" if begun else do


def memory_filesystem(folder: Path) -> str | None:
    """The type of the file system that a folder is on, if that keeps its files in memory; Linux only."""
    device = os.stat(folder).st_dev
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    of_device = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:  # ID PARENT MAJOR:MINOR ROOT PLACE OPTIONS … - TYPE SOURCE OPTIONS
        if line.split()[2] == of_device and (kind := line.partition(" - ")[2].split()[0]) in IN_MEMORY:
            return kind
    return None
