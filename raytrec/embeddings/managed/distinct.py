"""Keys of several tables together: counted, ordered, each once."""

from __future__ import annotations

from dataclasses import dataclass

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
    def of(cls, tables: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor | None = None) -> Distinct:
        """Of N keys, the tables of which ascend.

        Args:
            counts: occurrences, which add up where keys are equal; default: of each one.
        """
        order = in_order(tables, keys)
        ordered, of_tables = keys[order], tables[order]
        first = torch.ones_like(keys, dtype=torch.bool)
        first[1:] = (ordered[1:] != ordered[:-1]).logical_or_(of_tables[1:] != of_tables[:-1])
        starts = first.nonzero().squeeze(1)
        places = torch.empty_like(order).index_copy_(0, order, first.cumsum(0) - 1)
        counts = torch.ones_like(keys) if counts is None else counts
        totals = torch.zeros_like(starts).index_add_(0, places, counts)
        return cls(of_tables[starts], ordered[starts], totals, places)


def count_by_owner(tables: torch.Tensor, keys: torch.Tensor, count: int, world: int) -> torch.Tensor:
    """How many of these keys each rank owns of each table: int64 [count, world].

    Args:
        tables: int64 [n], of each key. count: of tables.
    """
    return count_tables(tables * world + shares(keys, world)[0], count * world).view(count, world)


def count_tables(tables: torch.Tensor, count: int) -> torch.Tensor:
    """How many there are of each number below `count`: int64 [count]; not by bincount, for which the host
    would wait.

    Args:
        tables: int64 [n].
    """
    nothing = torch.zeros(count, dtype=torch.int64, device=tables.device)
    return nothing.index_add_(0, tables, torch.ones_like(tables))


def in_order(tables: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The order of keys within each table: places, int64 [n].

    Args:
        tables: int64 [n], ascending. keys: int64 [n].
    """
    if keys.device.type == "cpu":  # tables one by one, as it is quicker where nothing has to be launched
        parts, orders, start = keys.split(tables.bincount().tolist()), [tables[:0]], 0
        for part in parts:
            orders.append(part.argsort().add_(start))
            start += len(part)
        return torch.cat(orders)
    order = keys.argsort()
    return order[tables[order].argsort(stable=True)]
