"""Sharding options of tables, and partial plans with their ranks, memory and predicted time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torchrec.distributed.planner.types import ShardingOption

from raytrec.embeddings.constraints import HOST_SHARDING_TYPES, REDUCE_SCATTER_TYPES
from raytrec.planning.loads import LoadCounter, Loads
from raytrec.planning.memory import Constraints, PlannedTable
from raytrec.planning.step_cost import StepTime, estimate_step_time

if TYPE_CHECKING:
    from raytrec.planning.search import Search

# Weight of the sum of TABLE_STEP_PARTS in a plan's score. The sum breaks ties between steps limited by the host.
TIE_BREAK_WEIGHT = 0.1
TABLE_STEP_PARTS = ("lookup", "input exchange", "output exchange", "all-reduce")
ALL_RANK_SHARDING_TYPES = ("row_wise", "data_parallel")  # sharding types that use all ranks in rank order


@dataclass(frozen=True)
class TableOption:
    """One sharding option of a table.

    Attributes:
        option: Sharding option as enumerated by TorchRec.
        needs: Bytes of each shard in (GPU, host, disk), float64 [shards, 3].
        shard_seconds: Seconds that each shard adds to its own rank, float64 [shards].
        rank_seconds: Seconds that the table adds to every rank.
    """

    option: ShardingOption
    needs: np.ndarray
    shard_seconds: np.ndarray
    rank_seconds: float


PlanChange = list[tuple[TableOption, tuple[int, ...]]]  # new sharding option and ranks of each changed table


@dataclass
class PartialPlan:
    """Plan under construction.

    Attributes:
        of: Table → sharding option and the ranks of its shards.
        room: Remaining bytes of each rank in (GPU, host, disk), float64 [ranks, 3].
        loads: Loads of the tables in the plan.
        busy: Approximate busy seconds of each rank, float64 [ranks]; `PlacementSpace.rate` replaces them with
            predicted seconds.
        score: Score of the plan, set by `PlacementSpace.rate`; lower is better.
    """

    of: dict[str, tuple[TableOption, tuple[int, ...]]]
    room: np.ndarray
    loads: Loads
    busy: np.ndarray
    score: float = np.inf


class PlacementSpace:
    """Sharding options of every table on identical ranks, with methods to add and remove a plan's tables.

    Args:
        search: Search, which provides the configuration, rates and ranks.
        constraints: Table → constraint.
        options: Every sharding option that TorchRec allows, with the storage of each shard.
        room: Bytes of each rank available to tables in (GPU, host, disk), float64 [ranks, 3].
        kernels: Table → compute kernel to use instead of the option's kernel.

    Attributes:
        table_options: Table → sharding options.
        world: Number of ranks.
        constraints: Table → constraint.
        room: Bytes of each rank available to tables, float64 [ranks, 3].
    """

    def __init__(
        self, search: Search, constraints: Constraints, options: list[ShardingOption], room: np.ndarray, kernels: dict
    ):
        self._search, self.constraints, self.room, self._kernels = search, constraints, room, kernels
        self._counter, self.world = LoadCounter(search.config, search.schema, *search.linked), len(room)
        self._base = self._counter.count()
        self._base.groups.update({("", option.sharding_type): 1 for option in options})
        self._idle = np.array(self._estimate_time(self._base).busy)
        self.table_options: dict[str, list[TableOption]] = {}
        for option in options:
            self.table_options.setdefault(option.name, []).append(self._make_way(option))

    def empty(self) -> PartialPlan:
        """Return an empty plan."""
        return PartialPlan({}, self.room.copy(), self._counter.count(), self._idle.copy())

    def _estimate_time(self, loads: Loads) -> StepTime:
        setup = self._search
        return estimate_step_time(setup.config, setup.schema, loads, setup.dense, setup.rates, *setup.linked)

    def rate(self, plan: PartialPlan) -> PartialPlan:
        """Set a plan's score and busy seconds with `estimate_step_time`, and return the plan."""
        time = self._estimate_time(plan.loads)
        plan.busy = np.array(time.busy)
        plan.score = time.step + TIE_BREAK_WEIGHT * sum(time.parts[name] for name in TABLE_STEP_PARTS)
        return plan

    def _make_way(self, option: ShardingOption) -> TableOption:
        needs = np.array([[s.storage.hbm, s.storage.ddr, s.storage.ssd] for s in option.shards], float)
        count = len(option.shards)
        table = self._make_table(option, range(count))
        self._counter.add(self._base, table)
        extra = np.array(self._estimate_time(self._base).busy) - self._idle
        self._counter.add(self._base, table, -1)
        spread = float(extra[count:].min()) if count < self.world else 0.0
        return TableOption(option, needs, np.maximum(0.0, extra[:count] - spread), spread)

    def _make_table(self, option: ShardingOption, ranks: Iterable[int]) -> PlannedTable:
        rows, dim = option.tensor.shape
        shards = [(rank, *shard.size) for rank, shard in zip(ranks, option.shards, strict=True)]
        kernel = self._kernels.get(option.name, option.compute_kernel)
        sharding = option.sharding_type, kernel, [rank for rank, *_ in shards], shards
        return PlannedTable(option.name, rows, dim, *sharding, self.constraints[option.name].dtype)

    def put(self, plan: PartialPlan, way: TableOption, ranks: Sequence[int]) -> None:
        """Add a table, which the plan must not contain, with a sharding option to a plan; `ranks` has one per shard."""
        plan.of[way.option.name] = way, tuple(ranks)
        self._apply(plan, way, ranks, 1)

    def take(self, plan: PartialPlan, name: str) -> tuple[TableOption, tuple[int, ...]]:
        """Remove a table, which the plan must contain, from a plan, and return its sharding option and ranks."""
        way, ranks = plan.of.pop(name)
        self._apply(plan, way, ranks, -1)
        return way, ranks

    def _apply(self, plan: PartialPlan, way: TableOption, ranks: Sequence[int], times: int) -> None:
        plan.room[list(ranks)] -= times * way.needs
        plan.busy[list(ranks)] += times * way.shard_seconds
        plan.busy += times * way.rank_seconds
        self._counter.add(plan.loads, self._make_table(way.option, ranks), times)

    def get_used_shares(self, room: np.ndarray, ranks: Sequence[int] | slice = slice(None)) -> np.ndarray:
        """Return the used share of the fullest memory tier of each rank, float64 [ranks].

        Args:
            room: Remaining bytes of these ranks, float64 [ranks, 3].
            ranks: Ranks to which the rows of `room` belong; default: all ranks.
        """
        return (1 - room / np.maximum(1.0, self.room[ranks])).max(1)

    def mean(self, way: TableOption) -> float:
        """Return the mean seconds that a table adds to a rank under a sharding option."""
        return float(way.shard_seconds.sum()) / self.world + way.rank_seconds

    def place(self, way: TableOption, busy: np.ndarray, room: np.ndarray) -> tuple[int, ...]:
        """Return the ranks for a table's shards, one rank per shard; () if the shards do not fit there.

        The result contains all ranks for ALL_RANK_SHARDING_TYPES, and otherwise the configured ranks of the table.
        Without configured ranks, it contains the least busy ranks that have room, or for HOST_SHARDING_TYPES ranks of
        the least busy hosts. `busy` and `room` contain busy seconds and remaining bytes, as in PartialPlan.
        """
        count, kind = len(way.option.shards), way.option.sharding_type
        pinned = self.constraints[way.option.name].ranks
        if kind in ALL_RANK_SHARDING_TYPES:
            return tuple(range(count)) if (way.needs <= room).all() else ()
        if pinned:
            return pinned if len(pinned) == count and (way.needs <= room[list(pinned)]).all() else ()
        local = self._search.topology.local_world_size if kind in HOST_SHARDING_TYPES else self.world
        size, fits = min(count, local), (way.needs.max(0) <= room).all(1)
        chosen_ranks: list[int] = []
        for host in sorted(np.arange(self.world).reshape(-1, local), key=lambda host: busy[host].mean()):
            ranks = host[fits[host]]
            if kind not in REDUCE_SCATTER_TYPES:
                ranks = ranks[np.argsort(busy[ranks], kind="stable")]
            if len(ranks) >= size:
                chosen_ranks += ranks[:size].tolist()
            if len(chosen_ranks) == count:
                return tuple(chosen_ranks)
        return ()
