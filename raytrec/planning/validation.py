"""Whether the constraints of tables can be met; no torch."""

from __future__ import annotations

from raytrec.common.errors import ConfigError
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.config.tables import EmbeddingOptim
from raytrec.embeddings.constraints import (
    TableConstraint,
    column_parts,
    refused,
    resolve_constraints,
    table_optimizers,
)
from raytrec.embeddings.kernels import CACHING_KERNEL, MMAP_KERNEL, kernels_to_choose
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.embeddings.qcomms import check_qcomms
from raytrec.planning.footprint import GIB, footprints

COLUMN_TYPES = ("column_wise", "table_column_wise", "grid_shard")
DEVICE_NAMES = {"cpu": "CPU", "cuda": "GPUs"}
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


def validate_constraints(
    config: RunConfig,
    schema: Schema,
    device: str,
    *,
    world: int,
    ranks_per_host: int | None = None,
    memory: int | None = None,
    host_share: int | None = None,
) -> dict[str, TableConstraint]:
    """Resolved constraints of tables, validated for this world size.

    Args:
        device: cpu or cuda.
        world: number of ranks.
        ranks_per_host: how many consecutive ranks share a host; None: not known yet.
        memory: bytes for tables on each rank's device; None: not known.
        host_share: bytes of main memory that each rank on a GPU has a share of; None: not known.

    Raises:
        ConfigError: names the table and the reason: a rank that does not exist, a way of sharding that the
            optimizer or the kernel cannot keep exact, a group that no rank can hold; or copies of tables that
            main memory cannot hold.
    """
    constraints, optimizers = resolve_constraints(config, schema), table_optimizers(config, schema)
    if device == "cuda" and {*config.plan.compute_kernels} == {MMAP_KERNEL}:
        raise ConfigError(
            "plan.compute_kernels leaves nothing but fused_mmap, which no GPU has",
            where="plan.compute_kernels",
            expected="fused, fused_uvm or fused_uvm_caching among them",
        )
    check_decay(constraints, optimizers, device)
    check_qcomms(config, schema, constraints, world, ranks_per_host)
    for table, constraint in constraints.items():
        is_managed = bool(schema.tables[table].ids)
        for sharding in constraint.sharding:
            _check_kernel(table, constraint, sharding, optimizers[table].name, device)
        allowed = [constraint.kernel] if constraint.kernel else kernels_to_choose(config, device, is_managed)
        if is_managed and allowed in ([CACHING_KERNEL], []):
            raise refused(
                table,
                f"managed ids with kernel {CACHING_KERNEL}, whose cache would keep rows that change their id",
                "fused, fused_uvm or dense, by compute_kernel or among plan.compute_kernels",
            )
        _check_dtype(table, constraint, optimizers[table].name, device)
        if constraint.ranks:
            _check_ranks(table, schema.tables[table], constraint, world, ranks_per_host)
    if memory is not None:
        _check_memory(config, schema, constraints, device, memory, world, host_share)
    if device == "cuda" and host_share is not None and config.checkpoint.async_save:
        _check_copies(config, schema, constraints, world, host_share)
    return constraints


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


def _check_kernel(
    table: str, constraint: TableConstraint, sharding: str, optimizer: str, device: str
) -> None:
    if sharding in COLUMN_TYPES and optimizer_of(optimizer).by_row():
        raise refused(
            table,
            f"{sharding} with optimizer {optimizer}, whose state is one value a row: column shards would "
            "each keep their own",
            "another optimizer, such as adagrad, or whole tables or rows on a rank",
        )
    if sharding == "data_parallel" and constraint.kernel not in (None, "dense"):
        raise refused(table, f"data_parallel with kernel {constraint.kernel}", "the dense kernel, or none")
    if constraint.kernel == MMAP_KERNEL and device == "cuda":
        raise refused(
            table,
            "kernel fused_mmap on a GPU, which reads no files",
            "fused_uvm or fused_uvm_caching, in host memory; fused_mmap is for workers on CPU",
        )
    if device not in optimizer_of(optimizer).devices and constraint.kernel not in (None, "dense"):
        raise refused(
            table,
            f"kernel {constraint.kernel} with {optimizer} on {DEVICE_NAMES[device]}, where FBGEMM has none",
            "compute_kernel: dense",
        )


def check_decay(
    constraints: dict[str, TableConstraint], optimizers: dict[str, EmbeddingOptim], device: str
) -> None:
    """Refuses weight decay of tables that may be updated in backward.

    It is that of torch.optim, of every row at every step. FBGEMM's fused kernels (1.8.0) know no rows but
    those of the batch: on GPUs row-wise Adagrad and Adam would decay these alone. Those of SGD and Adagrad
    have no decay, and on CPU row-wise Adagrad ignores it in all its modes.

    Args:
        device: cpu or cuda.

    Raises:
        ConfigError: names the first such table.
    """
    for table, constraint in constraints.items():
        name = optimizers[table].name
        fused = [kind for kind in constraint.sharding if not _is_dense(constraint, kind, name, device)]
        if optimizers[table].weight_decay and fused:
            raise ConfigError(
                f"weight_decay of table {table}, which may be {fused[0]} with a fused kernel: it would not "
                "decay rows that a batch does not touch",
                where="optim.embeddings, optim.tables",
                expected="weight_decay 0, or a dense update, which decays every row at every step",
                do=f"set plan.tables.{table}.compute_kernel=dense, or .sharding_type=data_parallel",
            )


def _is_dense(constraint: TableConstraint, sharding: str, optimizer: str, device: str) -> bool:
    """Whether the table has ordinary gradients and a dense update under this way of sharding."""
    fused = device in optimizer_of(optimizer).devices
    return constraint.kernel == "dense" or sharding == "data_parallel" or not fused


def _check_dtype(table: str, constraint: TableConstraint, optimizer: str, device: str) -> None:
    dense = any(_is_dense(constraint, sharding, optimizer, device) for sharding in constraint.sharding)
    if constraint.dtype != "fp32" and dense:
        raise refused(
            table,
            f"dtype {constraint.dtype} with a dense kernel, whose optimizer state would be as coarse",
            "a fused kernel (not data_parallel, and an optimizer that has one on this device), or fp32",
        )


def _check_ranks(table: str, spec: Table, constraint: TableConstraint, world: int, local: int) -> None:
    ranks, sharding = constraint.ranks, constraint.sharding[0]
    outside = [r for r in ranks if r >= world]
    if outside:
        raise refused(
            table, f"on rank {outside[0]}", f"with scaling.num_workers={world}, ranks are 0 to {world - 1}"
        )
    if len(set(ranks)) < len(ranks):
        raise refused(table, f"ranks {list(ranks)}", "name each rank once")
    hosts = [list(range(h, h + local)) for h in range(0, world, local)]
    one_host = any(set(ranks) <= set(host) for host in hosts)
    whole_hosts = all(list(ranks[i : i + local]) in hosts for i in range(0, len(ranks), local))
    possible, expected = {
        "table_wise": (len(ranks) == 1, "one rank"),
        "row_wise": (list(ranks) == list(range(world)), "all ranks, in order (or leave ranks out)"),
        "data_parallel": (list(ranks) == list(range(world)), "all ranks, in order (or leave ranks out)"),
        "column_wise": (True, ""),
        "table_row_wise": (list(ranks) in hosts, f"all ranks of one host, one of {hosts}"),
        "table_column_wise": (one_host, f"ranks of one host, of {hosts}"),
        "grid_shard": (whole_hosts, f"all ranks of one or more hosts, of {hosts}"),
    }[sharding]
    if not possible:
        raise refused(table, f"{sharding} on ranks {list(ranks)}", expected)
    if sharding in COLUMN_TYPES:
        wanted = len(ranks) // local if sharding == "grid_shard" else len(ranks)
        if column_parts(spec.dim, constraint.sharding, ranks, world, local) != wanted:
            raise refused(
                table,
                f"{sharding} in {wanted} parts of {spec.dim} columns",
                "equal widths that are multiples of 4",
            )


def _check_memory(
    config: RunConfig,
    schema: Schema,
    constraints: dict[str, TableConstraint],
    device: str,
    memory: int,
    world: int,
    host_share: int | None,
) -> None:
    """Tables that must share a rank against what a rank has; the planner weighs the rest."""
    held: dict[tuple, list[str]] = {}
    for table, constraint in constraints.items():
        place = ("rank", constraint.ranks[0]) if constraint.ranks and len(constraint.ranks) == 1 else None
        if place is None and constraint.group is not None:
            place = ("group", constraint.group)
        if place:
            held.setdefault(place, []).append(table)
    room = None if host_share is None else host_room(config, schema, constraints, world, host_share)
    for tables in held.values():
        sizes = footprints(config, schema, {table: constraints[table] for table in tables}, device)
        _check_fits({table: size.device for table, size in sizes.items()}, memory, ON_DEVICE)
        if room is not None:
            _check_fits({table: size.host for table, size in sizes.items()}, room, ON_HOST)


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


def _check_fits(sizes: dict[str, int], memory: int, words: tuple[str, str]) -> None:
    if (size := sum(sizes.values())) > memory:
        raise refused(
            ", ".join(table for table, bytes_ in sizes.items() if bytes_),
            f"{size / GIB:.2f} GiB, with optimizer state, {words[0]}",
            f"at most {memory / GIB:.2f} GiB {words[1]}",
        )
