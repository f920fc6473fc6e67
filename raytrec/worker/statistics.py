"""Figures of a rank's shards: load, use, norms. Computed in place, from samples.

Counts are of every step. Norms of rows are of a strided sample of rows, another one each time. Figures
of ids and updates are of one probed step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.checks.live.outcome import read
from raytrec.compat.fbgemm import cache_hits
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import MMAP_KERNEL
from raytrec.embeddings.tables import Parts, Shard, Table
from raytrec.embeddings.taps import Lookup, Part, Taps, add_row_gradients

SAMPLE = 1024  # rows of a shard, or up to twice as many
NORM_EDGES = (-4.0, 2.0, 30)  # bins of row norms: from 1e-4 to 1e2, on a logarithmic scale


@dataclass
class Probed:
    """Some of the distinct rows of a table that a rank looked up in one step, before their update.

    Attributes:
        lookup: where they were looked up.
        ids: int64 [n], rows of the shard.
        distinct, lookups: rows and ids in all.
        before: float [n, columns], their weights before the step.
        keys: the table's places in the lookup.
    """

    lookup: Lookup
    ids: torch.Tensor
    distinct: int
    lookups: int
    before: torch.Tensor
    keys: list[int]


class Statistics:
    """Figures of each table of which this rank has a shard.

    Args:
        tables: embeddings.tables.tables(model, optimizer).
        taps: on the same model.
        of_ids: what ManagedBatches.figures gives; a collective.

    `watch` goes before a step that is probed, `collect` after it.
    """

    def __init__(
        self,
        schema: Schema,
        tables: dict[str, Table],
        taps: Taps,
        of_ids: Callable[[], dict[str, dict[str, Any]]] = dict,
    ):
        self._schema, self._taps, self._of_ids, self._turn = schema, taps, of_ids, 0
        self._tables = {name: table for name, table in tables.items() if _shard(table.weight)}
        self._counted = {id(lookup): lookup.received.clone() for lookup in taps.lookups}
        self._changed = torch.zeros(2, len(schema.sparse), dtype=torch.int64)
        self._features: dict[str, list[int]] = {name: [] for name in schema.tables}
        for number, spec in enumerate(schema.sparse.values()):
            self._features[spec.table].append(number)
        self._seen: dict[str, torch.Tensor] = {}
        self._probed: dict[str, Probed] = {}
        self._parts: dict[int, list[Part]] = {}  # of each lookup of the probed step
        for lookup in taps.lookups:
            lookup.kernel.register_forward_hook(self._before_update(lookup))

    def add(self, changed: torch.Tensor | None) -> None:
        """Counts a batch's ids that were brought into range (Batch.changed)."""
        if changed is not None:
            self._changed += changed

    @torch.no_grad()
    def collect(self) -> dict[str, dict[str, Any]]:
        """Figures of each table since the last call (see docs/monitoring.md); ends the probe."""
        (lookups, hits), ids = self._traffic(), self._of_ids()
        probed = {id(p.lookup): p.lookup for p in self._probed.values()}
        self._parts = {i: lookup.gradients() for i, lookup in probed.items()}
        figures = {
            name: self._of(table, lookups.get(name, 0)) | hits.get(name, {}) | ids.get(name, {})
            for name, table in self._tables.items()
        }
        self._turn += 1
        self._probed.clear()
        self._parts.clear()
        self._changed.zero_()
        return _plain(figures)

    def _traffic(self) -> tuple[dict[str, int], dict[str, dict[str, float]]]:
        """Return, by table, the ids looked up by this rank since the last call, and the cache's hit rate."""
        total: dict[str, int] = {}
        hits: dict[str, dict[str, float]] = {}
        for lookup in self._taps.lookups:
            now = lookup.received.clone()
            for table, ids in zip(lookup.tables, (now - self._counted[id(lookup)]).tolist(), strict=True):
                total[table] = total.get(table, 0) + ids
            self._counted[id(lookup)] = now
            if (share := cache_hits(lookup.kernel)) is not None:
                hits |= {table: {"cache_hit_rate": share} for table in lookup.tables}
        return total, hits

    def _of(self, table: Table, lookups: int) -> dict[str, Any]:
        shard, probed = _shard(table.weight), self._probed.get(table.name)
        rows, columns = shard.values.shape
        read_ids, changed_share = self._read(table.name)
        state = {kind: s for kind, parts in table.state.items() if (s := _shard(parts))}
        device = f"host, by {table.kernel}" if "uvm" in table.kernel else str(shard.values.device)
        figures = {
            "rows": rows,
            "columns": columns,
            "replicated": table.weight.replicated,
            "weight_bytes": shard.values.nbytes,
            "state_bytes": sum(part.values.nbytes for part in state.values()),
            "device": "disk" if table.kernel == MMAP_KERNEL else device,
            "lookups": lookups,
            "lookup_bytes": lookups * columns * shard.values.element_size(),
            "read_ids": read_ids,
            "changed_share": changed_share,
            **self._norms(shard, state, table),
        }
        if probed:
            now = shard.read(probed.ids).float()
            figures |= {
                "touched_rows": probed.distinct,
                "unique_ratio": probed.distinct / max(1, probed.lookups),
                "gradient_norm": self._gradient_norm(table, probed),
                "update_norm": _scaled(now - probed.before, probed),
                "max_abs": torch.maximum(figures["max_abs"], _largest(now)),
            }
        return figures

    def _norms(self, shard: Shard, state: dict, table: Table) -> dict[str, Any]:
        """Figures of a sample of rows."""
        rows = shard.values.shape[0]
        if not rows:
            return {"max_abs": torch.zeros((), device=shard.values.device)}
        stride = max(1, rows // SAMPLE)
        # A prime, so that neighbouring rows are not sampled one after the other.
        sample = slice(self._turn * 7919 % stride, None, stride)
        weights = shard.read(sample).float()
        norms = torch.linalg.vector_norm(weights, dim=1)
        quantiles = torch.quantile(norms, norms.new_tensor([0.05, 0.5, 0.95]))
        figures = {
            "row_norm_p05": quantiles[0],
            "row_norm_p50": quantiles[1],
            "row_norm_p95": quantiles[2],
            "row_norm_max": norms.max(),
            "row_norm_counts": _counts(norms),
            "max_abs": _largest(weights),
            "weight_norm": (norms.square().mean() * rows).sqrt(),
        }
        if (kind := _second_moment(table)) in state:
            kept = state[kind].read(sample).reshape(len(norms), -1)
            figures["dead_share"] = (kept == 0).all(1).float().mean()
            figures["state_norm"] = (kept.square().sum(1).mean() * rows).sqrt()
        elif (seen := self._seen.get(table.name)) is not None:
            figures["dead_share"] = 1 - seen.float().mean()
        hashed = self._schema.tables[table.name].out_of_range == "hash" and self._read(table.name)[1] == 1.0
        if hashed and "dead_share" in figures:
            figures["collision_rate"] = collisions(figures["dead_share"])
        return figures

    def _gradient_norm(self, table: Table, probed: Probed) -> torch.Tensor | None:
        """Of the table's shard: from what its lookup was handed back, or, for a data-parallel table, from its
        gradient over all ranks."""
        if probed.lookup.replicated:
            gradient = None if table.parameter is None else table.parameter.grad
            return None if gradient is None else torch.linalg.vector_norm(gradient.float())
        if probed.lookup.gradient is None:
            return None
        gradients, parts = torch.zeros_like(probed.before), self._parts[id(probed.lookup)]
        for number in probed.keys:
            _, key, of_bags = parts[number]
            add_row_gradients(gradients, probed.ids, key, of_bags)
        return _scaled(gradients, probed)

    def _before_update(self, lookup: Lookup) -> Any:
        """A hook that keeps what a probed step's update will change."""
        keys_of_table = {
            name: [i for i, owner in enumerate(lookup.tables) if owner == name] for name in lookup.tables
        }
        without_state = [name for name in keys_of_table if _second_moment(self._tables[name]) is None]

        def after(kernel: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            if not (kernel.training and torch.is_grad_enabled()):
                return
            for name in without_state:
                self._mark(name, inputs[0], keys_of_table[name])
            if self._taps.probing:
                for name, keys in keys_of_table.items():
                    self._probe(name, lookup, inputs[0], keys)

        return after

    def _mark(self, name: str, features: KeyedJaggedTensor, keys: list[int]) -> None:
        """Notes rows that are looked up, where no optimizer state shows it."""
        values = _shard(self._tables[name].weight).values
        seen = self._seen.get(name)
        if seen is None:
            seen = self._seen[name] = torch.zeros(len(values), dtype=torch.bool, device=values.device)
        for key in keys:
            seen[_ids(features, key)] = True

    def _probe(self, name: str, lookup: Lookup, features: KeyedJaggedTensor, keys: list[int]) -> None:
        shard = _shard(self._tables[name].weight)
        ids = torch.cat([_ids(features, key) for key in keys])
        rows = ids.unique()
        some = rows[:: max(1, len(rows) // SAMPLE)].contiguous()  # rows are searched for in it
        before = shard.read(some).detach().float()
        self._probed[name] = Probed(lookup, some, len(rows), len(ids), before, keys)

    def _read(self, table: str) -> tuple[int, float | None]:
        """Ids of a table that this rank has read since the last `collect`, and the share of changed ones."""
        changed, ids = self._changed[:, self._features[table]].sum(1).tolist()
        return ids, changed / ids if ids else None


def collisions(dead_share: torch.Tensor) -> torch.Tensor:
    """The share of distinct ids whose row had another id before them, where all ids are hashed into rows.

    Of n ids hashed into R rows, R·exp(−n/R) rows stay empty. So with the share d of rows without an id,
    n = −R·ln d, and R·(1 − d) ids are the first of their row: 1 − (1 − d) ÷ −ln d of them are not.
    """
    load = -dead_share.double().clamp(1e-9, 1 - 1e-9).log()
    return 1 - (1 - dead_share.double()) / load


def _scaled(rows: torch.Tensor, probed: Probed) -> torch.Tensor:
    """The L2 norm over all touched rows, from some of them."""
    share = probed.distinct / max(1, len(probed.ids))
    return (rows.square().sum() * share).sqrt()


def _counts(norms: torch.Tensor) -> torch.Tensor:
    """Norms in the bins of NORM_EDGES, the last one with its upper edge: int64 [bins].

    Not torch.histc, which torch.use_deterministic_algorithms refuses on CUDA.
    """
    low, high, bins = NORM_EDGES
    values = norms.clamp_min(1e-30).log10().clamp(low, high)
    bin_N1 = ((values - low) * bins / (high - low)).long().clamp(max=bins - 1).unsqueeze(1)
    return (bin_N1 == torch.arange(bins, device=norms.device)).sum(0)


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.float().abs().max() if values.numel() else torch.zeros((), device=values.device)


def _second_moment(table: Table) -> str | None:
    """The kind of its state that is 0 until a row's first gradient."""
    kind = table.optimizer.second_moment if table.optimizer else None
    return kind if kind in table.state else None


def _shard(parts: Parts) -> Shard | None:
    """A rank has one shard of a table at most (planning/plan.py)."""
    return parts.local[0] if parts.local else None


def _ids(features: KeyedJaggedTensor, key: int) -> torch.Tensor:
    ends = features.offset_per_key()
    return features.values()[ends[key] : ends[key + 1]]


def _plain(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tensors as numbers, with one copy from the device."""
    tensors = [v for figures in found.values() for v in figures.values() if isinstance(v, torch.Tensor)]
    numbers = iter(read([tensor.double() for tensor in tensors]))

    def plain(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        of_it = next(numbers)
        if value.dim():  # of a histogram
            return [int(number) for number in of_it]
        return of_it[0] if isfinite(of_it[0]) else None  # as JSON has it

    return {name: {key: plain(v) for key, v in figures.items()} for name, figures in found.items()}
