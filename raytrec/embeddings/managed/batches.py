"""Replace managed ids in batches with table rows.

The ids of all tables are sent to their owners in one exchange, and the rows are returned in another.
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
    """Exchange that looks up ids in the maps of all managed tables. All ranks must call the methods together.

    Args:
        tables: Number of rows (including fallback rows) and policy of each table, by name.
        seed: Seed of random draws.
        peers: Ranks that share the maps.
        device: Device of the maps.

    Attributes:
        maps: This rank's part of the map of each table.
    """

    def __init__(self, tables: Mapping[str, tuple[int, ManagedIds]], seed: int, peers: Peers, device: torch.device):
        rows, policies = zip(*tables.values(), strict=True)
        self._all, self._peers, self._device = RowMaps(rows, policies, seed, peers, device), peers, device
        self.maps = {table: RowMap(self._all, number) for number, table in enumerate(tables)}

    def train(self, ids: Mapping[str, torch.Tensor], step: int) -> tuple[dict[str, torch.Tensor], dict[str, NewRows]]:
        """Return the rows of this rank's ids of a global batch, after assigning rows to newly admitted ids.

        Args:
            ids: This rank's ids of the batch by table, int64 [n].
            step: Step of the run, from 0.

        Returns:
            The row of each id by table, int64 [n]; and by table, the rows newly assigned to ids of any rank.
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
        """Return the row of each id by table, int64 [n]; fallback rows for ids without a row.

        Args:
            ids: This rank's ids by table, int64 [n].
        """
        return self._find_rows(ids, self._all.look_up)

    def _find_rows(
        self, ids: Mapping[str, torch.Tensor], find_owned: Callable[[DistinctKeys], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the row of each of this rank's ids by table; fallback rows for ids without a row.

        Args:
            ids: This rank's ids by table.
            find_owned: Function that returns the rows, -1 for ids without a row, of the keys that all ranks request
                from this rank.
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
    """Mapper that replaces managed ids in batches with rows, and resets rows that are reassigned to other ids.

    The constructor and all methods except `reset_new_rows` are collectives. A pipeline fetches batches a
    few steps ahead, and their ids get rows at that time. A row must keep the previous id's values until all
    earlier steps have finished. The values are replaced when the model is called with the batch that
    reassigned the row.

    Args:
        model: Sharded model.
        live: Tables of the model with their optimizer state, by name.
        schema: Schema of the run; some of its tables have managed ids.
        seed: Seed of draws and of initial values.
        device: Device of this rank.

    Attributes:
        maps: This rank's part of the map of each managed table.
        steps: Number of steps whose ids have been mapped; a pipeline maps ids before earlier steps end.
        on_write: Function (table, rows) called before rows of a shard are written; the rows, int64 [n],
            are relative to the shard's first row.
        on_assign: Function called with the rows that a batch has assigned to ids on all ranks, by table.
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
        """Replace the ids of a batch with rows in place, assign rows to new ids, and return the batch.

        Args:
            batch: Batch of this rank.
            step: Step of the run, from 0.

        Raises:
            RunError: The ids of the batch have already been replaced with rows.
        """
        if batch.new_rows is not None:
            raise RunError("the ids of this batch have already been replaced by rows", where=f"step {step}")
        rows, new = self._exchange.train(self._collect_ids(batch.sparse), step)
        self.on_assign(new)
        self._synchronize()
        self.steps = step + 1
        batch.sparse, batch.new_rows = self._replace_ids(batch.sparse, rows), self._locate_new_rows(new)
        return batch

    def _locate_new_rows(self, new: dict[str, NewRows]) -> dict[str, NewRows]:
        """Return the new rows of each table that has any, with the indices of the new rows in each local shard.

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
        """Reset the rows of this rank's shards that a batch has assigned to other ids.

        Rows get the initial values of their new ids, block by block, and zero optimizer state.
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
        """Return a copy of the batch with rows in place of ids, without assigning rows."""
        rows = self._exchange.look_up(self._collect_ids(batch.sparse))
        self._synchronize()
        return replace(batch, sparse=self._replace_ids(batch.sparse, rows), new_rows={})

    def collect_figures(self) -> dict[str, dict[str, float]]:
        """Return each managed table's statistics over all ranks (docs/monitoring.md); counts since the last call."""
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
        """Return the ids of each managed table, concatenated feature by feature, on the maps' device."""
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
