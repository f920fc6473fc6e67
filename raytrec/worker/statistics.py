"""Compute statistics of a rank's shards (load, use and norms) from samples, on the shards' device.

Counts cover every step. Norms are computed from a strided sample of rows, which differs each time. Statistics of
distinct ids and updates refer to one probed step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from raytrec.checks.live.outcome import read_flat_values
from raytrec.compat.fbgemm import measure_cache_hits
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import MMAP_KERNEL
from raytrec.embeddings.tables import Shard, ShardedValues, Table
from raytrec.embeddings.taps import Lookup, Part, Taps, add_row_gradients, collect_table_ids

MIN_SAMPLED_ROWS = 1024  # rows in the sample of a shard; a sample may have up to twice as many
NORM_EDGES = (-4.0, 2.0, 30)  # log10 of the first and last edge (1e-4 and 1e2), and number of bins


@dataclass
class ProbedRows:
    """Sample of the distinct rows of a table that a rank looked up in one step, before their update.

    Attributes:
        lookup: Lookup that read the rows.
        ids: Indices of the sampled rows in the shard, int64 [n].
        distinct: Number of distinct rows looked up.
        lookups: Number of ids looked up.
        before: Weights of the sampled rows before the step, float32 [n, columns].
    """

    lookup: Lookup
    ids: torch.Tensor
    distinct: int
    lookups: int
    before: torch.Tensor


class Statistics:
    """Collector of statistics for each table of which this rank has a shard.

    Taps are hooks on the model's lookups, which can record the ids and gradients of a step. A probed step is a step
    in which the taps record. Enable the taps before this step, and call `collect` after it.

    Args:
        schema: Schema of the data.
        tables: Tables as returned by embeddings.tables.tables(model, optimizer).
        taps: Taps on the same model.
        of_ids: Function that returns statistics of managed ids, such as ManagedBatches.collect_figures, a collective
            operation; default: no such statistics.
    """

    def __init__(
        self,
        schema: Schema,
        tables: dict[str, Table],
        taps: Taps,
        of_ids: Callable[[], dict[str, dict[str, Any]]] = dict,
    ):
        self._schema, self._taps, self._of_ids, self._turn = schema, taps, of_ids, 0
        self._tables = {name: table for name, table in tables.items() if _get_local_shard(table.weight)}
        self._counted = {id(lookup): lookup.received.clone() for lookup in taps.lookups}
        self._changed = torch.zeros(2, len(schema.sparse), dtype=torch.int64)
        self._features: dict[str, list[int]] = {name: [] for name in schema.tables}
        for number, spec in enumerate(schema.sparse.values()):
            self._features[spec.table].append(number)
        self._used: dict[str, torch.Tensor] = {}
        self._probed: dict[str, ProbedRows] = {}
        self._parts: dict[int, list[Part]] = {}  # id of a lookup → its gradients in the probed step
        for lookup in taps.lookups:
            lookup.kernel.register_forward_hook(self._before_update(lookup))

    def add(self, changed: torch.Tensor | None) -> None:
        """Add a batch's counts (Batch.changed), if any, int64 [2, features]: ids clamped or hashed, and all ids."""
        if changed is not None:
            self._changed += changed

    @torch.no_grad()
    def collect(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of each table since the last call, and discard the records of the probed step.

        If `of_ids` is a collective operation, every rank must call this method.

        Returns:
            Table → name of a statistic (docs/monitoring.md) → number, bool, text, list of counts; None if undefined.
        """
        (lookups, hits), ids = self._count_lookups(), self._of_ids()
        self._parts = {id(lookup): lookup.gradients() for lookup in self._taps.lookups}
        figures = {
            name: self._collect_table(table, lookups.get(name, 0)) | hits.get(name, {}) | ids.get(name, {})
            for name, table in self._tables.items()
        }
        self._turn += 1
        self._probed.clear()
        self._parts.clear()
        self._changed.zero_()
        return _to_numbers(figures)

    def _count_lookups(self) -> tuple[dict[str, int], dict[str, dict[str, float]]]:
        """Return table → ids looked up since the last call, and table → {"cache_hit_rate": rate} for cached tables."""
        total: dict[str, int] = {}
        hits: dict[str, dict[str, float]] = {}
        for lookup in self._taps.lookups:
            now = lookup.received.clone()
            for table, ids in zip(lookup.tables, (now - self._counted[id(lookup)]).tolist(), strict=True):
                total[table] = total.get(table, 0) + ids
            self._counted[id(lookup)] = now
            if (share := measure_cache_hits(lookup.kernel)) is not None:
                hits |= {table: {"cache_hit_rate": share} for table in lookup.tables}
        return total, hits

    def _collect_table(self, table: Table, lookups: int) -> dict[str, Any]:
        shard, probed = _get_local_shard(table.weight), self._probed.get(table.name)
        rows, columns = shard.values.shape
        read_ids, changed_share = self._count_read_ids(table.name)
        state = {kind: s for kind, parts in table.state.items() if (s := _get_local_shard(parts))}
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
            **self._compute_norms(shard, state, table),
        }
        if probed:
            now = shard.read(probed.ids).float()
            figures |= {
                "touched_rows": probed.distinct,
                "unique_ratio": probed.distinct / max(1, probed.lookups),
                "gradient_norm": self._compute_gradient_norm(table, probed),
                "update_norm": _estimate_norm(now - probed.before, probed),
                "max_abs": torch.maximum(figures["max_abs"], _max_abs(now)),
            }
        return figures

    def _compute_norms(self, shard: Shard, state: dict, table: Table) -> dict[str, Any]:
        """Return norms of sampled rows and, if known, shares of unused rows and collisions; if empty, only max_abs."""
        rows = shard.values.shape[0]
        if not rows:
            return {"max_abs": torch.zeros((), device=shard.values.device)}
        stride = max(1, rows // MIN_SAMPLED_ROWS)
        # The factor is a prime, so consecutive samples do not consist of neighboring rows.
        sample = slice(self._turn * 7919 % stride, None, stride)
        weights = shard.read(sample).float()
        norms = torch.linalg.vector_norm(weights, dim=1)
        quantiles = torch.quantile(norms, norms.new_tensor([0.05, 0.5, 0.95]))
        figures = {
            **dict(zip(("row_norm_p05", "row_norm_p50", "row_norm_p95"), quantiles, strict=True)),
            "row_norm_max": norms.max(),
            "row_norm_counts": _count_norms(norms),
            "max_abs": _max_abs(weights),
            "weight_norm": (norms.square().mean() * rows).sqrt(),
        }
        if (kind := _find_second_moment(table)) in state:
            moments = state[kind].read(sample).reshape(len(norms), -1)
            figures["dead_share"] = (moments == 0).all(1).float().mean()
            figures["state_norm"] = (moments.square().sum(1).mean() * rows).sqrt()
        elif (used := self._used.get(table.name)) is not None:
            figures["dead_share"] = 1 - used.float().mean()
        hashed = self._schema.tables[table.name].out_of_range == "hash" and self._count_read_ids(table.name)[1] == 1.0
        if hashed and "dead_share" in figures:
            figures["collision_rate"] = estimate_collision_rate(figures["dead_share"])
        return figures

    def _compute_gradient_norm(self, table: Table, probed: ProbedRows) -> torch.Tensor | None:
        """Return the gradient norm of the table's shard in the probed step, estimated from the sampled rows.

        For a data-parallel table, the result is the norm of the gradient of all rows, averaged over ranks. The result
        is None if the gradient is not available.
        """
        if probed.lookup.replicated:
            gradient = None if table.parameter is None else table.parameter.grad
            return None if gradient is None else torch.linalg.vector_norm(gradient.float())
        if probed.lookup.gradient is None:
            return None
        gradients = torch.zeros_like(probed.before)
        for shard, key, bag_gradients in self._parts[id(probed.lookup)]:
            if shard.name == table.name:
                add_row_gradients(gradients, probed.ids, key, bag_gradients)
        return _estimate_norm(gradients, probed)

    def _before_update(self, lookup: Lookup) -> Any:
        """Return a forward hook that records the values of looked-up rows in a probed step.

        The hook also marks the rows of tables whose optimizer state does not show which rows have been used.
        """
        without_state = {name for name in lookup.tables if _find_second_moment(self._tables[name]) is None}
        for name in without_state:
            values = _get_local_shard(self._tables[name].weight).values
            self._used[name] = torch.zeros(len(values), dtype=torch.bool, device=values.device)

        def after(kernel: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            is_probing = self._taps.is_probing
            if not (kernel.training and torch.is_grad_enabled() and (without_state or is_probing)):
                return
            for name, ids in collect_table_ids(kernel, inputs[0]).items():
                if name in without_state:
                    self._used[name][ids] = True
                if is_probing:
                    self._probe(name, lookup, ids)

        return after

    def _probe(self, name: str, lookup: Lookup, ids: torch.Tensor) -> None:
        shard, rows = _get_local_shard(self._tables[name].weight), ids.unique()
        # Contiguous in memory, because ids are searched for in the rows (torch.searchsorted).
        sampled = rows[:: max(1, len(rows) // MIN_SAMPLED_ROWS)].contiguous()
        before = shard.read(sampled).detach().float()
        self._probed[name] = ProbedRows(lookup, sampled, len(rows), len(ids), before)

    def _count_read_ids(self, table: str) -> tuple[int, float | None]:
        """Return the number of a table's ids read since the last `collect`, and the share clamped or hashed."""
        changed, ids = self._changed[:, self._features[table]].sum(1).tolist()
        return ids, changed / ids if ids else None


def estimate_collision_rate(dead_share: torch.Tensor) -> torch.Tensor:
    """Return the estimated share of distinct ids that share their row with an earlier id, if all ids are hashed.

    If n ids are hashed to R rows, R·exp(−n/R) rows stay empty. With the share d of empty rows (`dead_share`),
    n = −R·ln d, and R·(1 − d) ids are the first in their rows. The share of the other ids is 1 − (1 − d) ÷ −ln d.
    """
    load = -dead_share.double().clamp(1e-9, 1 - 1e-9).log()
    return 1 - (1 - dead_share.double()) / load


def _estimate_norm(rows: torch.Tensor, probed: ProbedRows) -> torch.Tensor:
    """Return the L2 norm over all looked-up rows, estimated from a sample."""
    share = probed.distinct / max(1, len(probed.ids))
    return (rows.square().sum() * share).sqrt()


def _count_norms(norms: torch.Tensor) -> torch.Tensor:
    """Return the number of norms in each bin of NORM_EDGES, int64 [bins]; outliers are in the end bins.

    torch.histc is not used, because it is not deterministic on GPUs.
    """
    low, high, bins = NORM_EDGES
    values = norms.clamp_min(1e-30).log10().clamp(low, high)
    bin_N1 = ((values - low) * bins / (high - low)).long().clamp(max=bins - 1).unsqueeze(1)
    return (bin_N1 == torch.arange(bins, device=norms.device)).sum(0)


def _max_abs(values: torch.Tensor) -> torch.Tensor:
    return values.float().abs().max() if values.numel() else torch.zeros((), device=values.device)


def _find_second_moment(table: Table) -> str | None:
    """Return the kind of optimizer state that is 0 until a row's first gradient; None if the table has none."""
    kind = table.optimizer.second_moment if table.optimizer else None
    return kind if kind in table.state else None


def _get_local_shard(parts: ShardedValues) -> Shard | None:
    """Return this rank's shard of a table, or None; a rank has at most one per table (planning/plan.py)."""
    return parts.local[0] if parts.local else None


def _to_numbers(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the statistics with tensors replaced by numbers, using a single copy from the device."""
    tensors = [v for figures in tables.values() for v in figures.values() if isinstance(v, torch.Tensor)]
    numbers = iter(read_flat_values([tensor.double() for tensor in tensors]))

    def plain(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        flat = next(numbers)
        if value.dim():  # a histogram
            return [int(number) for number in flat]
        return flat[0] if isfinite(flat[0]) else None  # JSON has no NaN

    return {name: {key: plain(v) for key, v in figures.items()} for name, figures in tables.items()}
