"""Rows of an export's tables in memory, which can be replaced by new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from raytrec.common.errors import RaytrecError
from raytrec.common.memory import allow_writing
from raytrec.embeddings.row_pages import prefetch_rows
from raytrec.scoring.precisions import TablePrecision

# Lookups of at least MIN_PREFETCHED_ROWS rows prefetch pages unless SAMPLED_ROWS of the rows are in memory.
MIN_PREFETCHED_ROWS, SAMPLED_ROWS = 256, 3


class TableRows(Protocol):
    """Rows of one or several tables, one table after another."""

    def vectors(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Return the vectors of rows: int64 [N] → float32 [N, dim]."""
        ...


class RowStack:
    """Stored rows of tables of one dim and precision.

    Args:
        stored: Stored rows, [n, …], of all tables; they may be mapped from files.
        precision: Format of the stored rows.
    """

    def __init__(self, stored: torch.Tensor, precision: TablePrecision):
        self._stored, self.precision, self._is_writable = stored, precision, False

    def vectors(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Return the vectors of rows: int64 [N] → float32 [N, dim]."""
        if len(rows_N) >= MIN_PREFETCHED_ROWS:
            prefetch_rows(self._stored, rows_N, SAMPLED_ROWS)
        return self.precision.decode(self.read_rows(rows_N))

    def prepare_writing(self, rows_N: torch.Tensor) -> None:
        """Copy the pages of mapped rows to private memory, so that `write` causes no page faults.

        Raises:
            OSError: The system refuses to make the mapping writable.
        """
        if not self._is_writable:
            allow_writing(self._stored.data_ptr(), self._stored.nbytes)
            self._is_writable = True
        if len(rows_N) >= MIN_PREFETCHED_ROWS:
            prefetch_rows(self._stored, rows_N, SAMPLED_ROWS)
        self.write(rows_N, self.read_rows(rows_N))  # the same values, which readers do not notice

    def write(self, rows_N: torch.Tensor, stored_N: torch.Tensor) -> None:
        """Replace stored rows after `prepare_writing`; the rows are int64 [N], the values [N, …]."""
        self._stored.index_copy_(0, rows_N, stored_N)

    def read_rows(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Return a copy of stored rows: int64 [N] → [N, …]."""
        return self._stored.index_select(0, rows_N)

    def read(self, first: int, end: int) -> torch.Tensor:
        """Return the stored rows [first, end) as a view, [n, …]."""
        return self._stored[first:end]


@dataclass(frozen=True)
class StackedTable:
    """Table in a stack.

    Attributes:
        stack: Rows of all tables of the stack.
        first_row: Number of rows of the tables before this table.
    """

    stack: TableRows
    first_row: int = 0


@dataclass(frozen=True)
class RowChanges:
    """New values of whole rows of a table.

    Attributes:
        rows: Row numbers, int64 [n], ascending.
        values: Values, float32 [n, dim].
    """

    rows: torch.Tensor
    values: torch.Tensor


def encode_rows(table: str, changes: RowChanges, precision: TablePrecision) -> torch.Tensor:
    """Return the new rows of a table as an export stores them.

    Raises:
        ValueError: A value is too large for the precision.
    """
    try:
        return precision.encode(changes.values)
    except RaytrecError as error:
        raise ValueError(f"table {table}: {error.what}; expected: {error.expected}") from None


def encode_changes(
    tables: Mapping[str, StackedTable], changes: Mapping[str, RowChanges]
) -> dict[RowStack, tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows of each stack that change, int64 [n], and their new stored values, [n, …].

    Args:
        tables: Tables in stacks of stored rows.
        changes: Table → new rows.

    Raises:
        ValueError: A value is too large for the precision of its table.
    """
    parts: dict[RowStack, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, each in changes.items():
        stack, first_row = cast(RowStack, tables[name].stack), tables[name].first_row
        parts.setdefault(stack, []).append((each.rows + first_row, encode_rows(name, each, stack.precision)))
    return {stack: tuple(torch.cat(each) for each in zip(*members, strict=True)) for stack, members in parts.items()}
