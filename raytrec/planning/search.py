"""Search for a plan among the options that TorchRec enumerates.

The number of options grows neither with tables × tables nor with tables × ranks. Storage is estimated once
per shard size. With many tables and ranks, only the tables with the most bytes or lookups may be split across all
ranks (docs/scaling.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from warnings import catch_warnings, simplefilter

import numpy as np
from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Storage
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import format_count
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import (
    COLUMN_SHARDED_TYPES,
    MMAP_KERNEL,
    UVM_KERNELS,
    count_column_shards,
    list_kernel_choices,
    resolve_optimizers,
)
from raytrec.embeddings.optimizers import find_optimizer
from raytrec.planning.balance import DoesNotFitError, PlanBalancer
from raytrec.planning.dense_work import DenseWork
from raytrec.planning.loads import group_lengths_by_table
from raytrec.planning.memory import DTYPE_BYTES, GIB, Constraints, move_to_files
from raytrec.planning.placement import PlacementSpace
from raytrec.planning.rates import Rates

RESERVED_SHARE = 0.15  # share of GPU memory reserved for dense layers, activations and other uses
MAX_ADDED_SHARDS = 32_768  # maximum number of shards that sharding types over all ranks add to the search
ALWAYS_SPLIT_SHARE = 0.25  # share of a rank's memory above which a table may always be split
MANY_RANK_SHARDING_TYPES = ("row_wise", "grid_shard")  # sharding types with shards on every rank, or on many

Upstream = dict[str, ParameterConstraints]  # table → constraint in TorchRec's form


@dataclass(frozen=True)
class Search:
    """Search for the plan of a model's tables on identical ranks.

    Attributes:
        topology: Ranks, with the memory of each rank that is available to tables.
        schema: Schema of the data.
        config: Configuration of the run.
        model: Model whose tables are planned.
        sharders: TorchRec sharders of the model's modules.
        dense: Estimated work of the dense layers of one rank.
        rates: Rates used to compare plans.
        linked: (groups, ranks per group) connected by fast links; a group can span several hosts.
    """

    topology: Topology
    schema: Schema
    config: RunConfig
    model: nn.Module
    sharders: list[ModuleSharder]
    dense: DenseWork
    rates: Rates
    linked: tuple[int, int]

    def find(self, constraints: Constraints) -> ShardingPlan:
        """Return the best plan found under these constraints.

        On CPU, tables that may be in files are moved there step by step (memory.move_to_files) until a plan fits.

        Args:
            constraints: Validated constraint of each table.

        Raises:
            ConfigError: No plan that fits into memory and on disk was found.
        """
        device, world = self.topology.compute_device, self.topology.world_size
        storage, choices = self.topology.devices[0].storage, iter([constraints])
        memory = storage.hbm if device == "cuda" else storage.ddr
        if device == "cpu":
            choices = move_to_files(constraints, self.schema, self.config, world * memory)
        for chosen in choices:
            try:
                return self._plan(narrow_sharding_types(chosen, self.schema, world, memory))
            except (DoesNotFitError, PlannerError) as error:
                refusal = self._make_refusal(chosen, str(error).splitlines()[0].strip())
        raise refusal

    def _plan(self, constraints: Constraints) -> ShardingPlan:
        optimizers = {table: each.name for table, each in resolve_optimizers(self.config, self.schema).items()}
        device = self.topology.compute_device
        fused = {table: name for table, name in optimizers.items() if device in find_optimizer(name).devices}
        kernels = {table: "dense" for table in constraints if table not in fused}
        kernels |= {table: each.kernel for table, each in constraints.items() if each.kernel}
        upstream = self._make_torchrec_constraints(constraints)
        on_disk = {table for table, kernel in kernels.items() if kernel == MMAP_KERNEL}
        options = list(self._iterate_options(upstream, fused, on_disk))
        space = PlacementSpace(self, constraints, options, self._get_room(upstream), kernels)
        chosen = PlanBalancer(space).choose()
        plan = to_sharding_plan(chosen, self.topology)
        # TorchRec's options (1.8.0) lack dense kernels for sharded tables, and the kernels of tables in files
        # and of UVM tables on CPU. These kernels work nevertheless, so their names are set here.
        for module in plan.plan.values():
            for table, spec in module.items():
                spec.compute_kernel = kernels.get(table, spec.compute_kernel)
        return plan

    def _iterate_options(
        self, upstream: Upstream, fused: Mapping[str, str], on_disk: Set[str]
    ) -> Iterator[ShardingOption]:
        """Yield every sharding option of each table, with the storage of its shards; see CorrectedEnumerator."""
        dims = {name: table.dim for name, table in self.schema.tables.items()}

        def enumerate_options(constraints: Upstream) -> list[ShardingOption]:
            enumerator = CorrectedEnumerator(self.topology, self._batch, constraints, fused, on_disk)
            return enumerator.enumerate(self.model, self.sharders)

        yield from enumerate_options(upstream)
        for split in split_columns(upstream, dims):
            for option in enumerate_options(upstream | split):
                if option.name in split and option.sharding_type in COLUMN_SHARDED_TYPES:
                    yield option

    @property
    def _batch(self) -> int:
        """Return the number of rows in the batch of one rank."""
        return -(-self.config.data.global_batch_size // self.topology.world_size)

    def _get_room(self, upstream: Upstream) -> np.ndarray:
        """Return the bytes available to tables on each rank in (GPU, host, disk), float64 [ranks, 3]."""
        with catch_warnings():  # TorchRec warns that the heuristic may reserve too much
            simplefilter("ignore", FutureWarning)
            reservation = HeuristicalStorageReservation(RESERVED_SHARE)
        remaining = reservation.reserve(self.topology, self._batch, self.model, self.sharders, upstream)
        return np.array([[d.storage.hbm, d.storage.ddr, d.storage.ssd] for d in remaining.devices], float)

    def _make_torchrec_constraints(self, constraints: Constraints) -> Upstream:
        world, local = self.topology.world_size, self.topology.local_world_size
        device, out = self.topology.compute_device, {}
        lengths = group_lengths_by_table(self.schema, resolve_features(self.schema, self.config.model))
        for table, constraint in constraints.items():
            dim, kernel = self.schema.tables[table].dim, constraint.kernel
            kernels = list_kernel_choices(self.config, device, bool(self.schema.tables[table].ids))
            parts = count_column_shards(dim, constraint.sharding, constraint.ranks, world, local)
            free = kernel in (None, "dense") or device == "cpu"
            out[table] = ParameterConstraints(
                sharding_types=list(constraint.sharding),
                compute_kernels=["dense", *kernels] if free else [kernel],  # data_parallel is always dense
                min_partition=dim // parts,
                pooling_factors=lengths[table],
            )
        return out

    def _make_refusal(self, constraints: Constraints, reason: str) -> ConfigError:
        tables, world = self.schema.tables, self.topology.world_size
        gib = sum(tables[n].rows * tables[n].dim * DTYPE_BYTES[c.dtype] for n, c in constraints.items()) / GIB
        sizes, allowed = self.topology.devices[0].storage, self.config.plan.sharding_types
        row_wise = "" if "row_wise" in allowed else "add row_wise to plan.sharding_types, "
        pins = "relax plan.tables and plan.colocate, " if self.config.plan.tables or self.config.plan.colocate else ""
        kernels = {constraint.kernel for constraint in constraints.values()}
        if self.topology.compute_device == "cuda":
            room = f"{sizes.hbm / GIB:.1f} GiB per GPU, of which 15 % is reserved"
            kernels |= {*self.config.plan.compute_kernels}
            room += f", and {sizes.ddr / GIB:.1f} GiB of host memory per GPU" if kernels & {*UVM_KERNELS} else ""
        else:
            room = f"{sizes.ddr / GIB:.1f} GiB of memory per worker"
            room += f", and {sizes.ssd / GIB:.1f} GiB of disk per worker" if MMAP_KERNEL in kernels else ""
        return ConfigError(
            f"cannot place {format_count(len(tables), 'table')} ({gib:.2f} GiB of weights) on "
            f"{format_count(world, 'worker')}: {reason}",
            where="plan, scaling.num_workers",
            expected=f"tables that fit into {room}, with the constraints in plan.tables and sharding types "
            f"{', '.join(allowed)}",
            do=f"add workers, {row_wise}{pins}or reduce the size of the tables",
        )


def narrow_sharding_types(constraints: Constraints, schema: Schema, world: int, memory: int) -> Constraints:
    """Return constraints that keep the search small on `world` ranks, each with `memory` bytes for tables.

    If there are too many tables × ranks (MAX_ADDED_SHARDS), only the tables with the most bytes or lookups may be split
    across all ranks, and only the tables with the fewest may be replicated on every rank. Other tables keep their
    remaining sharding types. Tables of more than ALWAYS_SPLIT_SHARE × `memory`, and tables without another sharding
    type, keep all types. On one rank, all tables that may be both table_wise and row_wise become table_wise, which
    sorts no ids by rank.
    """
    features = Counter(feature.table for feature in schema.sparse.values())
    bytes_of = {name: 4 * table.rows * table.dim for name, table in schema.tables.items()}
    load_of = {name: features[name] * table.dim for name, table in schema.tables.items()}
    all_bytes, all_load = max(1, sum(bytes_of.values())), max(1, sum(load_of.values()))

    def demand(table: str) -> tuple[float, int]:
        return max(bytes_of[table] / all_bytes, load_of[table] / all_load), bytes_of[table]

    unchanged = {table for table in constraints if bytes_of[table] > ALWAYS_SPLIT_SHARE * memory}
    narrowed = {
        table: replace(each, sharding=("table_wise",))
        if world == 1 and {"table_wise", "row_wise"} <= {*each.sharding}
        else each
        for table, each in constraints.items()
    }
    for kinds, largest_first in ((MANY_RANK_SHARDING_TYPES, True), (("data_parallel",), False)):
        candidates = [
            table
            for table, each in narrowed.items()
            if {*kinds} & {*each.sharding} and {*each.sharding} - {*kinds} and table not in unchanged
        ]
        candidates.sort(key=demand, reverse=largest_first)
        for table in candidates[max(1, MAX_ADDED_SHARDS // world) :]:
            remaining = tuple(kind for kind in narrowed[table].sharding if kind not in kinds)
            narrowed[table] = replace(narrowed[table], sharding=remaining)
    return narrowed


def split_columns(constraints: Upstream, dims: dict[str, int]) -> Iterator[Upstream]:
    """Yield constraints that split the columns of tables into 2, 4, 8, … parts.

    Each result contains only tables that may be sharded by column, whose dim can be divided into this number of parts
    with widths that are multiples of 4, and whose minimum width in `constraints` allows a larger number of parts.
    `dims` maps each table to its dim, the number of columns.
    """
    max_parts = {
        table: dims[table] // each.min_partition
        for table, each in constraints.items()
        if {*COLUMN_SHARDED_TYPES} & {*each.sharding_types}
    }
    parts = 2
    while parts < max(max_parts.values(), default=0):
        yield {
            table: replace(constraints[table], min_partition=dims[table] // parts)
            for table in max_parts
            if parts < max_parts[table] and dims[table] // 4 % parts == 0
        }
        parts *= 2


def estimate_once_per_size(options: list[ShardingOption], estimate: Callable[[list[ShardingOption]], None]) -> None:
    """Set the storage of all shards with TorchRec's `estimate`, which runs once per shard size of an option."""
    shards_of = [option.shards for option in options]
    for option in options:
        option.shards = list({tuple(shard.size): shard for shard in option.shards}.values())
    estimate(options)
    for option, shards in zip(options, shards_of, strict=True):
        storages = {tuple(shard.size): shard.storage for shard in option.shards}
        for shard in shards:
            shard.storage = storages[tuple(shard.size)]
        option.shards = shards


class CorrectedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator with corrected sizes and locations of weights and optimizer state.

    TorchRec (1.8.0) assumes that optimizer state has the dtype of the weights, and therefore counts only half of the
    state of fp16 tables. For UVM tables, TorchRec also places all state in host memory, although FBGEMM keeps
    row-wise state on the GPU. TorchRec does not support tables in files.

    Args:
        fused: Table → optimizer that updates the table in backward. The state of other tables is not counted.
        on_disk: Tables in files.
    """

    def __init__(
        self, topology: Topology, batch_size: int, constraints: Upstream, fused: Mapping[str, str], on_disk: Set[str]
    ):
        super().__init__(topology, batch_size, constraints, EmbeddingStorageEstimator(topology, constraints))
        self._on_gpus, self._fused, self._on_disk = topology.compute_device == "cuda", fused, on_disk

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate the storage of all shards, and correct the optimizer state of tables in `fused`."""
        estimate_once_per_size(sharding_options, super().populate_estimates)
        for option in sharding_options:
            if option.name in self._fused:
                for shard in option.shards:
                    shard.storage += self._uncounted_state(option, *shard.size)

    def _uncounted_state(self, option: ShardingOption, rows: int, dim: int) -> Storage:
        optimizer = find_optimizer(self._fused[option.name])
        per_row = rows * optimizer.count_state_bytes("row")
        per_value = rows * dim * optimizer.count_state_bytes("value")
        counted = (per_row + per_value) * option.tensor.element_size() // 4
        if self._on_gpus and option.compute_kernel in UVM_KERNELS:
            return Storage(hbm=per_row, ddr=per_value - counted)
        missing = per_row + per_value - counted
        if option.name in self._on_disk:
            in_memory = rows * dim * option.tensor.element_size() + counted
            return Storage(hbm=0, ddr=-in_memory, ssd=in_memory + missing)
        return Storage(hbm=missing, ddr=0) if self._on_gpus else Storage(hbm=0, ddr=missing)
