"""Rows that get another id start over: with that id's initial values, and without optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from raytrec.config.schema import Schema
from raytrec.embeddings.initial import initial_values
from raytrec.embeddings.tables import Shard, Table


@torch.no_grad()
def begin_rows(
    new_rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    tables: Mapping[str, Table],
    schema: Schema,
    seed: int,
    before: Callable[[str, torch.Tensor], None] = lambda table, rows: None,
) -> None:
    """Writes what these rows begin with into this rank's shards; not a collective.

    To be called between two steps: rows are trained as those of their last id until then.

    Args:
        new_rows: table → (rows int64 [n], ids int64 [n]).
        tables: of the sharded model, with their optimizer state.
        seed: of the run.
        before: called before anything is written to rows of a shard: (table, rows int64 [n], counted from the
            shard's first).
    """
    for name, (rows, ids) in new_rows.items():
        if not len(rows):
            continue
        table, spec = tables[name], schema.tables[name]
        for shard in table.weight.local:
            places = _within(shard, rows)
            its_rows = rows[places] - shard.rows.start
            values = initial_values(seed, name, ids[places], shard.columns, spec.rows)
            before(name, its_rows)
            shard.values.index_copy_(0, its_rows, values.to(shard.values.dtype))
        for parts in table.state.values():
            for shard in parts.local:
                shard.values.index_fill_(0, rows[_within(shard, rows)] - shard.rows.start, 0)


def _within(shard: Shard, rows: torch.Tensor) -> torch.Tensor:
    """Which of these rows a shard has: int64 [n], places."""
    return ((rows >= shard.rows.start) & (rows < shard.rows.stop)).nonzero().squeeze(1)
