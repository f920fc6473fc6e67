"""A plan whose step is shorter than that of the plan that TorchRec's planner finds.

TorchRec's planner (1.8.0) adds up the times of all that a rank does, estimated shard by shard, and searches
by the memory that tables take. Here plans are compared by `step_time`: by the rank that lookups wait for, and
by the one that exchanges wait for. Several plans are built table by table, each with other ways of sharding;
the best of them and TorchRec's own are improved by moving, swapping and cutting what the slowest rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torchrec.distributed.planner.types import ShardingOption

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import TableConstraint
from raytrec.planning.dense_work import DenseWork
from raytrec.planning.held import PlannedTable
from raytrec.planning.loads import LoadCounter, Loads
from raytrec.planning.rates import Rates
from raytrec.planning.step_time import StepTime, step_time

WORTH = 0.01  # of a step: another plan than TorchRec's is to be shorter by as much
TIE = 0.1  # weight of all parts together: of two steps that wait for the host, the one with less to do
LARGEST = (1.0, 0.5, 0.25, 0.0)  # of a rank's mean time, the time of a shard that need not be cut further
LOOKED_AT, MOST_LOOKED_AT = 8, 400  # changes that are rated at once, and in all for one plan
OF_TABLES = ("lookup", "input exchange", "output exchange", "all-reduce")
SLOW = 3  # ranks, the slowest first, of which one is to be relieved
EVERYWHERE = ("row_wise", "data_parallel")  # on all ranks, in order


@dataclass(frozen=True)
class Way:
    """A way of sharding one table.

    Attributes:
        needs: bytes that each shard takes of (GPU, host, disk), float64 [shards, 3].
        own: seconds that each shard takes its rank, [shards]; spread: that it takes every rank.
    """

    option: ShardingOption
    needs: np.ndarray
    own: np.ndarray
    spread: float


@dataclass
class Placed:
    """A plan that is being made.

    Attributes:
        of: table → its way and the ranks of its shards.
        room: bytes that each rank has left of (GPU, host, disk), [ranks, 3].
        loads: of the tables in it. busy: about what each rank takes, [ranks] seconds; exact once it is rated.
        score: less is better.
    """

    of: dict[str, tuple[Way, tuple[int, ...]]]
    room: np.ndarray
    loads: Loads
    busy: np.ndarray
    score: float = np.inf


class Balancer:
    """Improves plans of one configuration on equal ranks.

    Tables with given ranks and groups that must be together stay where the plan has them.

    Args:
        counter: of the tables' loads.
        options: every way in which TorchRec may shard the tables, with the storage of each shard.
        room: bytes of each rank that tables may take, of (GPU, host, disk), float64 [ranks, 3].
        kernels: table → the kernel that it will have, whatever the planner has chosen.
        linked: (groups, ranks of each) that fast links join.
        local: ranks that TorchRec takes for one host.
    """

    def __init__(
        self,
        config: RunConfig,
        schema: Schema,
        counter: LoadCounter,
        dense: DenseWork,
        rates: Rates,
        constraints: Mapping[str, TableConstraint],
        options: Sequence[ShardingOption],
        room: np.ndarray,
        kernels: Mapping[str, str],
        linked: tuple[int, int],
        local: int,
    ):
        self._config, self._schema, self._counter = config, schema, counter
        self._dense, self._rates = dense, rates
        self._constraints, self._room, self._kernels = constraints, room, kernels
        self._linked, self._local, self._world = linked, local, len(room)
        self._base = counter.none()
        self._base.groups.update({("", option.sharding_type): 1 for option in options})
        self._idle = np.array(self._time(self._base).busy)
        self._ways: dict[str, list[Way]] = {}
        for option in options:
            self._ways.setdefault(option.name, []).append(self._way(option))

    def improve(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        """The same plan, or one whose step is at least WORTH shorter.

        Args:
            plan: a way for each table, with ranks.
        """
        found = self._placed(plan)
        before = self._time(found.loads).step
        fixed = {name: of for name, of in found.of.items() if self._is_fixed(name)}
        starts = [found, *(each for start in self._starts() if (each := self._build(fixed, *start)))]
        best = min(map(self._refine, starts), key=lambda each: each.score)
        if self._time(best.loads).step > (1 - WORTH) * before:
            return plan
        out = []
        for option in plan:
            way, ranks = best.of[option.name]
            for shard, rank in zip(way.option.shards, ranks, strict=True):
                shard.rank = rank
            out.append(way.option)
        return out

    def _is_fixed(self, name: str) -> bool:
        constraint = self._constraints[name]
        return constraint.group is not None or constraint.ranks is not None

    def _starts(self) -> Iterator[tuple[set[str], float]]:
        """(ways of sharding, LARGEST) of plans to build: with all ways, and with each alone."""
        kinds = {way.option.sharding_type for ways in self._ways.values() for way in ways}
        yield from ((kinds, largest) for largest in LARGEST)
        if len(kinds) > 1:
            yield from (({kind}, LARGEST[-1]) for kind in sorted(kinds))

    # Rating

    def _time(self, loads: Loads) -> StepTime:
        return step_time(self._config, self._schema, loads, self._dense, self._rates, *self._linked)

    def _rate(self, plan: Placed) -> Placed:
        time = self._time(plan.loads)
        plan.busy = np.array(time.busy)
        plan.score = time.step + TIE * sum(time.parts[name] for name in OF_TABLES)
        return plan

    def _way(self, option: ShardingOption) -> Way:
        needs = np.array([[s.storage.hbm, s.storage.ddr, s.storage.ssd] for s in option.shards], float)
        count = len(option.shards)
        table = self._table(option, range(count))
        self._counter.add(self._base, table)
        extra = np.array(self._time(self._base).busy) - self._idle
        self._counter.add(self._base, table, -1)
        spread = float(extra[count:].min()) if count < self._world else 0.0
        return Way(option, needs, np.maximum(0.0, extra[:count] - spread), spread)

    def _table(self, option: ShardingOption, ranks: Iterable[int]) -> PlannedTable:
        rows, dim = option.tensor.shape
        shards = [(rank, *shard.size) for rank, shard in zip(ranks, option.shards, strict=True)]
        kernel = self._kernels.get(option.name, option.compute_kernel)
        what = option.sharding_type, kernel, [rank for rank, *_ in shards], shards
        return PlannedTable(option.name, rows, dim, *what, self._constraints[option.name].dtype)

    # Changing

    def _put(self, plan: Placed, way: Way, ranks: Sequence[int]) -> None:
        name = way.option.name
        plan.of[name] = way, tuple(ranks)
        plan.room[list(ranks)] -= way.needs
        plan.busy[list(ranks)] += way.own
        plan.busy += way.spread
        self._counter.add(plan.loads, self._table(way.option, ranks))

    def _take(self, plan: Placed, name: str) -> tuple[Way, tuple[int, ...]]:
        way, ranks = plan.of.pop(name)
        plan.room[list(ranks)] += way.needs
        plan.busy[list(ranks)] -= way.own
        plan.busy -= way.spread
        self._counter.add(plan.loads, self._table(way.option, ranks), -1)
        return way, ranks

    def _empty(self) -> Placed:
        return Placed({}, self._room.copy(), self._counter.none(), self._idle.copy())

    def _placed(self, plan: list[ShardingOption]) -> Placed:
        out = self._empty()
        for option in plan:
            self._put(out, self._way(option), [shard.rank for shard in option.shards])
        return self._rate(out)

    def _build(
        self, fixed: Mapping[str, tuple[Way, tuple[int, ...]]], kinds: set[str], largest: float
    ) -> Placed | None:
        """A plan table by table, those that take most of the time or memory first, each where and in the way
        in which the slowest of its ranks is done first; None: memory does not hold it.

        Args:
            kinds: ways of sharding, for tables that have one of them.
            largest: ways whose shards take at most such a part of a rank's mean time go before others; of
                these the one that takes least.
        """
        plan = self._empty()
        for way, ranks in fixed.values():
            self._put(plan, way, ranks)
        ways = {name: ways for name, ways in self._ways.items() if name not in fixed}
        seconds = {name: min(self._mean(way) for way in of) for name, of in ways.items()}
        least = np.array([min((way.needs.sum(0) for way in of), key=sum) for of in ways.values()])
        part = least / np.maximum(1.0, self._room.sum(0)) if ways else least
        whole = max(1e-12, sum(seconds.values()))
        weight = {
            name: max(seconds[name] / whole, float(of.max())) for name, of in zip(ways, part, strict=True)
        }
        for name in sorted(ways, key=lambda name: (-weight[name], name)):
            allowed = [way for way in ways[name] if way.option.sharding_type in kinds] or ways[name]
            places = [(way, ranks) for way in allowed if (ranks := self._place(way, plan.busy, plan.room))]
            if not places:
                return None
            small = [place for place in places if place[0].own.max() <= largest * whole]
            if small and largest:
                self._put(plan, *min(small, key=lambda place: self._mean(place[0])))
            else:
                self._put(plan, *min(places, key=lambda place: self._done(plan.busy, *place)))
        return self._rate(plan)

    def _mean(self, way: Way) -> float:
        """Seconds that it takes, shared by all ranks."""
        return float(way.own.sum()) / self._world + way.spread

    def _done(self, busy: np.ndarray, way: Way, ranks: Sequence[int]) -> float:
        """When the slowest of its ranks is done, and as a tie what it takes all."""
        return float((busy[list(ranks)] + way.own).max()) + way.spread + self._mean(way)

    def _place(self, way: Way, busy: np.ndarray, room: np.ndarray) -> tuple[int, ...]:
        """The least busy ranks that have room for its shards, each on another; none: ()."""
        count, kind = len(way.option.shards), way.option.sharding_type
        if kind in EVERYWHERE:
            return tuple(range(count)) if (way.needs <= room).all() else ()
        if kind in ("table_row_wise", "grid_shard", "table_column_wise"):
            return self._place_on_hosts(way, busy, room)
        fits = (way.needs.max(0) <= room).all(1)
        ranks = [rank for rank in np.argsort(busy, kind="stable").tolist() if fits[rank]][:count]
        return tuple(ranks) if len(ranks) == count else ()

    def _place_on_hosts(self, way: Way, busy: np.ndarray, room: np.ndarray) -> tuple[int, ...]:
        count, found = len(way.option.shards), []
        hosts = np.arange(self._world).reshape(-1, self._local)
        size = min(count, self._local)
        for host in sorted(hosts.tolist(), key=lambda host: (busy[host].mean(), host)):
            fitting = [rank for rank in host if (way.needs.max(0) <= room[rank]).all()]
            if way.option.sharding_type == "table_column_wise":
                fitting.sort(key=lambda rank: busy[rank])
            if len(fitting) >= size:
                found += fitting[:size]
            if len(found) == count:
                return tuple(found)
        return ()

    # Improving

    def _refine(self, plan: Placed) -> Placed:
        """Relieves the slowest ranks as long as that makes the step shorter."""
        left = MOST_LOOKED_AT
        while left > 0:
            better = False
            for slow in np.argsort(-plan.busy, kind="stable").tolist()[:SLOW]:
                changes = sorted(self._changes(plan, slow), key=lambda change: change[0])[:LOOKED_AT]
                for _, change in changes:
                    left -= 1
                    if better := self._try(plan, change):
                        break
                if better:
                    break
            if not better:
                break
        return plan

    def _try(self, plan: Placed, change: list[tuple[Way, tuple[int, ...]]]) -> bool:
        """Makes a change if the plan is better for it."""
        before, busy = plan.score, plan.busy.copy()
        was = [self._take(plan, way.option.name) for way, _ in change]
        for way, ranks in change:
            self._put(plan, way, ranks)
        if (plan.room >= 0).all() and self._rate(plan).score < before * (1 - 1e-4):
            return True
        for way, _ in change:
            self._take(plan, way.option.name)
        for way, ranks in was:
            self._put(plan, way, ranks)
        plan.busy, plan.score = busy, before
        return False

    def _changes(self, plan: Placed, slow: int) -> Iterator[tuple[float, list[tuple[Way, tuple[int, ...]]]]]:
        """What might relieve a rank, with what the slowest rank would then take, roughly."""
        here = [name for name, (_, ranks) in plan.of.items() if slow in ranks and not self._is_fixed(name)]
        for name in here:
            now, ranks = plan.of[name]
            busy, room = plan.busy - now.spread, plan.room.copy()
            busy[list(ranks)] -= now.own
            room[list(ranks)] += now.needs
            for way in self._ways[name]:
                to = self._place(way, busy, room)
                if to and (way.option is not now.option or set(to) != set(ranks)):
                    yield self._after(busy, way, to), [(way, to)]
        yield from self._swaps(plan, slow, [name for name in here if len(plan.of[name][1]) == 1])

    def _swaps(
        self, plan: Placed, slow: int, here: list[str]
    ) -> Iterator[tuple[float, list[tuple[Way, tuple[int, ...]]]]]:
        """Exchanges of whole tables with a rank that is less busy."""
        others: dict[int, list[str]] = {}
        for name, (_, ranks) in plan.of.items():
            if len(ranks) == 1 and not self._is_fixed(name):
                others.setdefault(ranks[0], []).append(name)
        for rank in np.argsort(plan.busy, kind="stable").tolist()[:SLOW]:
            for other in others.get(rank, []) if rank != slow else ():
                theirs = plan.of[other][0]
                for name in here:
                    mine = plan.of[name][0]
                    gain = float(mine.own[0] - theirs.own[0])
                    if gain > 0:
                        after = max(plan.busy[slow] - gain, plan.busy[rank] + gain)
                        yield float(after), [(mine, (rank,)), (theirs, (slow,))]

    @staticmethod
    def _after(busy: np.ndarray, way: Way, ranks: tuple[int, ...]) -> float:
        out = busy + way.spread
        out[list(ranks)] += way.own
        return float(out.max() + TIE * out.mean())
