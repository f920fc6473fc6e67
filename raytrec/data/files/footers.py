"""Check Parquet footers, and evaluate their column statistics. A chunk is a column of one row group.

Most footers contain column statistics, which require no additional reads. The first row groups whose
statistics show invalid values are read before a run starts (item_reader.check_suspect_groups), so that the
error can name the row. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.errors import DataError, get_first_line
from raytrec.common.reading import retry_read, storage_hint
from raytrec.common.storage import open_filesystem
from raytrec.data.read_plans import ResolvedReadPlan, TaskRows

MAX_GROUP_ROWS = 2**31 - 1  # maximum number of rows in a row group; far more than any writer produces
MIN_FULLY_CHECKED_ROWS = 65_536  # all columns are checked in row groups with more rows
SIGNATURE_BYTES = 28  # number of bytes after a plaintext footer if columns are encrypted
MAX_UNSCALED_VALUE = 1000.0  # largest absolute value of an unscaled dense column without a warning
UNKNOWN_BOUNDS = (0.0, 1.0)  # of labels that may vary, because there are no statistics
MAX_FLOAT32 = float(np.finfo(np.float32).max)
ChunkTest = Callable[[pq.ColumnChunkMetaData], bool]


def _check_claims(footer: pq.FileMetaData, size: int) -> None:
    """Check that a file of `size` bytes can hold the rows and values that its footer claims.

    In row groups of at most MIN_FULLY_CHECKED_ROWS rows, only the first column is checked.

    Raises:
        pa.ArrowInvalid: A claim is impossible.
    """
    for g in range(footer.num_row_groups):
        group = footer.row_group(g)
        if not 0 <= group.num_rows <= MAX_GROUP_ROWS:
            raise pa.ArrowInvalid(f"the footer claims an impossible {group.num_rows:,} rows in row group {g}")
        # There may be millions of small row groups, so that checks of all their columns would take too long.
        for c in range(group.num_columns if group.num_rows > MIN_FULLY_CHECKED_ROWS else min(1, group.num_columns)):
            chunk, column = group.column(c), footer.schema.column(c)
            begin = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
            chunk_bytes = chunk.total_compressed_size
            what = f"the footer claims {group.num_rows:,} rows in row group {g} and, for column {column.path},"
            if begin < 0 or chunk_bytes < 0 or begin + chunk_bytes > size:
                raise pa.ArrowInvalid(
                    f"{what} {chunk_bytes:,} bytes from byte {begin:,} on, in a file of {size:,} bytes"
                )
            if column.max_repetition_level == 0 and chunk.num_values != group.num_rows:
                raise pa.ArrowInvalid(f"{what} {chunk.num_values:,} values instead of one per row")


def _check_not_encrypted(uri: str, tail: bytes, footer: pq.FileMetaData | None = None) -> None:
    """Check that a file is not encrypted. pyarrow aborts the process if an encrypted column is accessed.

    Args:
        uri: Path or URI of the file.
        tail: Last 8 bytes of the file.
        footer: Metadata of the file, required to detect encrypted columns; None: only the footer is checked.

    Raises:
        DataError: The footer or some columns are encrypted.
    """
    signature = int.from_bytes(tail[:4], "little") - footer.serialized_size if footer else 0
    if tail[4:] == b"PARE" or signature == SIGNATURE_BYTES:
        raise DataError(
            f"{'the footer is' if tail[4:] == b'PARE' else 'some columns of the file are'} encrypted",
            where=uri,
            expected="an unencrypted Parquet file, because raytrec does not support encryption keys",
            do="write the file again without encryption, or remove it",
        )


def read_footer(uri: str) -> pq.FileMetaData:
    """Return the metadata of a Parquet file.

    Raises:
        DataError: The file cannot be read, is encrypted, is not a complete Parquet file, or has a column name that
            is not UTF-8.
    """

    def read() -> pq.FileMetaData:
        filesystem, path = open_filesystem(uri)
        with filesystem.open_input_file(path) as file:
            tail = file.read_at(8, max(0, file.size() - 8))
            _check_not_encrypted(uri, tail)
            metadata = pq.read_metadata(file)
            _check_not_encrypted(uri, tail, metadata)
            _check_claims(metadata, file.size())
            return metadata

    try:
        metadata = retry_read(uri, read)
        _ = metadata.schema.to_arrow_schema().names, metadata.schema.names  # raises if names are not UTF-8
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        is_malformed = getattr(error, "errno", None) is None  # the system's errors on disk have an errno
        fault = "cannot read the file as Parquet" if is_malformed else "cannot read the file"
        expected = "a file that is neither cut off nor still being written" if is_malformed else "a readable file"
        if isinstance(error, UnicodeDecodeError):
            fault, expected = "the name of a column is not UTF-8", "names in UTF-8"
        raise DataError(
            f"{fault}: {get_first_line(error)}",
            where=uri,
            expected=storage_hint(uri) + expected,
            do="make the file readable, write or copy it again, or remove it",
        ) from None
    return metadata


class FooterStatistics:
    """Statistics of a file's row groups, by column.

    Args:
        metadata: Footer of the file.
        form: Resolved read plan, which defines the valid values of each column.

    Attributes:
        groups: Index → metadata, for nonempty row groups.
    """

    def __init__(self, metadata: pq.FileMetaData, form: ResolvedReadPlan):
        self._form = form
        groups = {index: metadata.row_group(index) for index in range(metadata.num_row_groups)}
        self.groups = {index: group for index, group in groups.items() if group.num_rows}
        self._written = {name for transform in form.plan.transforms for name in transform.writes}
        self._places = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}

    def list_suspect_groups(self) -> list[int]:
        """Return the indexes of all nonempty row groups whose statistics show values that the read plan forbids."""
        checks = [(i, wrong) for name, wrong in _list_statistics_checks(self._form) for i in self._columns(name)]
        return [
            index
            for index, group in self.groups.items()
            if any(wrong(column) for i, wrong in checks if (column := group.column(i)).is_stats_set)
        ]

    def list_exclusions(self) -> dict[str, list[set[str]]]:
        """Return, for each task, one set of reasons per nonempty row group why the task uses none of its rows.

        A set is empty if the task may use some rows of the row group. The result is empty if all rows have weight
        1 in every task and are not requests.
        """
        plan, candidates = self._form.plan, self._form.schema.candidates
        tasks = plan.tasks if plan.has_task_weights or candidates else ()
        return {task.name: self._find_exclusions(task, task.label in candidates) for task in tasks}

    def _find_exclusions(self, task: TaskRows, of_candidates: bool) -> list[set[str]]:
        conditions = [
            (i, why, excludes)
            for name, why, excludes in _list_exclusion_conditions(task, of_candidates)
            for i in self._columns(name)
        ]
        return [{why for i, why, excludes in conditions if excludes(group.column(i))} for group in self.groups.values()]

    def label_bounds(self, folder_values: Mapping[str, str | None]) -> dict[str, set[float]]:
        """Return a mapping from label to the set of its smallest and largest value; empty if all values are null.

        Row groups without statistics of numbers, and labels that a transform writes, are assumed to contain
        UNKNOWN_BOUNDS.

        Args:
            folder_values: Keys and values of the file's key=value folders.
        """
        return {
            name: _parse_bound(folder_values[name])
            if name in self._form.from_folders and name not in self._written
            else self._find_label_bounds(name)
            for name in self._form.plan.labels
        }

    def large_columns(self) -> dict[str, float]:
        """Return a mapping from dense column to its largest absolute value, if it exceeds MAX_UNSCALED_VALUE.

        Columns that have a scale, are written by a transform, are not in the file or have no statistics are left out.
        """
        names = {*self._form.schema.dense} - {*self._form.schema.scale}
        bounds = ((name, _bounds(chunk) or ()) for name in names for chunk in self._iterate_chunks(name))
        values = sorted((abs(float(bound)), name) for name, ends in bounds for bound in ends)
        return {name: value for value, name in values if value > MAX_UNSCALED_VALUE}

    def lacks_stored_values(self, name: str) -> bool:
        """Return True if the statistics show that a column has only nulls in the file, before all transforms."""
        places = self._find_places(name)
        return bool(places) and all(_is_all_null(g.column(place)) for place in places for g in self.groups.values())

    def lacks_values(self, name: str) -> bool:
        """Return True if there are no rows, or if the statistics show that a column of the file has only nulls."""
        return not self.groups or (name not in self._written and self.lacks_stored_values(name))

    def _find_label_bounds(self, name: str) -> set[float]:
        if len(self._columns(name)) != 1:
            return set(UNKNOWN_BOUNDS)
        present = (chunk for chunk in self._iterate_chunks(name) if not _is_all_null(chunk))
        bounds = [float(bound) for chunk in present for bound in _bounds(chunk) or UNKNOWN_BOUNDS]
        return {min(bounds), max(bounds)} if bounds else set()

    def _iterate_chunks(self, name: str) -> Iterator[pq.ColumnChunkMetaData]:
        """Yield the chunks of a column in nonempty row groups."""
        return (group.column(place) for place in self._columns(name) for group in self.groups.values())

    def _columns(self, name: str) -> list[int]:
        """Return the leaf-column indexes of a column or of the values in its lists; [] if a transform writes it."""
        return [] if name in self._written else self._find_places(name)

    def _find_places(self, name: str) -> list[int]:
        paths = (name, f"{name}.list.element", f"{name}.list.item")
        return [self._places[path] for path in paths if path in self._places]


def explain_empty_tasks(excluded: Iterable[dict[str, list[set[str]]]]) -> dict[str, str]:
    """Return a mapping from each task that uses no row of any file to the reason.

    Args:
        excluded: Results of `FooterStatistics.list_exclusions` for all files.
    """
    reasons_by_task: dict[str, list[set[str]]] = {}
    for file_reasons in excluded:
        for task, group_reasons in file_reasons.items():
            reasons_by_task.setdefault(task, []).extend(group_reasons)
    return {
        task: min(set.intersection(*reasons), default="in each row group, its label, mask or weight excludes every row")
        for task, reasons in reasons_by_task.items()
        if reasons and all(reasons)
    }


def _list_statistics_checks(form: ResolvedReadPlan) -> Iterator[tuple[str, ChunkTest]]:
    """Yield (column, function that returns True if a chunk of the column contains values that the plan forbids)."""
    schema = form.schema
    for name in (*form.plan.labels, *schema.dense):
        is_label = name in schema.labels
        allowed, may_be_null = form.plan.label_range(name), is_label and form.plan.skips_nulls(name)
        yield name, partial(_has_invalid_values, allowed=allowed if is_label else None, null=may_be_null)
    for read in form.plan.task_columns:
        is_mask = read.role == "mask"
        yield read.column, partial(_has_invalid_values, allowed=(0, 1 if is_mask else MAX_FLOAT32), null=is_mask)
    for name, spec in schema.sparse.items():
        table, column = schema.tables[spec.table], schema.get_ids_column(name)
        if table.out_of_range == "error" and not table.ids:
            yield column, partial(_has_invalid_values, allowed=(0, table.rows - 1), null=True)


def _list_exclusion_conditions(task: TaskRows, of_candidates: bool) -> Iterator[tuple[str, str, ChunkTest]]:
    """Yield (column, reason why no row is usable, function that returns True if the reason applies to a chunk)."""
    if of_candidates:  # Parquet counts empty lists as nulls
        yield task.label, f"its label '{task.label}' has no candidate with a value in any row", _is_all_null
    elif task.nulls == "skip":
        yield task.label, f"its label '{task.label}' is null in every row", _is_all_null
    for mask in (task.mask, task.mask_label):
        if mask:
            yield mask, f"its mask '{mask}' is not 1 in any row", partial(_stays_below, bound=1, reaches=True)
    if task.sample_weight:
        why = f"its sample weight '{task.sample_weight}' is 0 in every row"
        yield task.sample_weight, why, partial(_stays_below, bound=0, reaches=False)


def _is_all_null(chunk: pq.ColumnChunkMetaData) -> bool:
    statistics = chunk.statistics if chunk.is_stats_set else None
    return bool(statistics and statistics.has_null_count and statistics.null_count == chunk.num_values)


def _stays_below(chunk: pq.ColumnChunkMetaData, bound: float, reaches: bool) -> bool:
    """Return True if the statistics show only nulls and numbers < `bound` (`reaches` True) or ≤ `bound` (False)."""
    if _is_all_null(chunk):
        return True
    _, greatest = _bounds(chunk) or (None, math.inf)
    return greatest < bound if reaches else greatest <= bound


def _has_invalid_values(chunk: pq.ColumnChunkMetaData, allowed: tuple[float, float] | None, null: bool) -> bool:
    """Return True if the statistics show a number outside of `allowed` or, unless `null` is True, a null."""
    if not null and chunk.statistics.has_null_count and chunk.statistics.null_count:
        return True
    bounds = _bounds(chunk) if allowed else None
    return bool(bounds and (bounds[0] < allowed[0] or bounds[1] > allowed[1]))


def _parse_bound(text: str | None) -> set[float]:
    """Return the set of a label's only value, given as text; empty for None, UNKNOWN_BOUNDS if it is not a number."""
    try:
        return set() if text is None else {float(text)}
    except ValueError:
        return set(UNKNOWN_BOUNDS)


def _bounds(chunk: pq.ColumnChunkMetaData) -> tuple[Any, Any] | None:
    """Return the smallest and largest number of a chunk; None if the statistics do not contain them."""
    statistics = chunk.statistics if chunk.is_stats_set else None
    has_numbers = statistics and statistics.has_min_max and isinstance(statistics.min, int | float | Decimal)
    return (statistics.min, statistics.max) if has_numbers else None
