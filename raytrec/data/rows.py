"""The read task: decode one item's row groups, transform, check, bring into one form. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.data.columns import Place, bags, numbers, single
from raytrec.data.faults import Faults, retried
from raytrec.data.form import Form, shuffled
from raytrec.data.memory import keep_memory
from raytrec.data.order import Item, Part
from raytrec.data.transform import transformed
from raytrec.errors import DataError
from raytrec.schema import Sparse, Table
from raytrec.storage import open_filesystem

_footers: dict[tuple, pq.FileMetaData] = {}  # (path, size, mtime) → footer, of this process
FOOTER_BYTES = 16 << 20
MOST_BAD_ROWS = 64  # of one row group that are looked for one by one; beyond them, what is left is left out


def read_items(items: Any, form: Form, faults: Faults | None, index: pa.Table) -> Iterator[pa.Table]:
    """One Ray Data task: the items whose places in the list stand in the column `id` of `index`.

    Args:
        items: ray.ObjectRef of the whole list.
    """
    whole = _fetched(items)
    yield from (read_item(whole[i], form, faults) for i in index["id"].to_pylist())


@lru_cache(maxsize=2)  # of this epoch and the next
def _fetched(items: Any) -> list[Item]:
    import ray

    return ray.get(items)


def read_item(item: Item, form: Form, faults: Faults | None = None) -> pa.Table:
    """The rows of an item in canonical form, shuffled if it has a seed; always as many as the item says.

    Raises:
        DataError: a row group that cannot be decoded, or a value that the schema does not allow; names file,
            row group, column and row. Under `faults.skip` those rows are not present instead.
    """
    keep_memory()
    faults = faults or Faults()
    pieces = []
    for (path, group), parts in groupby(item.parts, key=lambda part: (part.path, part.group)):
        pieces.append(_read_group(path, group, list(parts), form, faults))
    table = pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces)
    if item.seed is not None:
        table = shuffled(table, np.random.default_rng(item.seed))
    return table.slice(item.skip) if item.skip else table


def _read_group(path: str, group: int, parts: list[Part], form: Form, faults: Faults) -> pa.Table:
    """The parts of one row group, which is decoded once."""
    try:
        table = _decode(path, group, max(part.first + part.rows for part in parts), form.columns)
        table = transformed(table, form.transforms, f"{path}, row group {group}", form.folder)
    except DataError as error:
        rows = sum(part.rows for part in parts)
        faults.leave_out(error, rows)
        return _absent(rows, form)
    first, last = min(part.first for part in parts), max(part.first + part.rows for part in parts)
    table, place = table.slice(first, last - first), Place(path, group, first)
    whole = _present(table, form, place, faults) if faults.skip else canonical(table, form, place)
    if len(parts) == 1:
        return whole
    return pa.concat_tables([whole.slice(part.first - first, part.rows) for part in parts])


def _decode(path: str, group: int, rows: int, columns: list[str]) -> pa.Table:
    """A row group that has at least `rows` rows, those columns of it."""

    def read() -> pa.Table:
        filesystem, inner = open_filesystem(path)
        info = filesystem.get_file_info(inner)
        with filesystem.open_input_file(inner) as file:
            version = path, info.size, info.mtime_ns
            footer = _footers.get(version)
            reader = pq.ParquetFile(file, metadata=footer, pre_buffer=True, page_checksum_verification=True)
            if footer is None:
                _remember(version, reader.metadata)
            return reader.read_row_group(group, columns=columns, use_threads=False)

    try:
        table = retried(path, read)
        if table.num_rows < rows:
            raise IndexError(f"it has {table.num_rows:,} rows, and had {rows:,} or more before")
        if missing := set(columns) - set(table.column_names):
            raise KeyError(f"column {', '.join(sorted(missing))} is gone")
    except (pa.ArrowException, OSError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot decode the row group: {(str(error).splitlines() or [type(error).__name__])[0]}",
            where=f"{path}, row group {group}",
            expected="a whole Parquet file that does not change while it is read",
            do="write or copy the file again, or go on without its rows: data.on_error=skip",
        ) from None
    return table


def _remember(version: tuple, footer: pq.FileMetaData) -> None:
    """Keeps a footer for the file's other row groups; the oldest go when they take too much memory. (Parsed
    for each row group, a footer costs a good part of what decoding does.)"""
    _footers[version] = footer
    while sum(known.serialized_size for known in _footers.values()) > FOOTER_BYTES and len(_footers) > 1:
        del _footers[next(iter(_footers))]


def _present(table: pa.Table, form: Form, place: Place, faults: Faults, left: list | None = None) -> pa.Table:
    """The canonical form with a column `present`: bad rows, found by halving, are empty and not present."""
    left = [MOST_BAD_ROWS] if left is None else left
    try:
        return canonical(table, form, place).append_column("present", pa.array(np.ones(len(table), bool)))
    except DataError as error:
        if len(table) == 1 or not left[0]:
            left[0] -= left[0] > 0
            faults.leave_out(error, len(table))
            return _absent(len(table), form)
    half = len(table) // 2
    after = Place(place.path, place.group, place.first + half)
    return pa.concat_tables(
        [
            _present(table.slice(0, half), form, place, faults, left),
            _present(table.slice(half), form, after, faults, left),
        ]
    )


def _absent(rows: int, form: Form) -> pa.Table:
    """Rows that are left out."""
    return form.nothing(rows).append_column("present", pa.array(np.zeros(rows, bool)))


def canonical(table: pa.Table, form: Form, place: Place) -> pa.Table:
    """A decoded table in canonical form.

    Args:
        table: any table with the schema's columns.
        place: where its first row lies, for errors.
    """
    schema = form.schema

    def spec(name: str) -> tuple[str, Sparse, Table, Place]:
        return name, schema.sparse[name], schema.tables[schema.sparse[name].table], place

    def weights(name: str) -> pa.ChunkedArray | None:
        column = schema.sparse[name].weights
        return table[column] if column else None

    return form.table(
        [_label(table, name, place) for name in schema.labels],
        [numbers(table[name], name, place) for name in schema.dense],
        [single(table[schema.column_of(name)], *spec(name)) for name in form.singles],
        [bags(table[schema.column_of(name)], weights(name), *spec(name)) for name in form.bags],
        table.num_rows,
    )


def _label(table: pa.Table, name: str, place: Place) -> np.ndarray:
    values = numbers(table[name], name, place)
    wrong = (values < 0) | (values > 1)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"label '{name}' is {values[row]:g}",
            where=place.of(name, row),
            expected="a number in [0, 1]",
            do="map the label to 0 and 1",
        )
    return values
