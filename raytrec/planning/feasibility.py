"""Which tables fit: into ranks that must hold them, into host memory, and on disks. No torch here.

On CPU tables are in files because memory does not hold all of them: TorchRec, which weighs a GPU's memory
against its host's, has no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import bytes_text
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import EmbeddingOptim
from raytrec.embeddings.constraints import (
    MMAP_KERNEL,
    TableConstraint,
    make_room,
    memory_filesystem,
    mmap_folder,
    refused,
    table_optimizers,
)
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.planning.memory import GIB, Constraints, footprints

HOST_RESERVE = 0.15  # of the host memory of GPUs, for processes; TorchRec keeps as much of a GPU
ON_DEVICE = "on one rank", "(plan.memory_gib, or what the device has)"
ON_HOST = ("of host memory on one rank", "(its share of its host, less what checkpoints are copied to)")


def without_saves(config: RunConfig) -> RunConfig:
    """Without room for copies from which checkpoints are written."""
    return config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"async_save": False})}
    )


def without_training(config: RunConfig) -> RunConfig:
    """The same, with tables' optimizers that have no state: Adagrad's takes as much memory as the weights."""
    optim = config.optim.model_copy(update={"embeddings": EmbeddingOptim(name="sgd"), "tables": {}})
    return without_saves(config).model_copy(update={"optim": optim})


def host_room(
    config: RunConfig, schema: Schema, constraints: dict[str, TableConstraint], world: int, host_share: int
) -> int:
    """Bytes of host memory that each rank on a GPU may fill with tables (fused_uvm, fused_uvm_caching).

    Its share less a reserve, rows read ahead and, with checkpoint.async_save, the copies
    from which checkpoints are written: of these tables, and of its part of those on GPUs.

    Args:
        host_share: bytes of main memory that each rank has a share of.
    """
    room = (1 - HOST_RESERVE) * host_share - config.data.buffer_gib * GIB
    if config.checkpoint.async_save:
        sizes = footprints(config, schema, constraints, "cuda")
        room = (room - sum(size.device for size in sizes.values() if not size.host) / world) / 2
    return max(0, int(room))


def check_room(
    config: RunConfig,
    schema: Schema,
    constraints: Constraints,
    device: str,
    world: int,
    memory: int | None,
    host_share: int | None,
) -> None:
    """Check tables that must share a rank, and copies for checkpoints; the search weighs the rest.

    Args:
        memory, host_share: As in validate_constraints.

    Raises:
        ConfigError: They do not fit.
    """
    together: dict[tuple, list[str]] = {}
    for table, constraint in constraints.items():
        if constraint.ranks and len(constraint.ranks) == 1:
            together.setdefault(("rank", constraint.ranks[0]), []).append(table)
        elif constraint.group is not None:
            together.setdefault(("group", constraint.group), []).append(table)
    room = None if host_share is None else host_room(config, schema, constraints, world, host_share)
    for tables in together.values():
        sizes = footprints(config, schema, {table: constraints[table] for table in tables}, device)
        _check_fits({table: size.device for table, size in sizes.items()}, memory, ON_DEVICE)
        _check_fits({table: size.host for table, size in sizes.items()}, room, ON_HOST)
    if device == "cuda" and host_share is not None and config.checkpoint.async_save:
        _check_copies(config, schema, constraints, world, host_share)


def memory_for_copies(
    config: RunConfig, schema: Schema, constraints: dict[str, TableConstraint], world: int
) -> tuple[float, float]:
    """Bytes of main memory that each rank on a GPU takes for page-locked copies of its tables, from which
    checkpoints are written, and for rows read ahead."""
    sizes = footprints(config, schema, constraints, "cuda").values()
    return sum(size.device for size in sizes) / world, config.data.buffer_gib * GIB


def _check_copies(
    config: RunConfig, schema: Schema, constraints: dict[str, TableConstraint], world: int, host_share: int
) -> None:
    """The first save would end the processes of the host."""
    copies, ahead = memory_for_copies(config, schema, constraints, world)
    if copies + ahead > host_share:
        raise ConfigError(
            f"checkpoints copy {copies / GIB:.1f} GiB of each GPU to main memory, where each worker also has "
            f"{ahead / GIB:.1f} GiB of rows read ahead",
            where="checkpoint.async_save",
            expected=f"at most {host_share / GIB:.1f} GiB, a worker's share of its host (or container)",
            do="set checkpoint.async_save=false, which copies nothing while training waits; or take hosts "
            "with more memory, or more workers",
        )


def _check_fits(sizes: dict[str, int], memory: int | None, words: tuple[str, str]) -> None:
    if memory is not None and (size := sum(sizes.values())) > memory:
        raise refused(
            ", ".join(table for table, bytes_ in sizes.items() if bytes_),
            f"{size / GIB:.2f} GiB, with optimizer state, {words[0]}",
            f"at most {memory / GIB:.2f} GiB {words[1]}",
        )


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
