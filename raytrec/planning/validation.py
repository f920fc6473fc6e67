"""Checks that constraints can be met and that pinned tables and checkpoint copies fit. Does not import torch."""

from __future__ import annotations

from math import gcd

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import format_count
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table
from raytrec.config.tables import EmbeddingOptim
from raytrec.embeddings.constraints import (
    CACHING_KERNEL,
    COLUMN_SHARDED_TYPES,
    HOST_SHARDING_TYPES,
    MMAP_KERNEL,
    TableConstraint,
    count_column_shards,
    list_kernel_choices,
    make_plan_error,
    resolve_constraints,
    resolve_optimizers,
)
from raytrec.embeddings.optimizers import find_optimizer
from raytrec.planning.memory import (
    GIB,
    Constraints,
    estimate_copy_bytes,
    estimate_footprints,
    estimate_host_table_bytes,
)

HOST_MEMORY_WORDING = "of host memory on one rank", "(the rank's share, less room for processes and checkpoint copies)"
DEVICE_NAMES = {"cpu": "CPU", "cuda": "GPUs"}


def validate_constraints(
    config: RunConfig,
    schema: Schema,
    device: str,
    *,
    world: int,
    ranks_per_host: int | None = None,
    memory: int | None = None,
    host_share: int | None = None,
) -> Constraints:
    """Resolve the constraints of all tables, validate them for this world size, and return them.

    Args:
        config: Configuration of the run.
        schema: Schema of the data.
        device: Device type, cpu or cuda.
        world: Number of ranks.
        ranks_per_host: Number of consecutive ranks that share a host; None if not yet known.
        memory: Bytes available to tables on the device of each rank; None if unknown.
        host_share: Bytes of main memory for each rank with a GPU; None if unknown.

    Raises:
        ConfigError: A constraint of a table cannot be met, for example because a rank does not exist, a
            sharding type does not support the optimizer or kernel, or no rank can hold a plan.colocate group; the
            error names the table. Also raised as by `check_decay` and `check_qcomms`, if a key of plan.tables,
            plan.colocate or optim.tables matches no table, if GPUs would have only fused_mmap in plan.compute_kernels,
            or if main memory cannot hold the checkpoint copies.
    """
    constraints, optimizers = resolve_constraints(config, schema), resolve_optimizers(config, schema)
    if device == "cuda" and {*config.plan.compute_kernels} == {MMAP_KERNEL}:
        raise ConfigError(
            "plan.compute_kernels contains only fused_mmap, which GPUs do not support",
            where="plan.compute_kernels",
            expected="at least one of fused, fused_uvm and fused_uvm_caching",
        )
    check_decay(constraints, optimizers, device)
    check_qcomms(config, schema, constraints, world, ranks_per_host)
    for table, constraint in constraints.items():
        is_managed = bool(schema.tables[table].ids)
        for sharding in constraint.sharding:
            _check_kernel(table, constraint, sharding, optimizers[table].name, device)
        allowed = [constraint.kernel] if constraint.kernel else list_kernel_choices(config, device, is_managed)
        if is_managed and allowed in ([CACHING_KERNEL], []):
            what = f"managed ids do not support kernel {CACHING_KERNEL}, whose cache keeps rows of replaced ids"
            place = "plan.compute_kernels" if constraint.kernel is None else "compute_kernel"
            expected = f"fused or fused_uvm in {place}"
            raise make_plan_error(table, what, expected)
        if constraint.ranks:
            _check_ranks(table, schema.tables[table], constraint, world, ranks_per_host)
    room = None if host_share is None else estimate_host_table_bytes(config, schema, constraints, world, host_share)
    _check_shared_ranks(config, schema, constraints, device, memory, room)
    if device == "cuda" and host_share is not None and config.checkpoint.async_save:
        _check_copies(config, schema, constraints, world, host_share)
    return constraints


def _check_kernel(table: str, constraint: TableConstraint, sharding: str, optimizer: str, device: str) -> None:
    kernel, what, expected = constraint.kernel, "", ""
    is_fused = kernel not in (None, "dense")
    if sharding in COLUMN_SHARDED_TYPES and find_optimizer(optimizer).has_row_state():
        what = f"{sharding} does not support optimizer {optimizer}, whose state is one value per row: each "
        what += "column shard would keep a separate value"
        expected = "another optimizer, such as adagrad, or a sharding type that keeps rows whole"
    elif sharding == "data_parallel" and is_fused:
        what, expected = f"data_parallel does not support kernel {kernel}", "kernel dense or null, or no data_parallel"
    elif kernel == MMAP_KERNEL and device == "cuda":
        what = "GPUs do not support kernel fused_mmap, which reads tables from files"
        expected = "fused_uvm or fused_uvm_caching for tables in host memory (fused_mmap is for workers on CPU)"
    elif is_fused and device not in find_optimizer(optimizer).devices:
        what = f"kernel {kernel} does not support optimizer {optimizer} on {DEVICE_NAMES[device]}"
        expected = "compute_kernel dense or null, or another optimizer"
    elif constraint.dtype != "fp32" and _has_dense_update(constraint, sharding, optimizer, device):
        what = f"dense kernels do not support dtype {constraint.dtype}, which the optimizer state would share"
        cause = sharding if sharding == "data_parallel" else f"optimizer {optimizer} on {DEVICE_NAMES[device]}"
        what += "" if kernel == "dense" else f"; {cause} requires a dense kernel"
        expected = "dtype fp32, or a fused kernel with a sharding type and optimizer that support it"
    if what:
        raise make_plan_error(table, what, expected)


def check_decay(constraints: Constraints, optimizers: dict[str, EmbeddingOptim], device: str) -> None:
    """Check that no table with weight decay can be placed on a fused kernel on `device` (cpu or cuda).

    Weight decay has the semantics of torch.optim: every row decays at every step. FBGEMM's fused kernels
    (1.8.0) only touch rows of the batch. On GPUs, row-wise Adagrad and Adam would decay only these rows. The
    kernels of SGD and Adagrad have no decay, and on CPU, row-wise Adagrad ignores decay in all modes.

    Raises:
        ConfigError: A table has weight decay and can use a fused kernel. The error names the first such table.
    """
    for table, constraint in constraints.items():
        name = optimizers[table].name
        fused = [kind for kind in constraint.sharding if not _has_dense_update(constraint, kind, name, device)]
        if optimizers[table].weight_decay and fused:
            raise ConfigError(
                f"table {table} has weight_decay and may be {fused[0]} with a fused kernel, which does not "
                "decay rows outside the batch",
                where="weight_decay in optim.embeddings or optim.tables",
                expected="weight_decay 0, or a dense update, which decays every row at every step",
                do=f"set plan.tables.{table}.compute_kernel=dense (with dtype fp32), or remove weight_decay",
            )


def _has_dense_update(constraint: TableConstraint, sharding: str, optimizer: str, device: str) -> bool:
    """Return True if the table has ordinary gradients and a dense update under this sharding type."""
    fused = device in find_optimizer(optimizer).devices
    return constraint.kernel == "dense" or sharding == "data_parallel" or not fused


def _check_ranks(table: str, spec: Table, constraint: TableConstraint, world: int, per_host: int | None) -> None:
    """Check the ranks of one table (plan.tables.*.ranks), except for HOST_SHARDING_TYPES if `per_host` is None."""
    ranks, sharding = constraint.ranks, constraint.sharding[0]
    if outside := [rank for rank in ranks if rank >= world]:
        expected = f"{f'ranks 0 to {world - 1}' if world > 1 else 'rank 0'} of {format_count(world, 'worker')}"
        raise make_plan_error(table, f"there is no rank {outside[0]}", expected)
    if len(set(ranks)) < len(ranks):
        raise make_plan_error(table, f"ranks {list(ranks)} contain duplicates", "each rank once")
    if per_host is None:
        if sharding in HOST_SHARDING_TYPES:
            return
        per_host = world
    hosts = [list(range(h, h + per_host)) for h in range(0, world, per_host)]
    one_host = any(set(ranks) <= set(host) for host in hosts)
    whole_hosts = all(list(ranks[i : i + per_host]) in hosts for i in range(0, len(ranks), per_host))
    possible, expected = {
        "table_wise": (len(ranks) == 1, "one rank"),
        "row_wise": (list(ranks) == list(range(world)), "all ranks in order, or no ranks setting"),
        "data_parallel": (list(ranks) == list(range(world)), "all ranks in order, or no ranks setting"),
        "column_wise": (True, ""),
        "table_row_wise": (list(ranks) in hosts, f"all ranks of one host, i.e. one of {hosts}"),
        "table_column_wise": (one_host, f"ranks of one host out of {hosts}"),
        "grid_shard": (whole_hosts, f"all ranks of one or more hosts out of {hosts}"),
    }[sharding]
    if not possible:
        raise make_plan_error(table, f"{sharding} cannot use ranks {list(ranks)}", expected)
    if sharding in COLUMN_SHARDED_TYPES:
        num_parts = len(ranks) // per_host if sharding == "grid_shard" else len(ranks)
        if count_column_shards(spec.dim, constraint.sharding, ranks, world, per_host) != num_parts:
            what = f"{sharding} cannot split {spec.dim} columns into {num_parts} parts"
            raise make_plan_error(table, what, "parts of equal width, which is a multiple of 4")


INT8_SCALE_BYTES = 8  # bytes per group of int8 values for its minimum and step size


def check_qcomms(config: RunConfig, schema: Schema, constraints: Constraints, world: int, local: int | None) -> None:
    """Check that int8 in plan.qcomms makes exchanges smaller.

    Sharding types that do not support int8 are excluded in constraints.py. `local` is the number of ranks per
    host, or None if unknown.

    Raises:
        ConfigError: The greatest common divisor of the shard widths, except of tables that are always data_parallel, is
            at most INT8_SCALE_BYTES.
    """
    if not config.plan.qcomms.has_int8:
        return
    widths = {
        table: schema.tables[table].dim
        // count_column_shards(schema.tables[table].dim, each.sharding, each.ranks, world, local or world)
        for table, each in constraints.items()
        if each.sharding != ("data_parallel",)
    }
    if widths and (group := gcd(*widths.values())) <= INT8_SCALE_BYTES:
        table = min((table for table, width in widths.items() if width % 16), key=widths.__getitem__)
        raise ConfigError(
            f"int8 would not make exchanges smaller than fp16: each group of {group} values (the greatest common "
            f"divisor of all shard widths) needs {INT8_SCALE_BYTES} more bytes for its minimum and step size; a shard "
            f"of table {table} has {widths[table]} columns",
            where="plan.qcomms",
            expected=f"shards whose widths have a common divisor above {INT8_SCALE_BYTES}, such as 16",
            do="replace int8 in plan.qcomms by fp16 or bf16, or choose dims whose shard widths are multiples of 16",
        )


def _check_shared_ranks(
    config: RunConfig, schema: Schema, constraints: Constraints, device: str, memory: int | None, room: int | None
) -> None:
    """Check that tables that must share a rank fit into its device (`memory`) and host memory (`room`), in bytes.

    The search checks the other tables.

    Raises:
        ConfigError: Tables that must share a rank do not fit.
    """
    groups: dict[tuple, list[str]] = {}
    for table, constraint in constraints.items():
        if constraint.ranks and len(constraint.ranks) == 1:
            groups.setdefault(("rank", constraint.ranks[0]), []).append(table)
        elif constraint.group is not None:
            groups.setdefault(("group", constraint.group), []).append(table)
    limit = "plan.memory_gib" if config.plan.memory_gib else "GPU memory" if device == "cuda" else "a worker's memory"
    device_wording = "on one rank", f"({limit}, less the maps of managed ids)"
    for tables in groups.values():
        sizes = estimate_footprints(config, schema, {table: constraints[table] for table in tables}, device)
        _check_fits({table: size.device for table, size in sizes.items()}, memory, device_wording)
        _check_fits({table: size.host for table, size in sizes.items()}, room, HOST_MEMORY_WORDING)


def _check_copies(config: RunConfig, schema: Schema, constraints: Constraints, world: int, host_share: int) -> None:
    copies, ahead = estimate_copy_bytes(config, schema, constraints, world)
    if copies + ahead > host_share:  # the first save would exhaust the host's memory
        raise ConfigError(
            f"checkpoints copy {copies / GIB:.1f} GiB from each GPU to main memory, in addition to "
            f"{ahead / GIB:.1f} GiB of rows read ahead by each worker",
            where="checkpoint.async_save",
            expected=f"at most {host_share / GIB:.1f} GiB, a worker's share of its host (or container)",
            do="set checkpoint.async_save=false (no copies, but training waits for each save), or use "
            "more hosts, or hosts with more memory",
        )


def _check_fits(sizes: dict[str, int], memory: int | None, wording: tuple[str, str]) -> None:
    if memory is not None and (size := sum(sizes.values())) > memory:
        tables = ", ".join(table for table, bytes_ in sizes.items() if bytes_)
        what = f"{size / GIB:.2f} GiB {wording[0]} are required, including optimizer state"
        raise make_plan_error(tables, what, f"at most {memory / GIB:.2f} GiB {wording[1]}")
