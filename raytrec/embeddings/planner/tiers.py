"""Which tables are in files because memory does not hold all of them. No torch here.

On GPUs, TorchRec's planner weighs host memory against the GPU's. Of files on CPU it knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import bytes_text
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.per_table import has_fused, table_optimizers
from raytrec.embeddings.planner.constraints import TableConstraint
from raytrec.embeddings.planner.disk import make_room, memory_filesystem, mmap_folder
from raytrec.embeddings.planner.footprint import MMAP_KERNEL
from raytrec.embeddings.planner.validation import footprints

Constraints = dict[str, TableConstraint]


def kernels_to_choose(config: RunConfig, device: str) -> list[str]:
    """TorchRec's compute kernels that the planner may choose from on a device, where a table's is not set.

    Args:
        device: cpu or cuda.
    """
    if device == "cpu":
        return ["fused"]
    return [kernel for kernel in config.plan.compute_kernels if kernel != MMAP_KERNEL]


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
        expected="a folder on a disk with room for them, and for checkpoints beside them if those go there",
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
        for table, pin in constraints.items()
        if pin.kernel is None
        and set(pin.sharding) - {"data_parallel"}
        and has_fused(optimizers[table].name, "cpu")
    ]
    return sorted(tables, key=lambda table: (features[table] / schema.tables[table].rows, table))


def _in_file(pin: TableConstraint) -> TableConstraint:
    kinds = tuple(kind for kind in pin.sharding if kind != "data_parallel")
    return replace(pin, kernel=MMAP_KERNEL, sharding=kinds)
