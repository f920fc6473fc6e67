"""A search for a plan that stays small. What it tries grows neither with tables × tables nor with tables ×
ranks.

TorchRec's planner (1.8.0) estimates every shard of every way of sharding, and its greedy proposers then place
all shards again for each table that they move on: with T tables on W ranks T·W estimates and about 2·T
proposals of up to T·W shards (docs/scaling.md). Here shards of one size are estimated once, only the tables
that need it may be cut into a part for every rank, and a greedy search moves several tables on between two
proposals, once there are many. A search that is small is TorchRec's own, proposal by proposal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from heapq import heapify, heappop, heappush

from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import Proposer, Shard, ShardingOption, Storage

from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import TableConstraint
from raytrec.embeddings.kernels import UVM_KERNELS
from raytrec.embeddings.optimizers import optimizer_of

MOST_SHARDS = 32_768  # that ways of sharding over all ranks add to the search
MOST_PLACED = 200_000  # shards in all proposals of one greedy search
LARGE = 0.25  # of a rank's memory: a larger table may always be cut
SPREAD = ("row_wise", "grid_shard")  # a part for every rank, or for many


def narrow(
    constraints: dict[str, TableConstraint], schema: Schema, world: int, memory: int
) -> dict[str, TableConstraint]:
    """The constraints with which a search stays small.

    Where there are too many tables × ranks, only the tables with most bytes or most lookups may be cut into a
    part for every rank, and only the smallest may be copied to every rank; the others keep what else they
    were allowed. Tables that are allowed nothing else, and large ones, stay as they are. On one rank, where a
    part for every rank is the whole table, no table is cut: the same values without sorting ids by rank.

    Args:
        memory: bytes for tables on each rank's device.
    """
    features = dict.fromkeys(schema.tables, 0)
    for spec in schema.sparse.values():
        features[spec.table] += 1
    bytes_of = {name: 4 * table.rows * table.dim for name, table in schema.tables.items()}
    load_of = {name: features[name] * table.dim for name, table in schema.tables.items()}
    all_bytes, all_load = max(1, sum(bytes_of.values())), max(1, sum(load_of.values()))

    def demand(table: str) -> tuple[float, int]:
        return max(bytes_of[table] / all_bytes, load_of[table] / all_load), bytes_of[table]

    spared = {table for table in constraints if bytes_of[table] > LARGE * memory}
    narrowed = {table: _whole(each) if world == 1 else each for table, each in constraints.items()}
    for kinds, largest_first in ((SPREAD, True), (("data_parallel",), False)):
        asking = [
            table
            for table, each in narrowed.items()
            if {*kinds} & {*each.sharding} and {*each.sharding} - {*kinds} and table not in spared
        ]
        asking.sort(key=demand, reverse=largest_first)
        for table in asking[max(1, MOST_SHARDS // world) :]:
            left = tuple(kind for kind in narrowed[table].sharding if kind not in kinds)
            narrowed[table] = replace(narrowed[table], sharding=left)
    return narrowed


def _whole(constraint: TableConstraint) -> TableConstraint:
    """The constraint of a table on one rank."""
    cut = {"table_wise", "row_wise"} <= {*constraint.sharding}
    return replace(constraint, sharding=("table_wise",)) if cut else constraint


def estimate_once_per_size(
    options: list[ShardingOption], estimate: Callable[[list[ShardingOption]], None]
) -> None:
    """Estimates storage and time of all shards; of those of one option that have one size, the first.

    Args:
        estimate: TorchRec's, of all shards of all options.
    """
    shards_of = [option.shards for option in options]
    for option in options:
        sizes: dict[tuple[int, ...], Shard] = {}
        for shard in option.shards:
            sizes.setdefault(tuple(shard.size), shard)
        option.shards = list(sizes.values())
    estimate(options)
    for option, shards in zip(options, shards_of, strict=True):
        known = {tuple(shard.size): shard for shard in option.shards}
        for shard in shards:
            shard.storage, shard.perf = known[tuple(shard.size)].storage, known[tuple(shard.size)].perf
        option.shards = shards


class GreedyProposer(Proposer):
    """TorchRec's greedy search: begins with the fastest option of each table, and moves the table that takes
    most memory on to its next one, until there is none.

    Between two proposals it moves as many tables on as keep all its proposals below MOST_PLACED shards; with
    few tables that is one, as in TorchRec.

    Args:
        combine: of the times of an option's shards: max or sum.
    """

    def __init__(self, combine: Callable[[Iterable[float]], float]):
        self._combine = combine
        self._options: list[list[ShardingOption]] = []
        self._at: list[int] = []
        self._heap: list[tuple[float, float, float, float, int]] = []
        self._stride, self._over = 1, True

    def load(self, search_space: list[ShardingOption], enumerator: object = None) -> None:
        of_table: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            of_table.setdefault(option.fqn, []).append(option)
        for options in of_table.values():
            options.sort(key=lambda option: self._combine([shard.perf.total for shard in option.shards]))
        self._options = list(of_table.values())
        self._at = [0] * len(self._options)
        self._over = not self._options
        self._heap = [self._place(table) for table in range(len(self._options)) if self._has_more(table)]
        heapify(self._heap)
        steps = sum(len(options) - 1 for options in self._options)
        most = sum(max(option.num_shards for option in options) for options in self._options)
        self._stride = max(1, -(-steps * most // MOST_PLACED))

    def propose(self) -> list[ShardingOption] | None:
        if self._over:
            return None
        return [options[at] for options, at in zip(self._options, self._at, strict=True)]

    def feedback(self, partitionable, plan=None, perf_rating=None, storage_constraint=None) -> None:
        self._over = not self._heap
        for _ in range(self._stride):
            if not self._heap:
                return
            table = heappop(self._heap)[-1]
            self._at[table] += 1
            if self._has_more(table):
                heappush(self._heap, self._place(table))

    def _has_more(self, table: int) -> bool:
        return self._at[table] + 1 < len(self._options[table])

    def _place(self, table: int) -> tuple[float, float, float, float, int]:
        """Sorts tables by the memory that their option of the moment takes, the largest first."""
        sizes = [shard.storage for shard in self._options[table][self._at[table]].shards]
        hbm, ddr = [size.hbm for size in sizes], [size.ddr for size in sizes]
        return -max(hbm), -sum(hbm), -max(ddr), -sum(ddr), table


class Enumerator(EmbeddingEnumerator):
    """Counts weights and optimizer state as FBGEMM holds them, and where.

    TorchRec (1.8.0) takes state to be of the weights' dtype, which for fp16 tables is half of what it is,
    and to be where the weights are, although one value a row is on the GPU even if the weights are not. It
    knows of no tables in files.

    Args:
        fused: table → the optimizer that updates it in backward; of the others TorchRec counts no state.
        on_disk: tables in files.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints],
        fused: Mapping[str, str],
        on_disk: Set[str] = frozenset(),
    ):
        super().__init__(topology, batch_size, constraints)
        self._on_gpus, self._fused = topology.compute_device == "cuda", fused
        self._on_disk = on_disk

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        estimate_once_per_size(sharding_options, super().populate_estimates)
        for option in sharding_options:
            if option.name in self._fused:
                for shard in option.shards:
                    shard.storage += self._uncounted_state(option, *shard.size)

    def _uncounted_state(self, option: ShardingOption, rows: int, dim: int) -> Storage:
        optimizer = optimizer_of(self._fused[option.name])
        per_row = rows * optimizer.bytes_per("row")
        per_value = rows * dim * optimizer.bytes_per("value")
        counted = (per_row + per_value) * option.tensor.element_size() // 4
        if self._on_gpus and option.compute_kernel in UVM_KERNELS:
            return Storage(hbm=per_row, ddr=per_value - counted)
        missing = per_row + per_value - counted
        if option.name in self._on_disk:
            in_memory = rows * dim * option.tensor.element_size() + counted
            return Storage(hbm=0, ddr=-in_memory, ssd=in_memory + missing)
        return Storage(hbm=missing, ddr=0) if self._on_gpus else Storage(hbm=0, ddr=missing)
