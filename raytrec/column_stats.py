"""Statistics of Parquet columns in bounded memory, one row group at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from raytrec.errors import DataError
from raytrec.storage import open_filesystem

SMALLEST = 65_536  # hashes kept to count distinct values: exact below, ± 0.4 % beyond
LONGEST_COUNTED = 10_000  # bag lengths from here on are counted as this


@dataclass
class ColumnStats:
    """What is known of one column.

    Attributes:
        type: Arrow type; base: integer, float, bool, text, time or other (of a list: its values').
        rows, values, nulls: counts; of a list, `values` are its elements.
        low, high: of finite numbers. not_finite: NaN and infinities.
    """

    name: str
    type: str
    base: str
    is_list: bool
    rows: int = 0
    values: int = 0
    nulls: int = 0
    not_finite: int = 0
    low: float = np.inf
    high: float = -np.inf
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(LONGEST_COUNTED + 1, np.int64))

    @property
    def distinct(self) -> int:
        """Distinct values: exact below 65,536, then from the smallest hashes (Bar-Yossef et al. 2002)."""
        if len(self.hashes) < SMALLEST:
            return len(self.hashes)
        return round((SMALLEST - 1) / (float(self.hashes[-1]) / 2**64))

    @property
    def is_probability(self) -> bool:
        """A column of numbers in [0, 1]."""
        numeric = self.base in ("integer", "float", "bool") and not self.is_list
        return numeric and self.low >= 0 and self.high <= 1

    @property
    def distinct_text(self) -> str:
        return f"{'' if len(self.hashes) < SMALLEST else '~'}{self.distinct:,}"

    @property
    def nulls_text(self) -> str:
        share = self.nulls / max(self.rows, 1)
        return "0 %" if not self.nulls else f"{100 * share:.2g} %"

    @property
    def range_text(self) -> str:
        return f"{self.low:.10g} to {self.high:.10g}" if self.low <= self.high else ""

    @property
    def bag_text(self) -> str:
        """Of a list: shortest, mean, 95th percentile, longest, and the share of empty bags."""
        if not self.is_list or not self.lengths.sum():
            return ""
        counts, seen = self.lengths, np.flatnonzero(self.lengths)
        total = counts.sum()
        p95 = int(np.searchsorted(np.cumsum(counts), 0.95 * total))
        mean = self.values / total
        return f"{seen[0]} to {seen[-1]}, mean {mean:.3g}, p95 {p95}, empty {100 * counts[0] / total:.3g} %"

    def add(self, column) -> None:
        """Adds a row group's column (pyarrow.ChunkedArray)."""
        import pyarrow.compute as pc

        array = column.combine_chunks()
        self.rows += len(array)
        self.nulls += array.null_count
        if self.is_list:
            lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
            self.lengths += np.bincount(np.minimum(lengths, LONGEST_COUNTED), minlength=LONGEST_COUNTED + 1)
            array = array.flatten()
        if hasattr(array, "dictionary_decode"):
            array = array.dictionary_decode()
        array = array.drop_null()
        self.values += len(array)
        if len(array) and self.base not in ("other", "time"):
            self._count(pc.unique(array))

    def _count(self, unique) -> None:
        from pandas.util import hash_array

        values = unique.to_numpy(zero_copy_only=False)
        if self.base in ("integer", "float", "bool"):
            finite = np.isfinite(values.astype(np.float64))
            self.not_finite += int((~finite).sum())
            if finite.any():
                self.low = min(self.low, float(values[finite].min()))
                self.high = max(self.high, float(values[finite].max()))
        else:
            values = values.astype(object)
        self.hashes = np.union1d(self.hashes, hash_array(values))[:SMALLEST]


def scan_columns(uri: str, max_rows: int | None) -> tuple[list[ColumnStats], int, bool]:
    """Statistics of every column, the rows looked at, and whether these are all.

    Raises:
        DataError: nothing there, no rows, or a file that is not whole.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from rich.console import Console
    from rich.progress import Progress

    from raytrec.data.fragments import list_files, read_footer

    footers = {path: read_footer(path) for path in list_files(uri, "inspect")}
    groups = [(p, i, f.row_group(i).num_rows) for p, f in footers.items() for i in range(f.num_row_groups)]
    total = sum(rows for _, _, rows in groups)
    if not total:
        raise DataError("there are no rows", where=uri, expected=f"rows in its {len(footers)} Parquet files")
    chosen = _spread(groups, total, max_rows)
    schema = next(iter(footers.values())).schema.to_arrow_schema()
    columns = [_column(f) for f in schema]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        for path, index, _ in bar.track(chosen, description="reading"):
            filesystem, inner = open_filesystem(path)
            try:
                with filesystem.open_input_file(inner) as file:
                    table = pq.ParquetFile(file).read_row_group(index)
                for column in columns:
                    column.add(table[column.name])
            except (pa.ArrowException, OSError, KeyError) as error:
                raise DataError(
                    f"cannot read the row group: {error}",
                    where=f"{path}, row group {index}",
                    expected="the columns of the first file, readable",
                ) from None
    return columns, sum(rows for _, _, rows in chosen), len(chosen) == len(groups)


def _spread(groups: list, total: int, max_rows: int | None) -> list:
    """Row groups, evenly spread, that hold about max_rows rows."""
    if max_rows is None or max_rows >= total:
        return groups
    count = max(1, round(len(groups) * max_rows / total))
    return [groups[i * len(groups) // count] for i in range(count)]


def _column(arrow_field) -> ColumnStats:
    from raytrec.data.kinds import is_list, value_type

    return ColumnStats(
        arrow_field.name,
        str(arrow_field.type),
        _base(value_type(arrow_field.type)),
        is_list(arrow_field.type),
    )


def _base(kind) -> str:
    import pyarrow.types as t

    from raytrec.data.kinds import is_text

    if t.is_temporal(kind):
        return "time"
    if t.is_integer(kind):
        return "integer"
    if t.is_floating(kind):
        return "float"
    if t.is_boolean(kind):
        return "bool"
    return "text" if is_text(kind) else "other"
