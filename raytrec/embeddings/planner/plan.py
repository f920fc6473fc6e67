"""Which rank holds which part of which table."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption, Storage
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from raytrec.common.errors import ConfigError
from raytrec.compat.torch_ import rank_place
from raytrec.config.features import Features, resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.sections import Sharding
from raytrec.embeddings.codecs import Codecs, make_codecs
from raytrec.embeddings.per_table import has_fused, table_optimizers
from raytrec.embeddings.planner.constraints import BY_ID_TYPES, TableConstraint, column_parts
from raytrec.embeddings.planner.footprint import GIB, ROW_STATE_BYTES, STATE_BYTES, UVM_KERNELS
from raytrec.embeddings.planner.hosts import capacity, settle_hosts
from raytrec.embeddings.planner.search import estimate_once_per_size, narrow, proposers
from raytrec.embeddings.planner.validation import host_room, validate_constraints


class BagSharder(EmbeddingBagCollectionSharder):
    """Offers every way of sharding on every device, and the kernels that train under each.

    TorchRec's own sharder offers no row-wise sharding on CPU, although it runs there, and lets the planner
    choose dense kernels, whose tables the fused optimizers would not train. What a table may have of this is
    said by its ParameterConstraints.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(get_args(Sharding))

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return _kernels(sharding_type)


class IdSharder(EmbeddingCollectionSharder):
    """The same for tables that give the vector of each id, which TorchRec shards in fewer ways."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(BY_ID_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return _kernels(sharding_type)


def _kernels(sharding_type: str) -> list[str]:
    return ["dense"] if sharding_type == "data_parallel" else ["fused", "fused_uvm", "fused_uvm_caching"]


def sharders(fused_params: dict[str, Any] | None = None, codecs: Codecs | None = None) -> list[ModuleSharder]:
    """Of all collections of tables.

    Args:
        fused_params: FBGEMM's settings of kernels that update in backward.
        codecs: of what travels between ranks; default: as it is.
    """
    return [kind(fused_params, codecs) for kind in (BagSharder, IdSharder)]


def sharders_for_planning(config: RunConfig, schema: Schema, world: int) -> list[ModuleSharder]:
    """The same for the planner, which counts what is sent."""
    return sharders(codecs=make_codecs(config, [table.dim for table in schema.tables.values()], world))


def make_plan(
    model: nn.Module,
    sharders: list[ModuleSharder],
    schema: Schema,
    config: RunConfig,
    device: torch.device,
) -> ShardingPlan:
    """Rank 0 plans, every rank receives the plan; a collective.

    Raises:
        ConfigError: a constraint that cannot be kept, tables that do not fit, or no allowed sharding type
            that fits a table.
    """
    world, hosts = dist.get_world_size(), settle_hosts(config.plan, device)
    constraints = validate_constraints(
        config,
        schema,
        device.type,
        world=world,
        ranks_per_host=hosts.ranks_per_host,
        memory=hosts.memory,
        host_share=hosts.host_share,
    )
    room = host_room(config, schema, constraints, world, hosts.host_share)
    topology = Topology(
        world_size=world,
        local_world_size=hosts.ranks_per_host,
        compute_device=device.type,
        **capacity(device.type, hosts.memory, room),
    )
    # From the first rank, on every rank alike: TorchRec's collective_plan would leave the others waiting for
    # a plan that there is not.
    outcome: list = [None]
    if dist.get_rank() == 0:
        outcome[0] = plan_for(topology, constraints, schema, config, model, sharders)
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], ConfigError):
        raise outcome[0]
    return name_devices(outcome[0], hosts.devices)


def name_devices(plan: ShardingPlan, devices: Sequence[str]) -> ShardingPlan:
    """The same plan, in which shards are on the devices that the ranks have.

    The planner (torchrec 1.8.0, planner/utils.py) takes rank % ranks_per_host for the number of a rank's GPU,
    which is another one where hosts hold different numbers of ranks or share their GPUs in another order; and
    shards whose tensors are elsewhere than their plan says are an error.

    Args:
        devices: each rank's, as its own process names it: cpu, or cuda:INDEX.
    """
    for module in plan.plan.values():
        for spec in module.values():
            for shard in spec.sharding_spec.shards if spec.sharding_spec else ():
                rank = shard.placement.rank()
                shard.placement = rank_place(rank, devices[rank])
    return plan


def plan_for(
    topology: Topology,
    constraints: dict[str, TableConstraint],
    schema: Schema,
    config: RunConfig,
    model: nn.Module,
    sharders: list[ModuleSharder],
) -> ShardingPlan | ConfigError:
    """The plan on these devices, or why there is none.

    Args:
        constraints: table → TableConstraint, checked.
    """
    storage = topology.devices[0].storage
    memory = storage.hbm if topology.compute_device == "cuda" else storage.ddr
    narrowed = narrow(constraints, schema, topology.world_size, memory)
    plan = _search(topology, narrowed, schema, config, model, sharders)
    if isinstance(plan, ConfigError) and narrowed != constraints:
        return _search(topology, constraints, schema, config, model, sharders)
    return plan


def _search(
    topology: Topology,
    constraints: dict[str, TableConstraint],
    schema: Schema,
    config: RunConfig,
    model: nn.Module,
    sharders: list[ModuleSharder],
) -> ShardingPlan | ConfigError:
    world, local = topology.world_size, topology.local_world_size
    partitioner, batch = PinnedPartitioner(constraints), -(-config.data.global_batch_size // world)
    lengths = ids_of_features(resolve_features(schema, config.model))
    of_torchrec = {
        table: _constraints(
            pin, schema.tables[table].dim, world, local, topology.compute_device, lengths.get(table)
        )
        for table, pin in constraints.items()
    }
    fused = {
        table: optimizer.name
        for table, optimizer in table_optimizers(config, schema).items()
        if has_fused(optimizer.name, topology.compute_device)
    }
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch,
        enumerator=Enumerator(topology, batch, of_torchrec, fused),
        constraints=of_torchrec,
        partitioner=partitioner,
        proposer=proposers(),
        debug=False,
    )
    try:
        plan = planner.plan(model, sharders)
    except PlannerError as error:
        reason = partitioner.refusal or str(error).splitlines()[0].strip()
        gib = sum(t.rows * t.dim * 4 for t in schema.tables.values()) / GIB
        return ConfigError(
            f"no plan for {len(schema.tables)} tables ({gib:.2f} GiB of weights) on {world} workers: "
            f"{reason}",
            where="plan, scaling.num_workers",
            expected=f"tables that fit under {', '.join(config.plan.sharding_types)} and plan.tables"
            + _room(topology, constraints),
            do="add workers, allow row_wise, or make tables smaller",
        )
    # The planner (torchrec 1.8.0) refuses dense kernels for sharded tables, and UVM kernels on CPU, which run
    # all the same.
    for module in plan.plan.values():
        for table, spec in module.items():
            planned = spec.compute_kernel if table in fused else "dense"
            spec.compute_kernel = constraints[table].kernel or planned
            spec.stochastic_rounding = constraints[table].stochastic_rounding
    return plan


def _room(topology: Topology, constraints: dict[str, TableConstraint]) -> str:
    """What a worker on a GPU has for tables, in words."""
    if topology.compute_device != "cuda":
        return ""
    has = topology.devices[0].storage
    words = f" in {has.hbm / GIB:.1f} GiB on each GPU, less 15 %"
    if any(pin.kernel in UVM_KERNELS for pin in constraints.values()):
        words += f", and {has.ddr / GIB:.1f} GiB of host memory for each (plan.host_memory_gib)"
    return words


def ids_of_features(features: Features) -> dict[str, list[float]]:
    """Table that gives the vector of each id → of each feature that reads it, how many ids of a row the
    planner expects: as many as a sequence may have; of others one, as everywhere."""
    return {
        table: [float(features.sequences.get(name, 1)) for name in names]
        for table, names in features.tables_by_id.items()
    }


def _constraints(
    pin: TableConstraint, dim: int, world: int, local: int, device: str, lengths: list[float] | None = None
) -> ParameterConstraints:
    """TorchRec's, of a table.

    Args:
        lengths: ids of a row, of each feature that reads it; default: TorchRec's.
    """
    known = device == "cuda" and pin.kernel not in (None, "dense")
    return ParameterConstraints(
        sharding_types=list(pin.sharding),
        compute_kernels=[pin.kernel] if known else ["dense", "fused"],
        min_partition=dim // column_parts(dim, pin.sharding, pin.ranks, world, local),
        pooling_factors=lengths or [1.0],
    )


class Enumerator(EmbeddingEnumerator):
    """Counts optimizer state as FBGEMM holds it.

    TorchRec (1.8.0) takes state to be of the weights' dtype, which is half of what it is beside fp16 tables,
    and to be where the weights are, although one value a row is on the GPU even if the weights are not.

    Args:
        fused: table → the optimizer that updates it in backward; of the others TorchRec counts no state.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints],
        fused: Mapping[str, str],
    ):
        super().__init__(topology, batch_size, constraints)
        self._on_gpus, self._fused = topology.compute_device == "cuda", fused

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        estimate_once_per_size(sharding_options, super().populate_estimates)
        for option in sharding_options:
            if option.name in self._fused:
                for shard in option.shards:
                    shard.storage += self._uncounted_state(option, *shard.size)

    def _uncounted_state(self, option: ShardingOption, rows: int, dim: int) -> Storage:
        optimizer = self._fused[option.name]
        per_row = rows * ROW_STATE_BYTES[optimizer]
        per_value = rows * dim * STATE_BYTES[optimizer]
        counted = (per_row + per_value) * option.tensor.element_size() // 4
        if self._on_gpus and option.compute_kernel in UVM_KERNELS:
            return Storage(hbm=per_row, ddr=per_value - counted)
        missing = per_row + per_value - counted
        return Storage(hbm=missing, ddr=0) if self._on_gpus else Storage(hbm=0, ddr=missing)


class PinnedPartitioner(GreedyPerfPartitioner):
    """First tables whose ranks are given and groups that must be together, then the rest as TorchRec does.

    Args:
        constraints: table → TableConstraint.

    Attributes:
        refusal: the last reason why a pin could not be kept; the planner drops it for one of its own.
    """

    def __init__(self, constraints: dict[str, TableConstraint]):
        super().__init__()
        self._settled, self.refusal = constraints, ""

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology, hbm_per_device=None):
        groups: dict[int, list[ShardingOption]] = {}
        pinned, columns, rest = [], [], []
        for option in proposal:
            pin = self._settled[option.name]
            if pin.ranks and pin.sharding[0] not in ("row_wise", "data_parallel"):
                pinned.append((option, pin.ranks))
            elif pin.group is not None:
                groups.setdefault(pin.group, []).append(option)
            elif option.sharding_type in ("column_wise", "table_column_wise"):
                columns.append(option)
            else:
                rest.append(option)
        if len(rest) == len(proposal):
            return super().partition(proposal, storage_constraint, hbm_per_device)
        topology = copy.deepcopy(storage_constraint)
        for option, ranks in pinned:
            self._place(option, ranks, topology)
        for group in sorted(groups.values(), key=_storage, reverse=True):
            self._place_together(group, topology)
        for option in columns:
            self._spread(option, topology)
        super().partition(rest, topology, hbm_per_device)
        return proposal

    def _place(self, option: ShardingOption, ranks: tuple[int, ...], topology: Topology) -> None:
        for shard, rank in zip(option.shards, ranks, strict=True):
            device = topology.devices[rank]
            if not shard.storage.fits_in(device.storage):
                self._refuse(f"table {option.name} does not fit on rank {rank} beside what must be there")
            shard.rank = rank
            device.storage -= shard.storage
            device.perf += shard.perf

    def _spread(self, option: ShardingOption, topology: Topology) -> None:
        """Column shards on different ranks, the least busy first. TorchRec's partitioner may put two on one,
        where dense kernels and their optimizers cannot tell them apart."""
        devices, local = topology.devices, topology.local_world_size
        size = local if option.sharding_type == "table_column_wise" else len(devices)
        hosts = [devices[start : start + size] for start in range(0, len(devices), size)]
        host = min(hosts, key=lambda host: sum(device.perf.total for device in host))
        chosen = sorted(host, key=lambda device: device.perf.total)[: option.num_shards]
        self._place(option, tuple(device.rank for device in chosen), topology)

    def _place_together(self, group: list[ShardingOption], topology: Topology) -> None:
        """On the least busy rank with room for all of them."""
        for device in sorted(topology.devices, key=lambda d: d.perf.total):
            if _storage(group).fits_in(device.storage):
                for option in group:
                    self._place(option, (device.rank,), topology)
                return
        self._refuse(f"no rank has room for {', '.join(option.name for option in group)} together")

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        raise PlannerError(error_type=PlannerErrorType.PARTITION, message=reason)


def _storage(group: list[ShardingOption]):
    first, *others = (option.total_storage for option in group)
    for other in others:
        first = first + other
    return first


def describe(plan: ShardingPlan) -> list[dict]:
    """One entry for each table: {table, sharding_type, compute_kernel, ranks}."""
    return [
        {
            "table": table,
            "sharding_type": spec.sharding_type,
            "compute_kernel": spec.compute_kernel,
            "ranks": spec.ranks,
        }
        for module in plan.plan.values()
        for table, spec in sorted(module.items())
    ]
