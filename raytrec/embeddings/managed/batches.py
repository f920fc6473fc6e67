"""Replace managed ids in batches with table rows.

Each id is owned by one rank, which maps the id to a row. The ids of all tables are sent to their owners in one
exchange, and the rows are returned in another. Ids without a separate row share their table's fallback rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.common.collectives import Peers, RoundTrip, to_device_tensor
from raytrec.common.errors import RunError
from raytrec.config.schema import Schema
from raytrec.config.schema_parts import ManagedIds
from raytrec.data.batch import Batch, NewRows
from raytrec.embeddings.hashing import (
    VALUES_PER_BLOCK,
    DistinctKeys,
    compute_initial_values,
    count_by_owner,
    ids_to_keys,
    unhash_bits,
)
from raytrec.embeddings.managed.row_map import RowMap
from raytrec.embeddings.managed.row_maps import RowMaps
from raytrec.embeddings.pooling import replace_ids
from raytrec.embeddings.tables import Table


class IdExchange:
    """Exchange that looks up ids in the maps of all tables with managed ids. All ranks must call the methods together.

    Args:
        tables: Table → number of rows (including fallback rows) and policy of admission and eviction; at least one.
        seed: Seed of the draws that decide which of several equally frequent ids get rows.
        peers: Ranks that share the maps.
        device: Device of the maps.

    Attributes:
        maps: Table → this rank's part of the map.
    """

    def __init__(self, tables: Mapping[str, tuple[int, ManagedIds]], seed: int, peers: Peers, device: torch.device):
        rows, policies = zip(*tables.values(), strict=True)
        self._all, self._peers, self._device = RowMaps(rows, policies, seed, peers, device), peers, device
        self.maps = {table: RowMap(self._all, number) for number, table in enumerate(tables)}

    def train(self, ids: Mapping[str, torch.Tensor], step: int) -> tuple[dict[str, torch.Tensor], dict[str, NewRows]]:
        """Admit new ids of a global batch to the maps, and return the row of each of this rank's ids.

        Args:
            ids: Table → this rank's ids of the batch, int64 [n].
            step: Step of the run, from 0.

        Returns:
            Table → row of each id (a fallback row for ids without a row), int64 [n]; and table → rows newly assigned
            to ids of any rank, with these ids.
        """
        new_rows: dict[str, NewRows] = {}

        def assign(owned: DistinctKeys) -> torch.Tensor:
            rows, places, sizes_WT = self._all.train(step, owned)
            # Every rank gets all new rows, because a table's shards and its ids can be on different ranks.
            pairs = torch.stack([rows[places], unhash_bits(owned.keys[places])], 1)
            for table, pairs_of_table in zip(self.maps, self._peers.join(pairs, sizes_WT), strict=True):
                new_rows[table] = NewRows(*pairs_of_table.unbind(1))
            return rows

        return self._find_rows(ids, assign), new_rows

    def look_up(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return table → row of each id, int64 [n]; fallback rows for ids without a row. The maps do not change.

        Args:
            ids: Table → this rank's ids, int64 [n].
        """
        return self._find_rows(ids, self._all.look_up)

    def _find_rows(
        self, ids: Mapping[str, torch.Tensor], find_owned: Callable[[DistinctKeys], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return table → row of each of this rank's ids; fallback rows for ids without a row.

        Args:
            ids: Table → this rank's ids.
            find_owned: Function that returns the row of each requested key that this rank owns, or -1 for keys
                without a row.
        """
        keys, count = ids_to_keys(torch.cat([ids[table] for table in self.maps])), len(self.maps)
        lengths = [len(ids[table]) for table in self.maps]
        numbers, sizes = torch.arange(count, device=self._device), to_device_tensor(lengths, self._device)
        requested = DistinctKeys.from_keys(numbers.repeat_interleave(sizes, output_size=len(keys)), keys, count)
        if self._peers.world == 1:
            rows = find_owned(requested)
        else:
            sent_TW = count_by_owner(requested.tables, requested.keys, count, self._peers.world)
            trip = RoundTrip(torch.stack([requested.keys, requested.counts], 1), sent_TW, self._peers)
            keys, counts = trip.received.unbind(1)
            owned = DistinctKeys.from_keys(trip.tables, keys, count, counts)
            rows = trip.send_answers(find_owned(owned)[owned.places])
        gaps = (rows < 0).nonzero().squeeze(1)
        if len(gaps):
            rows = rows.index_copy(0, gaps, self._all.find_fallback_rows(requested.tables[gaps], requested.keys[gaps]))
        return dict(zip(self.maps, rows.index_select(0, requested.places).split(lengths), strict=True))


def _make_peers(device: torch.device) -> Peers:
    """Return all ranks as peers, with a separate process group on GPUs.

    NCCL executes the requests of one group in order. In the default group, the ids of the next batch would
    therefore wait for the gradients of this batch.
    """
    if device.type != "cuda" or not dist.is_initialized() or dist.get_world_size() == 1:
        return Peers()
    # The coordinator detects hangs. A shorter NCCL timeout would blame the rank that waits.
    return Peers(group=dist.new_group(backend="nccl", timeout=timedelta(days=1)))


class ManagedBatches:
    """Mapper that replaces managed ids in batches with rows, and resets rows that are assigned to new ids.

    The constructor and all methods except `reset_new_rows` are collectives. A pipeline fetches batches a
    few steps ahead, and their ids get rows at that time. A row must keep the previous id's values until all
    earlier steps have finished. The values are replaced when the model is called with the batch that
    reassigned the row.

    Args:
        model: Sharded model, to which the constructor adds a hook that calls `reset_new_rows`.
        live: Table name → table of the model with its optimizer state (`tables.tables`).
        schema: Schema of the run; some of its tables have managed ids.
        seed: Seed of initial values, and of draws among equally frequent new ids (run.seed).
        device: Device of this rank.

    Attributes:
        maps: Table with managed ids → this rank's part of the map.
        steps: Number of steps whose ids have been mapped; a pipeline maps ids before earlier steps end.
        on_write: Function (table name, rows) called before weights of a shard are written; the rows, int64 [n],
            are relative to the shard's first row.
        on_assign: Function called for each training batch with table → rows (NewRows) that the batch has assigned to
            ids of any rank.
    """

    def __init__(self, model: nn.Module, live: Mapping[str, Table], schema: Schema, seed: int, device: torch.device):
        self.on_write: Callable[[str, torch.Tensor], None] = lambda table, rows: None
        self.on_assign: Callable[[dict[str, NewRows]], None] = lambda new: None
        self._tables, self._schema, self._seed = live, schema, seed
        self._shards = {
            name: {shard.rows for part in (table.weight, *table.state.values()) for shard in part.local}
            for name, table in live.items()
        }
        model.register_forward_pre_hook(lambda _, inputs: self.reset_new_rows(inputs[0]))
        self._peers = peers = _make_peers(device)
        self._device, self.steps, self._previous_counts = device, 0, {}
        tables = {name: (table.rows, table.ids) for name, table in schema.tables.items() if table.ids}
        self._exchange = IdExchange(tables, seed, peers, device)
        self.maps = self._exchange.maps
        features = list(schema.sparse.values())
        self._keys = {
            table: [place for place, spec in enumerate(features) if spec.table == table] for table in self.maps
        }

    def map_and_admit_ids(self, batch: Batch, step: int) -> Batch:
        """Replace the managed ids of a batch with rows in place, assign rows to new ids, and return the batch.

        The rows assigned by all ranks are stored in batch.new_rows. `on_assign` is called, and `steps` is set.

        Args:
            batch: Batch of this rank.
            step: Step of the run, from 0.

        Raises:
            RunError: The ids of the batch have already been replaced with rows.
        """
        if batch.new_rows is not None:
            what, do = "the managed ids of the batch have already been replaced with rows", "map each batch only once"
            raise RunError(what, where=f"step {step}", do=do)
        rows, new = self._exchange.train(self._collect_ids(batch.sparse), step)
        self.on_assign(new)
        self._synchronize()
        self.steps = step + 1
        batch.sparse, batch.new_rows = self._replace_ids(batch.sparse, rows), self._locate_new_rows(new)
        return batch

    def _locate_new_rows(self, new: dict[str, NewRows]) -> dict[str, NewRows]:
        """Return table → new rows, with the indices of those in each local shard; omit tables without new rows.

        The host waits for the number of rows while a GPU is still busy with earlier steps. If the host waited
        when the model is called, the GPU would be idle.
        """
        new = {name: table_rows for name, table_rows in new.items() if len(table_rows.rows)}
        within = {
            (name, rows): (table_rows.rows >= rows.start) & (table_rows.rows < rows.stop)
            for name, table_rows in new.items()
            for rows in self._shards[name]
        }
        counts = torch.stack([mask.sum() for mask in within.values()]).tolist() if within else []
        places: dict[str, dict[range, torch.Tensor]] = {name: {} for name in new}
        for ((name, rows), mask), count in zip(within.items(), counts, strict=True):
            places[name][rows] = torch.nonzero_static(mask, size=count).squeeze(1)
        return {name: table_rows._replace(places=places[name]) for name, table_rows in new.items()}

    @torch.no_grad()
    def reset_new_rows(self, batch: Batch) -> None:
        """Reset the rows that a batch has assigned to new ids, in this rank's shards.

        Rows get the initial values of their new ids, block by block, and zero optimizer state. Nothing changes if
        `map_and_admit_ids` has not processed the batch.
        """
        for name, (rows, ids, places) in (batch.new_rows or {}).items():
            table, spec = self._tables[name], self._schema.tables[name]
            for shard in table.weight.local:
                for block in places[shard.rows].split(max(1, VALUES_PER_BLOCK // len(shard.columns))):
                    shard_rows = rows[block] - shard.rows.start
                    values = compute_initial_values(self._seed, name, ids[block], shard.columns, spec.rows)
                    self.on_write(name, shard_rows)
                    shard.write(shard_rows, values)
            for parts in table.state.values():
                for shard in parts.local:
                    shard_rows = rows[places[shard.rows]] - shard.rows.start
                    shard.write(shard_rows, shard.values.new_zeros(len(shard_rows), *shard.values.shape[1:]))

    def map_known_ids(self, batch: Batch) -> Batch:
        """Return a copy of the batch with rows in place of managed ids; ids without a row get fallback rows."""
        rows = self._exchange.look_up(self._collect_ids(batch.sparse))
        self._synchronize()
        return replace(batch, sparse=self._replace_ids(batch.sparse, rows), new_rows={})

    def collect_figures(self) -> dict[str, dict[str, float | None]]:
        """Return table → statistics of its managed ids over all ranks (docs/monitoring.md).

        The keys are occupancy (share of assignable rows with an id), admitted_ids, evicted_ids, fallback_share (share
        of lookups; None without lookups) and id_age (mean number of steps since the last sighting, from a sample; None
        without ids). Occupancy and age are current.
        The others cover the time since the last call (first call: since the start). This is a collective operation:
        every rank must call it.
        """
        sums = []
        for table, part in self.maps.items():
            ages, previous = part.sample_ages(self.steps), self._previous_counts.get(table, {})
            self._previous_counts[table] = current = {key: int(number) for key, number in part.counted.items()}
            counted = [number - previous.get(key, 0) for key, number in current.items()]
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

    def look_up_rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's ids in one table, int64 [n]; fallback rows for ids without a row."""
        requested = {name: ids[: len(ids) if name == table else 0].to(self._device) for name in self.maps}
        return self._exchange.look_up(requested)[table]

    def _collect_ids(self, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Return table → managed ids of all its features, concatenated in the schema's order, on the maps' device."""
        values = sparse.values().to(self._device, non_blocking=True)  # one copy from pinned memory
        parts = values.split(sparse.length_per_key())
        return {table: torch.cat([parts[place] for place in places]) for table, places in self._keys.items()}

    def _replace_ids(self, sparse: KeyedJaggedTensor, rows: dict[str, torch.Tensor]) -> KeyedJaggedTensor:
        sizes, values = sparse.length_per_key(), sparse.values()
        values_by_key = list(values.split(sizes))
        places = [place for table in rows for place in self._keys[table]]
        all_rows = torch.cat(list(rows.values())).to(values.device)  # one copy: the host waits for a GPU here
        for place, part in zip(places, all_rows.split([sizes[place] for place in places]), strict=True):
            values_by_key[place] = part
        joined = torch.empty_like(values, pin_memory=values.is_pinned())
        return replace_ids(sparse, torch.cat(values_by_key, out=joined), sparse.weights_or_none())

    def _synchronize(self) -> None:
        """Wait for the GPU: the pipeline changes the maps on one stream, and saving reads them on another."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
