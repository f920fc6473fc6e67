"""The choice of a plan: a way of sharding and ranks for each table, so that the predicted step is short.

TorchRec's planner (1.8.0) adds up the times of everything that a rank does, estimated shard by shard. Here
plans are compared by `step_time`: by the rank that lookups wait for, and by the rank that exchanges wait for.
Several plans are built table by table, each with other ways of sharding; then tables of the slowest ranks are
moved, swapped and cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torchrec.distributed.planner.types import ShardingOption

from raytrec.embeddings.constraints import TableConstraint
from raytrec.planning.loads import LoadCounter, Loads
from raytrec.planning.memory import PlannedTable
from raytrec.planning.step import StepTime, step_time

if TYPE_CHECKING:
    from raytrec.planning.search import Search

ALIKE = 0.005  # of a score: plans that differ by less are compared by the memory of their fullest rank
TIE = 0.1  # weight of all parts together: of two steps that wait for the host, the one with less to do
LARGEST = (1.0, 0.5, 0.25, 0.0)  # of a rank's mean time, the time of a shard that need not be cut further
LOOKED_AT, MOST_LOOKED_AT = 8, 400  # changes that are rated at once, and in all for one plan
OF_TABLES = ("lookup", "input exchange", "output exchange", "all-reduce")
SLOW = 3  # ranks, the slowest first, of which one is to be relieved
EVERYWHERE = ("row_wise", "data_parallel")  # on all ranks, in order


class NoRoom(Exception):
    """No plan was found that fits into memory; the text names a table."""


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
    """Chooses the plan of one configuration on equal ranks.

    Tables with given ranks get these, and groups that must be together one rank; neither moves later.

    Args:
        search: Configuration, rates and ranks.
        constraints: Table → its constraint.
        options: Every way in which TorchRec may shard the tables, with the storage of each shard.
        room: Bytes of each rank that tables may take, of (GPU, host, disk), float64 [ranks, 3].
        kernels: Table → the kernel that it will have, whatever TorchRec's option has.
    """

    def __init__(
        self,
        search: Search,
        constraints: Mapping[str, TableConstraint],
        options: Sequence[ShardingOption],
        room: np.ndarray,
        kernels: Mapping[str, str],
    ):
        self._search, self._constraints, self._room, self._kernels = search, constraints, room, kernels
        self._counter, self._world = LoadCounter(search.config, search.schema, *search.linked), len(room)
        self._base = self._counter.none()
        self._base.groups.update({("", option.sharding_type): 1 for option in options})
        self._idle = np.array(self._time(self._base).busy)
        self._ways: dict[str, list[Way]] = {}
        for option in options:
            self._ways.setdefault(option.name, []).append(self._way(option))
        groups: dict[int, list[str]] = {}
        for name in self._ways:
            if (group := constraints[name].group) is not None:
                groups.setdefault(group, []).append(name)
        self._groups = sorted(
            groups.values(), key=lambda names: -sum(self._memory(self._ways[name]) for name in names)
        )

    def choose(self) -> list[ShardingOption]:
        """Return a way for each table, with ranks, whose predicted step is about the shortest that was found.

        Raises:
            NoRoom: No plan fits into the ranks' memory.
        """
        built, refusal = [], NoRoom("")
        for kinds, largest in self._starts():
            try:
                built.append(self._build(kinds, largest))
            except NoRoom as error:
                refusal = error
        if not built:
            raise refusal
        refined = [self._refine(plan) for plan in built]
        most = (1 + ALIKE) * min(plan.score for plan in refined)
        alike = [plan for plan in refined if plan.score <= most]
        best = min(alike, key=lambda plan: (round(float(self._filled(plan.room).max()), 1), plan.score))
        out = []
        for name in self._ways:
            way, ranks = best.of[name]
            for shard, rank in zip(way.option.shards, ranks, strict=True):
                shard.rank = rank
            out.append(way.option)
        return out

    def _is_fixed(self, name: str) -> bool:
        constraint = self._constraints[name]
        return constraint.group is not None or constraint.ranks is not None

    def _starts(self) -> Iterator[tuple[set[str], float | None]]:
        """(ways of sharding, LARGEST) of plans to build: with all ways, with each alone, and by memory."""
        kinds = {way.option.sharding_type for ways in self._ways.values() for way in ways}
        yield from ((kinds, largest) for largest in LARGEST)
        if len(kinds) > 1:
            yield from (({kind}, LARGEST[-1]) for kind in sorted(kinds))
        yield kinds, None

    # Rating

    def _time(self, loads: Loads) -> StepTime:
        given = self._search
        return step_time(given.config, given.schema, loads, given.dense, given.rates, *given.linked)

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

    def _build(self, kinds: set[str], largest: float | None) -> Placed:
        """Build a plan table by table: pinned tables, groups, then tables with most of the time or memory.

        Args:
            kinds: Ways of sharding, for tables that have one of them.
            largest: Ways whose shards take at most this share of a rank's mean time go before others, of
                these the one that takes least; of others the one whose slowest rank is done first. None: ways
                and ranks that leave the fullest rank the most memory.

        Raises:
            NoRoom: A table has no room next to the tables placed before it.
        """
        plan = self._empty()
        free = {name: ways for name, ways in self._ways.items() if self._constraints[name].group is None}
        seconds = {name: min(map(self._mean, ways)) for name, ways in free.items()}
        whole = max(1e-12, sum(seconds.values()))
        weight = {name: self._memory(ways) for name, ways in free.items()}
        if largest is not None:
            weight = {name: max(seconds[name] / whole, part) for name, part in weight.items()}
        order = sorted(free, key=lambda name: (not self._constraints[name].ranks, -weight[name], name))
        pinned = [name for name in order if self._constraints[name].ranks]
        for name in pinned:
            self._add(plan, name, self._ways[name], largest, whole)
        for group in self._groups:
            self._add_group(plan, group)
        for name in order[len(pinned) :]:
            ways = [way for way in free[name] if way.option.sharding_type in kinds] or free[name]
            self._add(plan, name, ways, largest, whole)
        return self._rate(plan)

    def _memory(self, ways: Sequence[Way]) -> float:
        """Return the largest share of a tier that a table takes, in the way that takes least memory."""
        least = min((way.needs.sum(0) for way in ways), key=sum)
        return float((least / np.maximum(1.0, self._room.sum(0))).max())

    def _add(self, plan: Placed, name: str, ways: Sequence[Way], largest: float | None, whole: float) -> None:
        """Place a table; see `_build`."""
        busy = plan.busy if largest is not None else self._filled(plan.room)
        places = [(way, ranks) for way in ways if (ranks := self._place(way, busy, plan.room))]
        if not places:
            pin = self._constraints[name].ranks
            where = f"rank{'s' if len(pin) > 1 else ''} {', '.join(map(str, pin))}" if pin else "any ranks"
            raise NoRoom(f"table {name} does not fit on {where} with what else must be there")
        small = [place for place in places if place[0].own.max() <= (largest or 0) * whole]
        if largest is None:
            chosen = min(places, key=lambda place: self._fullest(plan.room, *place))
        elif small:
            chosen = min(small, key=lambda place: self._mean(place[0]))
        else:
            chosen = min(places, key=lambda place: self._done(plan.busy, *place))
        self._put(plan, *chosen)

    def _add_group(self, plan: Placed, group: Sequence[str]) -> None:
        """Place tables that must be together on the least busy rank that has room for all of them."""
        pin = self._constraints[group[0]].ranks
        for rank in pin or np.argsort(plan.busy, kind="stable").tolist():
            left, chosen = plan.room[rank].copy(), []
            for name in group:
                fits = [way for way in self._ways[name] if (way.needs[0] <= left).all()]
                if not fits:
                    break
                chosen.append(min(fits, key=self._mean))
                left -= chosen[-1].needs[0]
            if len(chosen) == len(group):
                for way in chosen:
                    self._put(plan, way, [rank])
                return
        raise NoRoom(f"no rank has room for {', '.join(group)} together")

    def _filled(self, room: np.ndarray, ranks: Sequence[int] | slice = slice(None)) -> np.ndarray:
        """Return the used share of the fullest tier of each rank, [ranks].

        Args:
            room: Bytes that these ranks have left, [ranks, 3].
        """
        return (1 - room / np.maximum(1.0, self._room[ranks])).max(1)

    def _fullest(self, room: np.ndarray, way: Way, ranks: Sequence[int]) -> tuple[float, float]:
        """Return the used share of the fullest rank after adding a table, and as a tie its time."""
        left = room[list(ranks)] - way.needs
        return float(self._filled(left, list(ranks)).max()), self._mean(way)

    def _mean(self, way: Way) -> float:
        """Seconds that it takes, shared by all ranks."""
        return float(way.own.sum()) / self._world + way.spread

    def _done(self, busy: np.ndarray, way: Way, ranks: Sequence[int]) -> float:
        """When the slowest of its ranks is done, and as a tie what it takes all."""
        return float((busy[list(ranks)] + way.own).max()) + way.spread + self._mean(way)

    def _place(self, way: Way, busy: np.ndarray, room: np.ndarray) -> tuple[int, ...]:
        """The least busy ranks that have room for its shards, each on another; none: ()."""
        count, kind = len(way.option.shards), way.option.sharding_type
        pin = self._constraints[way.option.name].ranks
        if pin and kind not in EVERYWHERE:
            return pin if len(pin) == count and (way.needs <= room[list(pin)]).all() else ()
        if kind in EVERYWHERE:
            return tuple(range(count)) if (way.needs <= room).all() else ()
        if kind in ("table_row_wise", "grid_shard", "table_column_wise"):
            return self._place_on_hosts(way, busy, room)
        order = np.argsort(busy, kind="stable")
        ranks = order[(way.needs.max(0) <= room[order]).all(1)][:count].tolist()
        return tuple(ranks) if len(ranks) == count else ()

    def _place_on_hosts(self, way: Way, busy: np.ndarray, room: np.ndarray) -> tuple[int, ...]:
        count, found = len(way.option.shards), []
        hosts = np.arange(self._world).reshape(-1, self._search.topology.local_world_size)
        size = min(count, hosts.shape[1])
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
