"""Tables with a part on very many ranks: their figures are added up by the ranks, so that a record grows with
ranks + tables and not with ranks × tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from raytrec.embeddings.tables import Table
from raytrec.tracking.aggregate import ADDED, added
from raytrec.tracking.reduced import MAXIMA, SUMS, pack, unpack

MOST_HOLDERS = 64  # ranks with a part of a table, up to which each of them has an entry of its own


class SpreadTables:
    """Those of a run; making it is a collective, and so is `reduce`.

    Attributes:
        names: the tables that more than MOST_HOLDERS ranks have a part of; the same on all ranks.
    """

    def __init__(self, tables: Iterable[Table]):
        self.names = [table.name for table in tables if _holders(table) > MOST_HOLDERS]
        gloo = dist.is_initialized() and dist.get_backend() == "gloo"
        self._group = None if gloo or not self.names else dist.new_group(backend="gloo")

    def reduce(self, mine: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """A rank's line of its tables, as RankLine's fields; a collective where there are such tables.

        Args:
            mine: table → figures of this rank's shards.
        """
        if not self.names:
            return {"tables": mine}
        packed = [pack(mine.get(name, {})) for name in self.names]
        sums, maxima = (torch.tensor(part, dtype=torch.float64) for part in zip(*packed, strict=True))
        assert sums.shape[1] == SUMS and maxima.shape[1] == MAXIMA
        dist.reduce(sums, 0, dist.ReduceOp.SUM, group=self._group)
        dist.reduce(maxima, 0, dist.ReduceOp.MAX, group=self._group)
        own = {name: entry for name, entry in mine.items() if name not in self.names}
        line: dict[str, Any] = {"tables": own, "sums": {"tables": len(mine)}}
        line["sums"] |= {key: added({"tables": mine}, key) for key in ADDED}
        if dist.get_rank() == 0:
            of_table = zip(self.names, sums.tolist(), maxima.tolist(), strict=True)
            line["spread"] = {name: unpack(*parts) for name, *parts in of_table}
        return line


def _holders(table: Table) -> int:
    if table.weight.replicated:
        return dist.get_world_size() if dist.is_initialized() else 1
    return len({shard.rank for shard in table.weight.shards if len(shard.rows)})
