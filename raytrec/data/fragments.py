"""A dataset as an ordered list of row groups."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
import pyarrow as pa

from raytrec.common.errors import DataError
from raytrec.config.features import with_rows
from raytrec.data.arrow import empty_table, is_list, plain, select_schema
from raytrec.data.footers import Footer, read_footer, why_empty
from raytrec.data.form import Form, ReadPlan
from raytrec.data.kinds import check_present, check_types
from raytrec.data.listing import Listing, list_files, name_of
from raytrec.data.partitions import ALL, Between, find_in_folders, folder_types, in_folders
from raytrec.data.transform import apply_transforms


@dataclass(frozen=True)
class Split:
    """Subset of a row group's rows: those held out of training, or the others.

    Of each full block of `every` consecutive rows one row is held out, at a pseudorandom place that depends
    on (total, every) alone.

    Attributes:
        total: Rows of the whole row group.
        every: Rows of a block.
        held: True for the held-out rows, False for the others.
    """

    total: int
    every: int
    held: bool

    def rows(self) -> np.ndarray:
        """Return the places of the rows in their row group, int64, ascending."""
        return _rows_of(self)


@lru_cache(maxsize=16)
def _rows_of(split: Split) -> np.ndarray:
    blocks, held = split.total // split.every, np.zeros(split.total, bool)
    places = np.random.default_rng((split.total, split.every)).integers(0, split.every, blocks)
    held[np.arange(blocks) * split.every + places] = True
    return np.flatnonzero(held == split.held)


@dataclass(frozen=True)
class RowGroup:
    """One row group of one Parquet file.

    Attributes:
        path: Path or URI that `storage.open_filesystem` opens.
        index: Number of the row group in its file.
        rows: Rows that the dataset has of it.
        split: Subset that these rows are; None: all rows of the row group.
    """

    path: str
    index: int
    rows: int
    split: Split | None = None


@dataclass(frozen=True)
class Dataset:
    """Row groups in file order: files by path, groups by index, empty ones skipped.

    Attributes:
        uri: where it is, for messages.
        form: how its rows are read.
        left_out: what was wrong with files that are skipped (data.on_error: skip).
        accused: row groups that a run will stop at, as far as footers show (footers.py).
        empty_tasks: tasks in which no row counts, as far as footers show → why.
        constant_labels: labels of one value, as far as footers show → that value.
        log_odds: Initial bias of each column of logits (train.initial_bias); () if they stay as drawn.
        listing: files of its folders, and why others are left out.
    """

    uri: str
    groups: tuple[RowGroup, ...]
    form: Form
    left_out: tuple[DataError, ...] = ()
    accused: tuple[RowGroup, ...] = ()
    empty_tasks: Mapping[str, str] = field(default_factory=dict)
    constant_labels: Mapping[str, float] = field(default_factory=dict)
    log_odds: tuple[float, ...] = ()
    listing: Listing = field(default_factory=Listing)

    def hold_out(self, every: int) -> tuple[Dataset, Dataset | None]:
        """Split off one row of each block of `every` rows (Split).

        Returns:
            The dataset without these rows, and the held-out rows; None if every row group has fewer rows.
        """

        def part(held: bool) -> Dataset:
            splits = (Split(group.rows, every, held) for group in self.groups)
            groups = (
                replace(g, rows=len(s.rows()), split=s) for g, s in zip(self.groups, splits, strict=True)
            )
            return replace(self, groups=tuple(group for group in groups if group.rows))

        held = replace(part(held=True), accused=(), left_out=(), listing=Listing())
        return (part(held=False), held) if held.groups else (self, None)

    @cached_property
    def rows(self) -> int:
        """Rows of all groups."""
        return sum(group.rows for group in self.groups)


def scan(
    places: str | list[str],
    plan: ReadPlan,
    key: str = "data",
    *,
    between: Between = ALL,
    declared: Iterable[str] = (),
    skip: bool = False,
) -> Dataset:
    """Reads the footers of folders (or files) of Parquet and checks every file's columns against the plan.

    Args:
        places: folders (searched recursively; names that begin with `_` or `.` are skipped) or files.
        key: the config key that named them, for messages.
        between: first and last partition to read.
        declared: further columns that are to be there and could be reserved.
        skip: skip files that are not whole, or whose columns are not the plan's.

    Raises:
        DataError: nothing there, no rows, a file that is not whole, a column missing or of the wrong type.
    """
    listing, left_out = list_files(places, key, between), []
    plan = replace(plan, transforms=with_rows(plan.transforms, plan.schema), folder=os.getcwd())
    form, columns = Form(plan), dict.fromkeys([*plan.reserved.columns, *declared])
    # Ids that are hashed or managed are text, so that no other folder changes the row of `4`.
    schema = plan.schema
    text = {schema.column_of(n) for n, spec in schema.sparse.items() if schema.tables[spec.table].takes_text}
    looking = Form(
        replace(plan, reserved=replace(plan.reserved, columns=tuple(columns))),
        types=folder_types(listing.files, text),
    )

    def look(file: str) -> _Seen | None:
        try:
            return _look(file, looking)
        except DataError as error:
            if not skip:
                raise
            left_out.append(error)
            return None

    with ThreadPoolExecutor(16) as pool:
        seen = [found for found in pool.map(look, listing.files) if found is not None]
    types, from_folders, odd = _agree(seen, form.plan.reserved.names, looking.types)
    if odd and not skip:
        raise next(iter(odd.values()))
    left_out += odd.values()
    seen = [found for found in seen if found.uri not in odd]
    form = replace(form, types=types, from_folders=from_folders)
    found_groups = tuple(group for found in seen for group in found.groups)
    if not found_groups:
        raise DataError(
            "there are no rows",
            where=f"{key}={name_of(places)}",
            expected=f"rows in its {listing}"
            + (f", of which {len(left_out)} are skipped: {left_out[0].what}" if left_out else ""),
        )
    lists = frozenset().union(*(found.lists for found in seen))
    bad = tuple(g for found in seen for g in found.groups if not skip and g.index in found.accused)
    empty = why_empty(found.excluded for found in seen)
    constant = dict(set.intersection(*(set(found.constant.items()) for found in seen if found.groups)))
    form = replace(form, lists=lists)
    return Dataset(
        name_of(places), found_groups, form, tuple(left_out), bad, empty, constant, listing=listing
    )


@dataclass(frozen=True)
class _Seen:
    """Contents of a file's footer.

    Attributes:
        uri: Path or URI of the file.
        types: Types of its key columns and reserved columns.
        from_folders: Columns that the file does not hold, and the names of its folders do.
        groups: Row groups with rows.
        lists: Sparse features that are lists in it, after the transforms.
        accused: Indexes of row groups that contradict the schema (footers.Footer).
        excluded: Task → why no row counts in each row group (footers.Footer).
        constant: Labels of one value → that value (footers.Footer).
    """

    uri: str
    types: Mapping[str, pa.DataType]
    from_folders: frozenset[str]
    groups: list[RowGroup]
    lists: set[str]
    accused: list[int]
    excluded: dict[str, list[set[str]]]
    constant: dict[str, float]


def _look(uri: str, form: Form) -> _Seen:
    metadata, schema = read_footer(uri), form.schema
    arrow = metadata.schema.to_arrow_schema()
    form = replace(form, from_folders=find_in_folders(arrow, form, uri))
    for name in form.from_folders:
        arrow = arrow.append(pa.field(name, form.types[name]))
    check_present(arrow, form.columns, uri, form)
    arrow = select_schema(arrow, form.columns)
    if form.plan.transforms:
        arrow = apply_transforms(empty_table(arrow), form.plan.transforms, uri, form.plan.folder).schema
        check_present(arrow, form.wanted, f"{uri}, after data.transforms", form, fields=False)
    check_types(arrow, form, uri)
    lists = {name for name in schema.sparse if is_list(arrow.field(schema.column_of(name)).type)}
    counts = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    groups = [RowGroup(uri, i, rows) for i, rows in enumerate(counts) if rows]
    types = {name: plain(arrow.field(name).type) for name in form.plan.reserved.names}
    footer = Footer(metadata, form)
    facts = groups, lists, footer.accused(), footer.excluded(), footer.constant_labels()
    return _Seen(uri, types, form.from_folders, *facts)


def _agree(
    files: Sequence[_Seen], names: Sequence[str], kinds: Mapping[str, pa.DataType]
) -> tuple[dict[str, pa.DataType], frozenset[str], dict[str, DataError]]:
    """Return the types of reserved columns in all files together.

    A column that is in folders' names anywhere is read from there everywhere.

    Args:
        files: Contents of the footers.
        names: Reserved columns.
        kinds: Types of the folders' keys (folder_types).

    Returns:
        Column → type; columns that folders' names hold; file → error, of files that do not fit the files
        before.
    """
    from_folders = frozenset().union(*(file.from_folders for file in files))
    types: dict[str, pa.DataType] = {}
    odd: dict[str, DataError] = {}
    for file in files:
        in_path = in_folders(file.uri)
        merged = {n: _common_type(types.get(n), file.types[n]) for n in names if n not in from_folders}
        if name := next((n for n in from_folders if n not in in_path), None):
            odd[file.uri] = DataError(
                f"column '{name}' is missing: other files are in folders {name}=…",
                where=file.uri,
                expected="all files in such folders",
                do=f"move the file into a folder {name}=VALUE, or name another column",
            )
        elif name := next((n for n, kind in merged.items() if kind is None), None):
            odd[file.uri] = DataError(
                f"reserved column '{name}' is {file.types[name]} here, and {types[name]} in the files before",
                where=f"{file.uri}, column {name}",
                expected="one type in all files, or integers, or texts, of several widths",
                do="write the files with one type, or use data.transforms: {do: cast, …}",
            )
        else:
            types = merged
    types |= {name: kinds[name] for name in from_folders}
    return types, from_folders, odd


def _common_type(known: pa.DataType | None, other: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of both, such as int64 of int32 and int64, or None."""
    if known is None or known == other:
        return other
    both = [pa.schema([("x", kind)]) for kind in (known, other)]
    try:
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None
