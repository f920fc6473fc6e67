"""Whether the constraints of tables can be met, and with what memory.

No torch here: the driver asks before any worker starts.
"""

from __future__ import annotations

from raytrec.common.errors import ConfigError
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.config.sections import EmbeddingOptim
from raytrec.embeddings.per_table import has_fused, table_optimizers
from raytrec.embeddings.planner.constraints import (
    TableConstraint,
    column_parts,
    refused,
    resolve_constraints,
)
from raytrec.embeddings.planner.footprint import GIB, MMAP_KERNEL, Footprint, footprint, kernel_on
from raytrec.embeddings.planner.qcomms import check_qcomms

COLUMN_TYPES = ("column_wise", "table_column_wise", "grid_shard")
HOST_RESERVE = 0.15  # of host memory beside GPUs, for processes; TorchRec keeps as much of a GPU
ON_DEVICE = "on one rank", "(plan.memory_gib, or what the device has)"
ON_HOST = (
    "of host memory on one rank",
    "(plan.host_memory_gib, or a rank's share of its host beside what checkpoints are copied to)",
)


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
    """The pins, once it is certain that a plan can keep to them.

    Args:
        device: cpu or cuda.
        world: number of ranks.
        ranks_per_host: how many consecutive ranks share a host; None: not known yet.
        memory: bytes for tables on each rank's device; None: not known.
        host_share: bytes of main memory that each rank on a GPU has a share of; None: not known.

    Raises:
        ConfigError: names the table and the reason: a rank that does not exist, a way of sharding that the
            optimizer or the kernel cannot keep exact, a group that no rank can hold.
    """
    if ranks_per_host and world % ranks_per_host:
        raise ConfigError(
            f"{world} workers do not divide into hosts of {ranks_per_host}",
            where="plan.ranks_per_host, scaling.num_workers",
            expected="workers = hosts × ranks_per_host",
        )
    constraints, optimizers = resolve_constraints(config, schema), table_optimizers(config, schema)
    if device == "cuda" and {*config.plan.compute_kernels} == {MMAP_KERNEL}:
        raise ConfigError(
            "plan.compute_kernels leaves nothing but fused_mmap, which no GPU has",
            where="plan.compute_kernels",
            expected="fused, fused_uvm or fused_uvm_caching among them",
        )
    check_decay(constraints, optimizers, device)
    check_qcomms(config, schema, constraints, world, ranks_per_host)
    for table, pin in constraints.items():
        for sharding in pin.sharding:
            _check_kernel(table, pin, sharding, optimizers[table].name, device)
        if schema.tables[table].ids and pin.kernel == "fused_uvm_caching":
            raise refused(
                table,
                "managed ids with kernel fused_uvm_caching, in whose cache rows that begin anew would stay",
                "fused, fused_uvm or dense",
            )
        _check_dtype(table, pin, optimizers[table].name, device)
        if pin.ranks:
            _check_ranks(table, schema.tables[table], pin, world, ranks_per_host)
    if memory is not None:
        _check_memory(config, schema, constraints, device, memory, world, host_share)
    return constraints


def host_room(
    config: RunConfig, schema: Schema, constraints: dict[str, TableConstraint], world: int, host_share: int
) -> int:
    """Bytes of host memory that each rank on a GPU may fill with tables (fused_uvm, fused_uvm_caching).

    Unless plan.host_memory_gib says it: what is left of its share beside a reserve, rows read ahead and, with
    checkpoint.async_save, the copies from which checkpoints are written: of these tables, and of its part
    of those on GPUs.

    Args:
        host_share: bytes of main memory that each rank has a share of.
    """
    if config.plan.host_memory_gib:
        return int(config.plan.host_memory_gib * GIB)
    room = (1 - HOST_RESERVE) * host_share - config.data.buffer_gib * GIB
    if config.checkpoint.async_save:
        sizes = footprints(config, schema, constraints, "cuda")
        room = (room - sum(size.device for size in sizes.values() if not size.host) / world) / 2
    return max(0, int(room))


def footprints(
    config: RunConfig, schema: Schema, constraints: dict[str, TableConstraint], device: str
) -> dict[str, Footprint]:
    """Table → the bytes that it takes with its optimizer state, of each table with a constraint.

    Args:
        device: that ranks train on, cpu or cuda.
    """
    optimizers = table_optimizers(config, schema)
    return {
        table: footprint(
            schema.tables[table],
            pin.dtype,
            optimizers[table].name,
            kernel_on(device, pin.kernel),
            pin.load_factor,
        )
        for table, pin in constraints.items()
    }


def _check_kernel(table: str, pin: TableConstraint, sharding: str, optimizer: str, device: str) -> None:
    if sharding in COLUMN_TYPES and optimizer == "rowwise_adagrad":
        raise refused(
            table,
            f"{sharding} with optimizer rowwise_adagrad, whose state is one value a row: column shards would "
            "each keep their own",
            "another optimizer, such as adagrad, or whole tables or rows on a rank",
        )
    if sharding == "data_parallel" and pin.kernel not in (None, "dense"):
        raise refused(table, f"data_parallel with kernel {pin.kernel}", "the dense kernel, or none said")
    if (pin.load_factor or pin.algorithm) and pin.kernel != "fused_uvm_caching":
        raise refused(
            table,
            f"cache_load_factor or cache_algorithm with kernel {pin.kernel or 'fused'}, which has no cache",
            "compute_kernel: fused_uvm_caching",
        )
    if pin.kernel == MMAP_KERNEL and device == "cuda":
        raise refused(
            table,
            "kernel fused_mmap on a GPU, which reads no files",
            "fused_uvm or fused_uvm_caching, in host memory; fused_mmap is for workers on CPU",
        )
    if not has_fused(optimizer, device) and pin.kernel not in (None, "dense"):
        raise refused(
            table, f"kernel {pin.kernel} with adam on CPU, where FBGEMM has none", "compute_kernel: dense"
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
    for table, pin in constraints.items():
        fused = [s for s in pin.sharding if not _is_dense(pin, s, optimizers[table].name, device)]
        if optimizers[table].weight_decay and fused:
            raise ConfigError(
                f"weight_decay of table {table}, which may be {fused[0]} with a fused kernel: it would not "
                "decay rows that a batch does not touch",
                where="optim.embeddings, optim.tables",
                expected="weight_decay 0, or a dense update, which decays every row at every step",
                do=f"set plan.tables.{table}.compute_kernel=dense, or .sharding_type=data_parallel",
            )


def _is_dense(pin: TableConstraint, sharding: str, optimizer: str, device: str) -> bool:
    """Whether the table has ordinary gradients and a dense update under this way of sharding."""
    return pin.kernel == "dense" or sharding == "data_parallel" or not has_fused(optimizer, device)


def _check_dtype(table: str, pin: TableConstraint, optimizer: str, device: str) -> None:
    if pin.stochastic_rounding and device == "cpu":
        raise refused(
            table,
            "stochastic_rounding on CPU, where FBGEMM's kernels round to the nearest",
            "stochastic_rounding: false, or none said; GPUs",
        )
    if pin.dtype == "fp32":
        if pin.stochastic_rounding:
            raise refused(table, "stochastic_rounding of fp32 weights, which are not rounded", "dtype: fp16")
        return
    if any(_is_dense(pin, sharding, optimizer, device) for sharding in pin.sharding):
        raise refused(
            table,
            f"dtype {pin.dtype} with a dense kernel, whose optimizer state would be as coarse",
            "a fused kernel (not data_parallel, not adam on CPU), or fp32",
        )


def _check_ranks(table: str, spec: Table, pin: TableConstraint, world: int, local: int) -> None:
    ranks, sharding = pin.ranks, pin.sharding[0]
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
        if column_parts(spec.dim, pin.sharding, ranks, world, local) != wanted:
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
    for table, pin in constraints.items():
        place = ("rank", pin.ranks[0]) if pin.ranks and len(pin.ranks) == 1 else None
        if place is None and pin.group is not None:
            place = ("group", pin.group)
        if place:
            held.setdefault(place, []).append(table)
    room = None if host_share is None else host_room(config, schema, constraints, world, host_share)
    for tables in held.values():
        sizes = footprints(config, schema, {table: constraints[table] for table in tables}, device)
        _check_fits({table: size.device for table, size in sizes.items()}, memory, ON_DEVICE)
        if room is not None:
            _check_fits({table: size.host for table, size in sizes.items()}, room, ON_HOST)


def _check_fits(sizes: dict[str, int], memory: int, words: tuple[str, str]) -> None:
    if (size := sum(sizes.values())) > memory:
        raise refused(
            ", ".join(table for table, bytes_ in sizes.items() if bytes_),
            f"{size / GIB:.2f} GiB, with optimizer state, {words[0]}",
            f"at most {memory / GIB:.2f} GiB {words[1]}",
        )
