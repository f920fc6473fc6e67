"""The search for a plan: TorchRec's planner within constraints, then a shorter step (balance.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from warnings import catch_warnings, simplefilter

import numpy as np
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.proposers import GridSearchProposer, UniformProposer
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from raytrec.common.errors import ConfigError
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import TableConstraint, column_parts, table_optimizers
from raytrec.embeddings.kernels import MMAP_KERNEL, UVM_KERNELS, kernels_to_choose
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.planning.balance import Balancer
from raytrec.planning.dense_work import DenseWork
from raytrec.planning.footprint import GIB, move_to_files
from raytrec.planning.loads import LoadCounter, lengths_of_tables
from raytrec.planning.partitioner import ConstrainedPartitioner
from raytrec.planning.rates import Rates
from raytrec.planning.search import Enumerator, GreedyProposer, narrow

RESERVED_SHARE = 0.15  # of each GPU, for dense layers, activations and the rest
COLUMN_TYPES = ("column_wise", "table_column_wise", "grid_shard")
Constraints = dict[str, TableConstraint]


@dataclass(frozen=True)
class Finder:
    """Finds the plan of a model's tables on these devices.

    Attributes:
        dense: about what the dense layers of a rank compute.
        rates: by which plans are compared; None: TorchRec's planner has the last word.
        linked: (groups, ranks of each) that fast links join; of one host or more.
    """

    topology: Topology
    schema: Schema
    config: RunConfig
    model: nn.Module
    sharders: list[ModuleSharder]
    dense: DenseWork
    rates: Rates | None
    linked: tuple[int, int]

    def find(self, constraints: Constraints) -> ShardingPlan | ConfigError:
        """The plan, or why there is none.

        Args:
            constraints: table → TableConstraint, checked.
        """
        device, world = self.topology.compute_device, self.topology.world_size
        storage, choices = self.topology.devices[0].storage, iter([constraints])
        memory = storage.hbm if device == "cuda" else storage.ddr
        if device == "cpu":
            choices = move_to_files(constraints, self.schema, self.config, world * memory)
        for chosen in choices:
            narrowed = narrow(chosen, self.schema, world, memory)
            plan = self._search(narrowed)
            if isinstance(plan, ConfigError) and narrowed != chosen:
                plan = self._search(chosen)
            if not isinstance(plan, ConfigError):
                break
        return plan

    def _search(self, constraints: Constraints) -> ShardingPlan | ConfigError:
        fused, of_torchrec = self._fused(), self._for_torchrec(constraints)
        batch = -(-self.config.data.global_batch_size // self.topology.world_size)
        on_disk = {table for table, constraint in constraints.items() if constraint.kernel == MMAP_KERNEL}
        partitioner = ConstrainedPartitioner(constraints)
        given = {table: each.kernel for table, each in constraints.items() if each.kernel}
        kernels = {table: "dense" for table in constraints if table not in fused} | given

        with catch_warnings():  # that it may reserve too much
            simplefilter("ignore", FutureWarning)
            reserved = HeuristicalStorageReservation(RESERVED_SHARE)
        of_all = Enumerator(self.topology, batch, of_torchrec, fused, on_disk)

        def balance(plan: list[ShardingOption]) -> list[ShardingOption]:
            options = of_all.enumerate(self.model, self.sharders)
            for fewer in finer_cuts(of_torchrec, {option.name: option.tensor.shape[1] for option in plan}):
                cut = Enumerator(self.topology, batch, of_torchrec | fewer, fused, on_disk)
                found = cut.enumerate(self.model, self.sharders)
                options += [of for of in found if of.name in fewer and of.sharding_type in COLUMN_TYPES]
            return self._balancer(constraints, kernels, options, reserved.last_reserved_topology).improve(
                plan
            )

        balanced = self.rates and self.config.plan.balance and self.topology.world_size > 1
        planner = EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=batch,
            enumerator=of_all,
            storage_reservation=reserved,
            constraints=of_torchrec,
            partitioner=partitioner,
            # TorchRec's own four, with greedy ones that end.
            proposer=[GridSearchProposer(), GreedyProposer(max), GreedyProposer(sum), UniformProposer()],
            callbacks=[balance] if balanced else [],
            debug=False,
        )
        try:
            plan = planner.plan(self.model, self.sharders)
        except PlannerError as error:
            return self._refusal(constraints, partitioner.refusal or str(error).splitlines()[0].strip())
        # The planner (torchrec 1.8.0) refuses dense kernels for sharded tables, and UVM kernels on CPU, which
        # run all the same.
        for module in plan.plan.values():
            for table, spec in module.items():
                spec.compute_kernel = kernels.get(table, spec.compute_kernel)
        return plan

    def _for_torchrec(self, constraints: Constraints) -> dict[str, ParameterConstraints]:
        world, local = self.topology.world_size, self.topology.local_world_size
        device, out = self.topology.compute_device, {}
        lengths = lengths_of_tables(self.schema, resolve_features(self.schema, self.config.model))
        for table, constraint in constraints.items():
            dim, kernel = self.schema.tables[table].dim, constraint.kernel
            kernels = kernels_to_choose(self.config, device, bool(self.schema.tables[table].ids))
            parts = column_parts(dim, constraint.sharding, constraint.ranks, world, local)
            free = kernel in (None, "dense") or device == "cpu"
            out[table] = ParameterConstraints(
                sharding_types=list(constraint.sharding),
                compute_kernels=["dense", *kernels] if free else [kernel],  # data_parallel is dense anyway
                min_partition=dim // parts,
                pooling_factors=lengths[table],
            )
        return out

    def _fused(self) -> dict[str, str]:
        """Table → the optimizer that updates it in backward, of those that have one."""
        return {
            table: optimizer.name
            for table, optimizer in table_optimizers(self.config, self.schema).items()
            if self.topology.compute_device in optimizer_of(optimizer.name).devices
        }

    def _balancer(
        self,
        constraints: Constraints,
        kernels: dict[str, str],
        options: Sequence[ShardingOption],
        reserved: Topology,
    ) -> Balancer:
        storage = [device.storage for device in reserved.devices]
        return Balancer(
            self.config,
            self.schema,
            LoadCounter(self.config, self.schema, *self.linked),
            self.dense,
            self.rates,
            constraints,
            options,
            np.array([[of.hbm, of.ddr, of.ssd] for of in storage], float),
            kernels,
            self.linked,
            self.topology.local_world_size,
        )

    def _refusal(self, constraints: Constraints, reason: str) -> ConfigError:
        gib = sum(t.rows * t.dim * 4 for t in self.schema.tables.values()) / GIB
        return ConfigError(
            f"no plan for {len(self.schema.tables)} tables ({gib:.2f} GiB of weights) on "
            f"{self.topology.world_size} workers: {reason}",
            where="plan, scaling.num_workers",
            expected=f"tables that fit under {', '.join(self.config.plan.sharding_types)} and plan.tables"
            + _room(self.topology, constraints),
            do="add workers, allow row_wise, or make tables smaller",
        )


def finer_cuts(
    constraints: dict[str, ParameterConstraints], dims: dict[str, int]
) -> Iterator[dict[str, ParameterConstraints]]:
    """Of tables that may be cut by columns, constraints in which they are cut into 2, 4, 8, … parts, as long
    as these are fewer than there."""
    most = {
        table: dims[table] // each.min_partition
        for table, each in constraints.items()
        if {*COLUMN_TYPES} & {*each.sharding_types}
    }
    parts = 2
    while parts < max(most.values(), default=0):
        yield {
            table: replace(constraints[table], min_partition=dims[table] // parts)
            for table in most
            if parts < most[table] and dims[table] // 4 % parts == 0
        }
        parts *= 2


def _room(topology: Topology, constraints: Constraints) -> str:
    """What a worker has for tables, in words."""
    has, kernels = topology.devices[0].storage, {constraint.kernel for constraint in constraints.values()}
    if topology.compute_device != "cuda":
        words = f" in {has.ddr / GIB:.1f} GiB of memory for each worker"
        return words + (f", and {has.ssd / GIB:.1f} GiB of disk" if MMAP_KERNEL in kernels else "")
    words = f" in {has.hbm / GIB:.1f} GiB on each GPU, less 15 %"
    if kernels & {*UVM_KERNELS}:
        words += f", and {has.ddr / GIB:.1f} GiB of host memory for each"
    return words
