"""Keys of several tables together: counted, ordered, each once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from raytrec.embeddings.hashing import shares


@dataclass(frozen=True)
class Distinct:
    """Keys without repetitions, ascending by their table's number, then by key.

    Attributes:
        tables, keys: int64 [n]. counts: int64 [n], occurrences of each.
        places: int64 [N], which of them each key was that this was made of.
    """

    tables: torch.Tensor
    keys: torch.Tensor
    counts: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(
        cls, tables: torch.Tensor, keys: torch.Tensor, count: int, counts: torch.Tensor | None = None
    ) -> Distinct:
        """Of N keys, the tables of which ascend.

        Args:
            count: of tables.
            counts: occurrences, which add up where keys are equal; default: of each one.
        """
        if count == 1:  # quicker on a CPU
            distinct, places = torch.unique(keys, return_inverse=True)
            of_distinct = torch.zeros_like(distinct)
        else:
            ordered, order = in_order(tables, keys)
            first = torch.ones_like(keys, dtype=torch.bool)
            first[1:] = (ordered[1:] != ordered[:-1]).logical_or_(tables[1:] != tables[:-1])
            starts = first.nonzero().squeeze(1)
            places = torch.empty_like(order).scatter_(0, order, first.cumsum(0) - 1)
            distinct, of_distinct = ordered.index_select(0, starts), tables.index_select(0, starts)
        counts = torch.ones_like(keys) if counts is None else counts
        totals = torch.zeros_like(distinct).index_add_(0, places, counts)
        return cls(of_distinct, distinct, totals, places)


def count_by_owner(tables: torch.Tensor, keys: torch.Tensor, count: int, world: int) -> torch.Tensor:
    """How many of these keys each rank owns of each table: int64 [count, world].

    Args:
        tables: int64 [n], of each key, ascending; keys ascend within a table. count: of tables.
    """
    return count_tables(tables * world + shares(keys, world)[0], count * world).view(count, world)


def count_tables(tables: torch.Tensor, count: int) -> torch.Tensor:
    """How many there are of each number below `count`: int64 [count]; not by bincount, for which the host
    would wait.

    Args:
        tables: int64 [n], ascending.
    """
    return torch.searchsorted(tables, torch.arange(count + 1, device=tables.device)).diff()


def in_order(tables: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys in their order within each table, the places of them): int64 [n] each.

    Args:
        tables: int64 [n], ascending. keys: int64 [n].
    """
    if keys.device.type != "cpu":
        ordered, order = keys.sort()
        by_table = tables[order].argsort(stable=True)
        return ordered[by_table], order[by_table]
    if not len(keys) or tables[0] == tables[-1]:
        ordered, order = keys.sort()
        return ordered, order
    # Tables one by one, which is quicker where nothing has to be launched.
    starts = torch.searchsorted(tables, torch.arange(int(tables[-1]) + 2)).tolist()
    parts = [keys[start:end].sort() for start, end in pairwise(starts)]
    orders = [order.add_(start) for (_, order), start in zip(parts, starts, strict=False)]
    return torch.cat([ordered for ordered, _ in parts]), torch.cat(orders)


def of_table(values_T: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """The value of each table in its place: [n], or [1], which is as good, where there is one table.

    Args:
        values_T: of each table. tables: int64 [n].
    """
    return values_T.index_select(0, tables) if len(values_T) > 1 else values_T
