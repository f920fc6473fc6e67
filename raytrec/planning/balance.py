"""Choose the sharding option and ranks of each table that minimize the predicted step time.

TorchRec's planner (1.8.0) adds up the estimated times of all work on a rank, shard by shard. Here, plans are
compared with `estimate_step_time`, which considers the slowest rank in lookups and the slowest rank in
exchanges. Several plans are built table by table, each with different sharding types. Tables on the slowest
ranks are then moved, swapped and split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from torchrec.distributed.planner.types import ShardingOption

from raytrec.planning.placement import TIE_BREAK_WEIGHT, PartialPlan, PlacementSpace, PlanChange, TableOption

SCORE_TOLERANCE = 0.005  # relative score difference below which plans are compared by their fullest rank's memory
MAX_SHARD_SHARES = (1.0, 0.5, 0.25, 0.0)  # maximum time of a shard as a share of a rank's mean time
# Maximum numbers of changes that are rated per slow rank, and in total per plan.
MAX_CHANGES_PER_RANK, MAX_CHANGES_PER_PLAN = 8, 400
NUM_SLOW_RANKS = 3  # number of slowest ranks that changes try to relieve


class DoesNotFitError(Exception):
    """Error for a table, or a group of tables, that does not fit into the remaining space. The message names them."""


class PlanBalancer:
    """Heuristic search for the plan with the lowest score (PartialPlan.score) on identical ranks.

    Tables with configured ranks stay on these ranks. The tables of a plan.colocate group stay together on one rank.

    Args:
        space: Sharding options of the tables.
    """

    def __init__(self, space: PlacementSpace):
        self._space = space
        groups: dict[int, list[str]] = {}
        for name in self._space.table_options:
            if (group := self._space.constraints[name].group) is not None:
                groups.setdefault(group, []).append(name)
        self._groups = sorted(
            groups.values(), key=lambda names: -sum(self._get_share(self._space.table_options[name]) for name in names)
        )

    def choose(self) -> list[ShardingOption]:
        """Return one sharding option per table, whose shards have the ranks of the chosen plan.

        Among plans whose scores are within SCORE_TOLERANCE of the lowest, the plan whose fullest rank uses the smallest
        share of its memory for tables, rounded to a tenth, is chosen. Ties are resolved by score.

        Raises:
            DoesNotFitError: No plan that fits into the memory of the ranks was found.
        """
        plans, refusal = [], DoesNotFitError("")
        for kinds, largest in self._iterate_starts():
            try:
                plans.append(self._build(kinds, largest))
            except DoesNotFitError as error:
                refusal = error
        if not plans:
            raise refusal
        refined = [self._refine(plan) for plan in plans]
        score_limit = (1 + SCORE_TOLERANCE) * min(plan.score for plan in refined)
        close = [plan for plan in refined if plan.score <= score_limit]
        best = min(close, key=lambda plan: (round(float(self._space.get_used_shares(plan.room).max()), 1), plan.score))
        options = []
        for name in self._space.table_options:
            way, ranks = best.of[name]
            for shard, rank in zip(way.option.shards, ranks, strict=True):
                shard.rank = rank
            options.append(way.option)
        return options

    def _iterate_starts(self) -> Iterator[tuple[set[str], float | None]]:
        """Yield (kinds, largest), the arguments of `_build`.

        All sharding types are tried with each of MAX_SHARD_SHARES, then single types (if several), then all by memory.
        """
        kinds = {way.option.sharding_type for ways in self._space.table_options.values() for way in ways}
        yield from ((kinds, largest) for largest in MAX_SHARD_SHARES)
        if len(kinds) > 1:
            yield from (({kind}, MAX_SHARD_SHARES[-1]) for kind in sorted(kinds))
        yield kinds, None

    def _build(self, kinds: set[str], largest: float | None) -> PartialPlan:
        """Build a plan table by table: pinned tables, then groups, then other tables, the largest first.

        Args:
            kinds: Sharding types to use for tables that support one of them and are neither pinned nor in a group.
            largest: Maximum time of a shard, as a share of the mean time that all tables outside groups take on a rank.
                Of the options whose shards take at most this time, the option with the lowest mean time is chosen. If
                there are none, the option whose slowest rank finishes first is chosen. None: minimize the used memory
                share of the fullest rank.

        Raises:
            DoesNotFitError: A table or group does not fit into the memory left by tables placed earlier.
        """
        plan = self._space.empty()
        constraints = self._space.constraints
        free = {name: ways for name, ways in self._space.table_options.items() if constraints[name].group is None}
        seconds = {name: min(map(self._space.mean, ways)) for name, ways in free.items()}
        total_s = max(1e-12, sum(seconds.values()))
        weight = {name: self._get_share(ways) for name, ways in free.items()}
        if largest is not None:
            weight = {name: max(seconds[name] / total_s, part) for name, part in weight.items()}
        order = sorted(free, key=lambda name: (not constraints[name].ranks, -weight[name], name))
        pinned = [name for name in order if constraints[name].ranks]
        for name in pinned:
            self._add(plan, name, self._space.table_options[name], largest, total_s)
        for group in self._groups:
            self._add_group(plan, group)
        for name in order[len(pinned) :]:
            ways = [way for way in free[name] if way.option.sharding_type in kinds] or free[name]
            self._add(plan, name, ways, largest, total_s)
        return self._space.rate(plan)

    def _get_share(self, ways: Sequence[TableOption]) -> float:
        """Return the share of all ranks' memory, in the fullest tier, that a table's smallest sharding option needs."""
        least = min((way.needs.sum(0) for way in ways), key=sum)
        return float((least / np.maximum(1.0, self._space.room.sum(0))).max())

    def _add(
        self, plan: PartialPlan, name: str, ways: Sequence[TableOption], largest: float | None, total_s: float
    ) -> None:
        """Add one table to a plan as described in `_build`; raise DoesNotFitError if no option in `ways` fits."""
        busy = plan.busy if largest is not None else self._space.get_used_shares(plan.room)
        places = [(way, ranks) for way in ways if (ranks := self._space.place(way, busy, plan.room))]
        if not places:
            pin = self._space.constraints[name].ranks
            where = f"rank{'s' if len(pin) > 1 else ''} {', '.join(map(str, pin))}" if pin else "the ranks"
            raise DoesNotFitError(f"table {name} does not fit into the remaining space of {where}")
        small = [place for place in places if place[0].shard_seconds.max() <= (largest or 0) * total_s]
        if largest is None:
            chosen = min(places, key=lambda place: self._get_fullest_share(plan.room, *place))
        elif small:
            chosen = min(small, key=lambda place: self._space.mean(place[0]))
        else:
            chosen = min(places, key=lambda place: self._estimate_finish_s(plan.busy, *place))
        self._space.put(plan, *chosen)

    def _add_group(self, plan: PartialPlan, group: Sequence[str]) -> None:
        """Add a group to its configured rank or to the least busy rank with room; raise DoesNotFitError if none has."""
        pin = self._space.constraints[group[0]].ranks
        for rank in pin or np.argsort(plan.busy, kind="stable").tolist():
            free_bytes, chosen = plan.room[rank].copy(), []
            for name in group:
                fits = [way for way in self._space.table_options[name] if (way.needs[0] <= free_bytes).all()]
                if not fits:
                    break
                chosen.append(min(fits, key=self._space.mean))
                free_bytes -= chosen[-1].needs[0]
            if len(chosen) == len(group):
                for way in chosen:
                    self._space.put(plan, way, [rank])
                return
        where = f"rank {pin[0]}" if pin else "any rank"
        names = f"tables {', '.join(group)} do not fit together" if len(group) > 1 else f"table {group[0]} does not fit"
        raise DoesNotFitError(f"{names} into the remaining space of {where}")

    def _get_fullest_share(self, room: np.ndarray, way: TableOption, ranks: Sequence[int]) -> tuple[float, float]:
        """Return (used memory share of the fullest of `ranks` after adding a table, mean seconds of the table)."""
        free_bytes = room[list(ranks)] - way.needs
        return float(self._space.get_used_shares(free_bytes, list(ranks)).max()), self._space.mean(way)

    def _estimate_finish_s(self, busy: np.ndarray, way: TableOption, ranks: Sequence[int]) -> float:
        """Return the seconds after which the slowest of a table's ranks finishes, plus the table's mean seconds."""
        return float((busy[list(ranks)] + way.shard_seconds).max()) + way.rank_seconds + self._space.mean(way)

    def _refine(self, plan: PartialPlan) -> PartialPlan:
        """Change a plan in place to relieve its slowest ranks while this improves the score, and return the plan.

        No further round of changes begins after MAX_CHANGES_PER_PLAN changes have been tried.
        """
        remaining_changes = MAX_CHANGES_PER_PLAN
        while remaining_changes > 0:
            changes = (
                change
                for slow in np.argsort(-plan.busy, kind="stable").tolist()[:NUM_SLOW_RANKS]
                for _, change in sorted(self._changes(plan, slow), key=lambda pair: pair[0])[:MAX_CHANGES_PER_RANK]
            )
            for change in changes:
                remaining_changes -= 1
                if self._try(plan, change):
                    break
            else:
                break
        return plan

    def _try(self, plan: PartialPlan, change: PlanChange) -> bool:
        """Apply a change if it improves the plan, and return True if it was applied."""
        previous_score, busy = plan.score, plan.busy.copy()
        removed = [self._space.take(plan, way.option.name) for way, _ in change]
        for way, ranks in change:
            self._space.put(plan, way, ranks)
        if (plan.room >= 0).all() and self._space.rate(plan).score < previous_score * (1 - 1e-4):
            return True
        for way, _ in change:
            self._space.take(plan, way.option.name)
        for way, ranks in removed:
            self._space.put(plan, way, ranks)
        plan.busy, plan.score = busy, previous_score
        return False

    def _changes(self, plan: PartialPlan, slow: int) -> Iterator[tuple[float, PlanChange]]:
        """Yield (approximate seconds of the slowest rank after a change, change) for changes that relieve rank `slow`.

        A change moves a table to other ranks, gives a table another sharding option, or swaps two whole tables
        between the rank `slow` and a less busy rank. Tables with configured ranks or in a group are not changed.
        """
        free = {name for name, each in self._space.constraints.items() if each.group is None and each.ranks is None}
        movable = {name: placement for name, placement in plan.of.items() if name in free}
        on_slow = {name: placement for name, placement in movable.items() if slow in placement[1]}
        for name, (current, ranks) in on_slow.items():
            busy, room = plan.busy - current.rank_seconds, plan.room.copy()
            busy[list(ranks)] -= current.shard_seconds
            room[list(ranks)] += current.needs
            for way in self._space.table_options[name]:
                new_ranks = self._space.place(way, busy, room)
                if new_ranks and (way.option is not current.option or set(new_ranks) != set(ranks)):
                    new_busy = busy + way.rank_seconds
                    new_busy[list(new_ranks)] += way.shard_seconds
                    yield float(new_busy.max() + TIE_BREAK_WEIGHT * new_busy.mean()), [(way, new_ranks)]
        for rank in np.argsort(plan.busy, kind="stable").tolist()[:NUM_SLOW_RANKS]:
            other_ways = [way for way, ranks in movable.values() if ranks == (rank,) != (slow,)]
            for other_way, (slow_way, ranks) in product(other_ways, on_slow.values()):
                gain = float(slow_way.shard_seconds[0] - other_way.shard_seconds[0])
                if len(ranks) == 1 and gain > 0:
                    slowest = max(plan.busy[slow] - gain, plan.busy[rank] + gain)
                    yield float(slowest), [(slow_way, (rank,)), (other_way, (slow,))]
