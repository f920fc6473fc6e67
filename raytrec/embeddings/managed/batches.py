"""Batches with the ids of managed tables → the same with rows."""

from __future__ import annotations

from dataclasses import replace
from time import time

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.common.errors import RunError
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.embeddings.managed.exchange import IdExchange
from raytrec.embeddings.managed.peers import Peers
from raytrec.embeddings.managed.row_map import RowMap

COUNTED = "admitted", "evicted", "lookups", "fallback"  # of RowMap.counted


class ManagedBatches:
    """What becomes of batches before a model sees them. All ranks call its methods together.

    Args:
        schema: of the run; some of its tables have managed ids.
        seed: of draws.
        device: of this rank.

    Attributes:
        maps: managed table → this rank's part of its map.
    """

    def __init__(self, schema: Schema, seed: int, device: torch.device):
        self._peers = peers = Peers()
        self._device, self._steps, self._told = device, 0, {}
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
        """The batch itself, with rows in the place of ids: whoever remembers it has those, too.

        Args:
            step: of the run, from 0.
        """
        if batch.new_rows is not None:
            raise RunError("a batch whose ids have their rows already", where=f"step {step}")
        rows, new = self._exchange.train(self._ids(batch.sparse), step, time())
        self._settle()
        self._steps = step + 1
        batch.sparse, batch.new_rows = self._with_rows(batch.sparse, rows), new
        return batch

    def find(self, batch: Batch) -> Batch:
        """The batch with the rows that ids have; none gets one."""
        rows = self._exchange.look_up(self._ids(batch.sparse))
        self._settle()
        return replace(batch, sparse=self._with_rows(batch.sparse, rows), new_rows={})

    def figures(self) -> dict[str, dict[str, float]]:
        """Managed table → how its ids fare since the last call, on all ranks (docs/monitoring.md)."""
        sums = []
        for table, part in self.maps.items():
            ages, before = part.ages(self._steps), self._told.get(table, {})
            counted = [part.counted[key] - before.get(key, 0) for key in COUNTED]
            self._told[table] = dict(part.counted)
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
        of_keys = sparse.values().split(sparse.length_per_key())
        return {
            table: torch.cat([of_keys[place] for place in places]).to(self._device)
            for table, places in self._keys.items()
        }

    def _with_rows(self, sparse: KeyedJaggedTensor, rows: dict[str, torch.Tensor]) -> KeyedJaggedTensor:
        sizes = sparse.length_per_key()
        of_keys = list(sparse.values().split(sizes))
        for table, places in self._keys.items():
            parts = rows[table].to(sparse.values().device).split([sizes[place] for place in places])
            for place, part in zip(places, parts, strict=True):
                of_keys[place] = part
        return KeyedJaggedTensor(
            sparse.keys(),
            torch.cat(of_keys),
            sparse.weights_or_none(),
            lengths=sparse.lengths(),
            stride=sparse.stride(),
            length_per_key=sizes,
        )

    def _settle(self) -> None:
        """Waits for a GPU: a pipeline calls on one stream, what saves the maps looks at them on another."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
