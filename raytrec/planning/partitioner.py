"""Which ranks take the shards of a proposed plan."""

from __future__ import annotations

import copy

from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption

from raytrec.embeddings.constraints import TableConstraint


class ConstrainedPartitioner(GreedyPerfPartitioner):
    """First tables whose ranks are given and groups that must be together, then the rest as TorchRec does.

    Args:
        constraints: table → TableConstraint.

    Attributes:
        refusal: the last reason why a constraint could not be kept; the planner replaces it with its own.
    """

    def __init__(self, constraints: dict[str, TableConstraint]):
        super().__init__()
        self._constraints, self.refusal = constraints, ""

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology, hbm_per_device=None):
        groups: dict[int, list[ShardingOption]] = {}
        pinned, columns, rest = [], [], []
        for option in proposal:
            constraint = self._constraints[option.name]
            if constraint.ranks and constraint.sharding[0] not in ("row_wise", "data_parallel"):
                pinned.append((option, constraint.ranks))
            elif constraint.group is not None:
                groups.setdefault(constraint.group, []).append(option)
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
                self._refuse(f"table {option.name} does not fit on rank {rank} with what else must be there")
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
    return sum(others, start=first)
