"""Batches with rows in the place of managed ids. It takes one exchange of ids with their owners, and one of
rows back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.common.collectives import Peers, RoundTrip, regrouped
from raytrec.common.errors import RunError
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch, NewRows
from raytrec.embeddings.hashing import count_by_owner, first_keys, keys_of, unhash_bits
from raytrec.embeddings.managed.row_map import RowMap

COUNTED = "admitted", "evicted", "lookups", "fallback"  # of RowMap.counted


@dataclass(frozen=True)
class Distinct:
    """Keys without repetitions.

    Attributes:
        keys: int64 [n], ascending. counts: int64 [n], occurrences of each.
        places: int64 [N], which of them each key was that this was made of.
    """

    keys: torch.Tensor
    counts: torch.Tensor
    places: torch.Tensor


class IdExchange:
    """The maps of all managed tables. All ranks call its methods together.

    Args:
        maps: table → this rank's part of its map.
    """

    def __init__(self, maps: Mapping[str, RowMap], peers: Peers, device: torch.device):
        self.maps, self._peers, self._device = dict(maps), peers, device
        self._first_keys = first_keys(peers.world, device)

    def train(
        self, ids: Mapping[str, torch.Tensor], step: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, NewRows]]:
        """The rows of the ids of a global batch, some of which get one by it.

        Args:
            ids: table → int64 [n], this rank's ids of the batch.
            step: of the run, from 0.

        Returns:
            (table → int64 [n], the row of each id; table → rows that ids have got, on all ranks).
        """
        maps = list(self.maps.values())
        asked, trip, owned = self._ask(ids)
        seen = [m.sight(step, d.keys, d.counts) for m, d in zip(maps, owned, strict=True)]
        sizes = [[len(s.wanted) for s in seen], [m.waiting for m in maps]]
        of_ranks = zip(*self._peers.stack(torch.tensor(sizes, device=self._device)).tolist(), strict=True)
        wanted, waiting = (list(zip(*of, strict=True)) for of in of_ranks)
        rows, new, sizes_TW = [], [], list[Sequence[int]]()
        for number, (of_table, its_keys) in enumerate(zip(maps, seen, strict=True)):
            its_rows, places, admitted = of_table.admit(its_keys, wanted[number], sum(waiting[number]))
            new.append(torch.stack([its_rows[places], unhash_bits(its_keys.keys[places])], 1))
            rows.append(its_rows)
            sizes_TW.append(admitted)
        return self._answer(asked, trip, owned, rows), self._tell(new, sizes_TW)

    def look_up(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """table → int64 [n], the row of each id; none gets one by it.

        Args:
            ids: table → int64 [n], on each rank its own.
        """
        asked, trip, owned = self._ask(ids)
        rows = [m.look_up(d.keys) for m, d in zip(self.maps.values(), owned, strict=True)]
        return self._answer(asked, trip, owned, rows)

    def _ask(
        self, ids: Mapping[str, torch.Tensor]
    ) -> tuple[list[Distinct], RoundTrip | None, list[Distinct]]:
        """What this rank asks for of each table, its way there, and what it is asked for by all of them; a
        single rank asks itself."""
        asked = [_distinct(keys_of(ids[table])) for table in self.maps]
        if self._peers.world == 1:
            return asked, None, asked
        sizes = [count_by_owner(d.keys, self._first_keys) for d in asked]
        trip = RoundTrip([torch.stack([d.keys, d.counts], 1) for d in asked], sizes, self._peers)
        return asked, trip, [_merged(pairs) for pairs in trip.received]

    def _answer(
        self, asked: list[Distinct], trip: RoundTrip | None, owned: list[Distinct], rows: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The rows of what has been asked for.

        Args:
            rows: of each table, those of `owned.keys`; -1 where a key has none.
        """
        if trip:
            rows = trip.back([r[d.places] for r, d in zip(rows, owned, strict=True)])
        out = {}
        for (table, of_table), mine, its_rows in zip(self.maps.items(), asked, rows, strict=True):
            without = (its_rows < 0).nonzero().squeeze(1)
            if len(without):
                its_rows = its_rows.index_copy(0, without, of_table.fallback(mine.keys[without]))
            out[table] = its_rows.index_select(0, mine.places)
        return out

    def _tell(self, new: list[torch.Tensor], sizes_TW: Sequence[Sequence[int]]) -> dict[str, NewRows]:
        """All ranks' new rows on every rank: the shards of a table are not where its ids are.

        Args:
            new: of each table (row, id) of this rank [n, 2].
            sizes_TW: of each table, each rank's n.
        """
        of_ranks = [sum(sizes) for sizes in zip(*sizes_TW, strict=True)]
        if not any(of_ranks):
            return {table: NewRows(*pairs.unbind(1)) for table, pairs in zip(self.maps, new, strict=True)}
        everything = self._peers.concatenate(torch.cat(new), of_ranks)
        by_table = regrouped(torch.tensor(sizes_TW, device=self._device).T, sum(of_ranks))
        parts = everything[by_table].split([sum(sizes) for sizes in sizes_TW])
        return {table: NewRows(*pairs.unbind(1)) for table, pairs in zip(self.maps, parts, strict=True)}


def _distinct(keys: torch.Tensor) -> Distinct:
    distinct, places, counts = torch.unique(keys, return_inverse=True, return_counts=True)
    return Distinct(distinct, counts, places)


def _merged(pairs: torch.Tensor) -> Distinct:
    """Of (key, count) [N, 2], with the counts of equal keys added up."""
    keys, places = torch.unique(pairs[:, 0], return_inverse=True)
    counts = torch.zeros_like(keys).index_add_(0, places, pairs[:, 1])
    return Distinct(keys, counts, places)


def _peers(device: torch.device) -> Peers:
    """All ranks; on GPUs in a separate group. NCCL does what one group is asked for in its order, so ids of
    the next batch would wait for the gradients of this one."""
    if device.type != "cuda" or not dist.is_initialized() or dist.get_world_size() == 1:
        return Peers()
    # Of hangs the coordinator learns; an early end of NCCL's time would name the rank that waits.
    return Peers(group=dist.new_group(backend="nccl", timeout=timedelta(days=1)))


class ManagedBatches:
    """Maps the ids of batches to rows before a model gets them. All methods are collectives.

    Args:
        schema: of the run; some of its tables have managed ids.
        seed: of draws.
        device: of this rank.

    Attributes:
        maps: managed table → this rank's part of its map.
        steps: of the run, whose ids have been mapped: a pipeline may be ahead of what has been trained.
    """

    def __init__(self, schema: Schema, seed: int, device: torch.device):
        self._peers = peers = _peers(device)
        self._device, self.steps, self._told = device, 0, {}
        self.maps = {
            name: RowMap(table.rows, table.ids, seed, peers, device)
            for name, table in schema.tables.items()
            if table.ids
        }
        self._exchange = IdExchange(self.maps, peers, device)
        features = list(schema.sparse.values())
        self._keys = {
            table: [place for place, spec in enumerate(features) if spec.table == table]
            for table in self.maps
        }

    def assign(self, batch: Batch, step: int) -> Batch:
        """The batch itself, changed: with rows in the place of ids.

        Args:
            step: of the run, from 0.
        """
        if batch.new_rows is not None:
            raise RunError("a batch whose ids have their rows already", where=f"step {step}")
        rows, new = self._exchange.train(self._ids(batch.sparse), step)
        self._settle()
        self.steps = step + 1
        batch.sparse, batch.new_rows = self._with_rows(batch.sparse, rows), new
        return batch

    def find(self, batch: Batch) -> Batch:
        """The batch with the rows that ids have; none gets one."""
        rows = self._exchange.look_up(self._ids(batch.sparse))
        self._settle()
        return replace(batch, sparse=self._with_rows(batch.sparse, rows), new_rows={})

    def figures(self) -> dict[str, dict[str, float]]:
        """Managed table → figures of its ids since the last call, over all ranks (docs/monitoring.md)."""
        sums = []
        for table, part in self.maps.items():
            ages, before = part.ages(self.steps), self._told.get(table, {})
            self._told[table] = now = {key: int(part.counted[key]) for key in COUNTED}
            counted = [now[key] - before.get(key, 0) for key in COUNTED]
            sums.append([len(part), len(ages), int(ages.sum()), *counted])
        out = {}
        totals = self._peers.sum(torch.tensor(sums, device=self._device)).tolist()
        for (table, part), numbers in zip(self.maps.items(), totals, strict=True):
            ids, aged, age, admitted, evicted, lookups, fallback = numbers
            out[table] = {
                "occupancy": ids / part.capacity,
                "admitted_ids": admitted,
                "evicted_ids": evicted,
                "fallback_share": fallback / lookups if lookups else None,
                "id_age": age / aged if aged else None,
            }
        return out

    def rows_of(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids of one table, int64 [n]; of the fallback where they have none.

        Args:
            ids: int64 [n], on each rank its own.
        """
        asked = {name: ids[: len(ids) if name == table else 0].to(self._device) for name in self.maps}
        return self._exchange.look_up(asked)[table]

    def _ids(self, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Managed table → the ids of its features, one feature after the other, on the maps' device."""
        values = sparse.values().to(self._device, non_blocking=True)  # all, from pinned memory
        of_keys = values.split(sparse.length_per_key())
        return {
            table: torch.cat([of_keys[place] for place in places]) for table, places in self._keys.items()
        }

    def _with_rows(self, sparse: KeyedJaggedTensor, rows: dict[str, torch.Tensor]) -> KeyedJaggedTensor:
        sizes, values = sparse.length_per_key(), sparse.values()
        of_keys = list(values.split(sizes))
        places = [place for table in rows for place in self._keys[table]]
        found = torch.cat(list(rows.values())).to(values.device)  # at once: the host waits for a GPU here
        for place, part in zip(places, found.split([sizes[place] for place in places]), strict=True):
            of_keys[place] = part
        joined = torch.empty_like(values, pin_memory=values.is_pinned())
        return KeyedJaggedTensor(
            sparse.keys(),
            torch.cat(of_keys, out=joined),
            sparse.weights_or_none(),
            lengths=sparse.lengths(),
            stride=sparse.stride(),
            length_per_key=sizes,
        )

    def _settle(self) -> None:
        """Waits for a GPU: a pipeline calls on one stream, what saves the maps looks at them on another."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
