"""Datasets, which are ordered lists of row groups, and the scan of their files' footers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby

import numpy as np
import pyarrow as pa

from raytrec.common.errors import DataError
from raytrec.common.formatting import format_count
from raytrec.common.storage import extract_path
from raytrec.config.features import set_draw_rows
from raytrec.data.arrow import empty_table, find_common_type, is_list, is_text, plain, select_schema
from raytrec.data.files.footers import FooterStatistics, explain_empty_tasks, read_footer
from raytrec.data.files.listing import Listing, join_folder_names, list_files
from raytrec.data.files.partitions import (
    ALL_PARTITIONS,
    PartitionBounds,
    find_folder_columns,
    infer_folder_types,
    parse_folder_values,
)
from raytrec.data.read_plans import ReadPlan, ResolvedReadPlan
from raytrec.data.transform import apply_transforms
from raytrec.data.type_checks import (
    IdKinds,
    check_present,
    check_types,
    compare_id_kinds,
    find_id_kinds,
    find_input_kinds,
    name_input,
)


@dataclass(frozen=True)
class Split:
    """Subset of a row group: either the rows held out from training or all other rows.

    In each full block of `every` consecutive rows, one row is held out. The rows are pseudorandom; they depend
    only on `total` and `every`.

    Attributes:
        total: Number of rows in the whole row group.
        every: Number of rows per block.
        is_holdout: True for the held-out rows, False for the other rows.
    """

    total: int
    every: int
    is_holdout: bool

    def rows(self) -> np.ndarray:
        """Return the indexes of the subset's rows in the row group, int64 [rows], ascending."""
        return _split_rows(self)


@lru_cache(maxsize=16)
def _split_rows(split: Split) -> np.ndarray:
    blocks, is_held_out = split.total // split.every, np.zeros(split.total, bool)
    places = np.random.default_rng((split.total, split.every)).integers(0, split.every, blocks)
    is_held_out[np.arange(blocks) * split.every + places] = True
    return np.flatnonzero(is_held_out == split.is_holdout)


@dataclass(frozen=True)
class RowGroup:
    """Row group of a Parquet file.

    Attributes:
        path: Path or URI of the file, as accepted by `storage.open_filesystem`.
        index: Index of the row group in its file.
        rows: Number of rows that the dataset reads from the row group.
        split: Subset of the row group's rows that the dataset reads; None: all rows.
    """

    path: str
    index: int
    rows: int
    split: Split | None = None


@dataclass(frozen=True)
class Dataset:
    """Row groups of a dataset in file order, and facts derived from the files' footers.

    Attributes:
        uri: Names of the dataset's folders, joined by commas, for messages.
        groups: Nonempty row groups in file order, then by index.
        form: Resolved read plan of the rows.
        left_out: Errors of skipped files (data.on_error: skip).
        suspect_groups: Row groups whose statistics show values that would stop a run (footers.py); () if
            such rows are skipped.
        empty_tasks: Task → reason, for tasks that use no row according to the footers.
        constant_labels: Label → value, for labels with a single value according to the footers.
        large_columns: Dense column → largest absolute value, for unscaled columns with large values according to the
            footers.
        text_ids: Sparse feature or input of a transform → True if its ids are text (type_checks.IdKinds).
        log_odds: Initial bias of each logit column (train.initial_bias); (): biases are not changed.
        listing: Files found in the folders, and reasons why other files are skipped.
    """

    uri: str
    groups: tuple[RowGroup, ...]
    form: ResolvedReadPlan
    left_out: tuple[DataError, ...] = ()
    suspect_groups: tuple[RowGroup, ...] = ()
    empty_tasks: Mapping[str, str] = field(default_factory=dict)
    constant_labels: Mapping[str, float] = field(default_factory=dict)
    large_columns: Mapping[str, float] = field(default_factory=dict)
    text_ids: IdKinds = field(default_factory=dict)
    log_odds: tuple[float, ...] = ()
    listing: Listing = field(default_factory=Listing)

    def hold_out(self, every: int) -> tuple[Dataset, Dataset | None]:
        """Hold out one row of each full block of `every` rows of a row group (Split).

        Returns:
            The dataset without the held-out rows, and the dataset of held-out rows. If every row group has
            fewer than `every` rows, this dataset and None.
        """

        def part(is_held_out: bool) -> Dataset:
            splits = (Split(group.rows, every, is_held_out) for group in self.groups)
            groups = (replace(g, rows=len(s.rows()), split=s) for g, s in zip(self.groups, splits, strict=True))
            return replace(self, groups=tuple(group for group in groups if group.rows))

        held_out = replace(part(is_held_out=True), suspect_groups=(), left_out=(), listing=Listing())
        return (part(is_held_out=False), held_out) if held_out.groups else (self, None)

    def split_after_first_folder(self, batch_rows: int) -> dict[int, Dataset]:
        """Return datasets of the folders after the first, keyed by the index of the step that reads their first row.

        The rows must be trained in file order. Folders that begin in the same global batch form one dataset.
        Folders that begin in the first global batch are left out.

        Args:
            batch_rows: Number of rows in a global batch.
        """
        steps: dict[int, list[RowGroup]] = {}
        first = 0
        for _, members in groupby(self.groups, lambda group: extract_path(group.path).rpartition("/")[0]):
            groups = list(members)
            steps.setdefault(first // batch_rows, []).extend(groups)
            first += sum(group.rows for group in groups)
        steps.pop(0)
        return {step: replace(self, groups=tuple(groups)) for step, groups in steps.items()}

    @cached_property
    def rows(self) -> int:
        """Return the total number of rows."""
        return sum(group.rows for group in self.groups)


def scan(
    places: str | list[str],
    plan: ReadPlan,
    key: str = "data",
    *,
    between: PartitionBounds = ALL_PARTITIONS,
    declared: Iterable[str] = (),
    skip: bool = False,
    trained: IdKinds | None = None,
) -> Dataset:
    """Read the footers of a dataset's Parquet files, and check every file's columns against the plan.

    Transforms are applied to tables without rows, for which the modules of user-defined transforms are imported.

    Args:
        places: A folder or file, or a list of them; see `list_files`.
        plan: Read plan of the run.
        key: Config key that names the folders, for messages.
        between: First and last partition to read, both included; default: all partitions.
        declared: Additional columns that must exist and have a type that can be reserved; they are not read.
        skip: True to skip files that are damaged or whose columns do not fit the plan.
        trained: Kinds of ids in the training data, which the files must have. None: the most common kinds.

    Raises:
        ConfigError: No feature looks up the ids of a transform `sample`, or these ids are managed (`set_draw_rows`).
        DataError: There are no files or no rows, a file is damaged, a transform fails, or a column is missing,
            ambiguous or of a wrong type, or its types in several files are incompatible. With `skip`, errors of single
            files are returned in Dataset.left_out instead.
    """
    listing, left_out = list_files(places, key, between), []
    plan = replace(plan, transforms=set_draw_rows(plan.transforms, plan.schema), folder=os.getcwd())
    # Folder keys used as hashed or managed ids are read as text. Otherwise, a new folder could turn a key's
    # type from integer to text, which would change the hash of `4`.
    schema = plan.schema
    text = {schema.get_ids_column(n) for n, spec in schema.sparse.items() if schema.tables[spec.table].takes_text}
    reserved = replace(plan.reserved, columns=tuple(dict.fromkeys([*plan.reserved.columns, *declared])))
    scan_form = ResolvedReadPlan(replace(plan, reserved=reserved), types=infer_folder_types(listing.files, text))

    def scan_file(file: str) -> _FileFacts | None:
        try:
            return _scan_footer(file, scan_form)
        except DataError as error:
            if not skip:
                raise
            left_out.append(error)
            return None

    with ThreadPoolExecutor(16) as pool:
        files = [facts for facts in pool.map(scan_file, listing.files) if facts is not None]
    types, from_folders, odd_types = _unify_types(files, plan.reserved.names, scan_form.types)
    raw = from_folders - {name for transform in plan.transforms for name in transform.writes}
    folder_ids = {n: is_text(types[c]) for n in schema.sparse if (c := schema.get_ids_column(n)) in raw}
    folder_ids |= {name_input(name): is_text(types[name]) for name in raw}
    kinds_of_files = [
        (facts.uri, sum(g.rows for g in facts.groups), {n: folder_ids.get(n, k) for n, k in facts.text_ids.items()})
        for facts in files
        if facts.uri not in odd_types
    ]
    text_ids, odd_ids = compare_id_kinds(kinds_of_files, trained or {})
    odd_types |= odd_ids
    if odd_types and not skip:
        raise next(iter(odd_types.values()))
    left_out += odd_types.values()
    files = [facts for facts in files if facts.uri not in odd_types]
    groups = tuple(group for facts in files for group in facts.groups)
    if not groups:
        raise DataError(
            "the dataset has no rows"
            + (f"; data.on_error=skip has skipped {format_count(len(left_out), 'file')}" if left_out else ""),
            where=f"{key}={join_folder_names(places)}",
            expected=f"at least one row in {listing}"
            + (f"; first error: {left_out[0].what} ({left_out[0].where})" if left_out else ""),
        )
    lists = frozenset().union(*(facts.lists for facts in files))
    suspect_groups = () if skip else tuple(group for facts in files for group in facts.suspect_groups)
    empty = explain_empty_tasks(facts.excluded for facts in files)
    bounds = {label: set().union(*(facts.label_bounds[label] for facts in files)) for label in plan.labels}
    constant = {label: next(iter(values)) for label, values in bounds.items() if len(values) == 1}
    large = {name: max(facts.large.get(name, 0.0) for facts in files) for facts in files for name in facts.large}
    form = ResolvedReadPlan(plan, lists, types, from_folders)
    facts_of_all = tuple(left_out), suspect_groups, empty, constant, large, text_ids
    return Dataset(join_folder_names(places), groups, form, *facts_of_all, listing=listing)


@dataclass(frozen=True)
class _FileFacts:
    """Facts derived from a file's footer.

    Attributes:
        uri: Path or URI of the file.
        types: Reserved column → its type in the file, after the transforms.
        from_folders: Columns whose values are in folder names instead of the file.
        groups: Row groups with rows.
        lists: Sparse features whose column is a list after the transforms.
        text_ids: Sparse feature or input of a transform → True if its ids in the file are text.
        suspect_groups: Row groups from FooterStatistics.list_suspect_groups.
        excluded: Result of FooterStatistics.list_exclusions.
        label_bounds: Result of FooterStatistics.label_bounds.
        large: Result of FooterStatistics.large_columns.
    """

    uri: str
    types: Mapping[str, pa.DataType]
    from_folders: frozenset[str]
    groups: list[RowGroup]
    lists: set[str]
    text_ids: IdKinds
    suspect_groups: list[RowGroup]
    excluded: dict[str, list[set[str]]]
    label_bounds: dict[str, set[float]]
    large: dict[str, float]


def _scan_footer(uri: str, form: ResolvedReadPlan) -> _FileFacts:
    metadata, schema = read_footer(uri), form.schema
    arrow = metadata.schema.to_arrow_schema()
    form = replace(form, from_folders=find_folder_columns(arrow, form, uri))
    for name in form.from_folders:
        arrow = arrow.append(pa.field(name, form.types[name]))
    check_present(arrow, form.columns, uri, form)
    arrow, footer = select_schema(arrow, form.columns), FooterStatistics(metadata, form)
    input_kinds: dict[str, bool] = {}
    if form.plan.transforms:
        arrow, input_kinds = _apply_to_empty_table(arrow, form, uri, footer)
        check_present(arrow, form.columns_after_transforms, f"{uri}, after data.transforms", form, fields=False)
    check_types(arrow, form, uri)
    lists = {name for name in schema.sparse if is_list(arrow.field(schema.get_ids_column(name)).type)}
    types = {name: plain(arrow.field(name).type) for name in form.plan.reserved.names}
    groups = {index: RowGroup(uri, index, group.num_rows) for index, group in footer.groups.items()}
    suspects = [groups[index] for index in footer.list_suspect_groups()]
    facts = suspects, footer.list_exclusions(), footer.label_bounds(parse_folder_values(uri)), footer.large_columns()
    text_ids = find_id_kinds(arrow, schema, footer) | input_kinds
    return _FileFacts(uri, types, form.from_folders, [*groups.values()], lists, text_ids, *facts)


def _apply_to_empty_table(
    arrow: pa.Schema, form: ResolvedReadPlan, uri: str, footer: FooterStatistics
) -> tuple[pa.Schema, dict[str, bool]]:
    """Return a file's schema after the transforms, and the kinds of the columns that they hash or look up (IdKinds)."""
    kinds: dict[str, bool] = {}
    table, written, folder_values = empty_table(arrow), set[str](), parse_folder_values(uri)

    def has_values(name: str) -> bool:
        if name in form.from_folders and name not in written:
            return folder_values[name] is not None
        return name in written or not footer.lacks_stored_values(name)

    for transform in form.plan.transforms:
        found = find_input_kinds(transform, table.schema, form.from_folders)
        kinds |= {name_input(name): kind for name, kind in found.items() if has_values(name)}
        table = apply_transforms(table, (transform,), uri, form.plan.folder)
        written |= {*transform.writes}
    return table.schema, kinds


def _unify_types(
    files: Sequence[_FileFacts], names: Sequence[str], kinds: Mapping[str, pa.DataType]
) -> tuple[dict[str, pa.DataType], frozenset[str], dict[str, DataError]]:
    """Return the common type of each reserved column over all files.

    A column that any file takes from folder names is read from folder names for every file.

    Args:
        files: Facts from the files' footers.
        names: Reserved columns.
        kinds: Types of folder-name keys (infer_folder_types).

    Returns:
        Column → type; columns that are read from folder names; path → error, for files that are incompatible
        with the other files.
    """
    from_folders = frozenset().union(*(file.from_folders for file in files))
    types: dict[str, pa.DataType] = {}
    errors: dict[str, DataError] = {}
    for file in files:
        folder_values = parse_folder_values(file.uri)
        merged = {n: find_common_type(types.get(n), file.types[n]) for n in names if n not in from_folders}
        if name := next((n for n in from_folders if n not in folder_values), None):
            errors[file.uri] = DataError(
                f"column '{name}' is stored in this file, but other files take it from folders {name}=…",
                where=file.uri,
                expected=f"all files in folders {name}=VALUE, or column '{name}' in all files",
                do=f"move the file into a folder {name}=VALUE, or write the column to all files",
            )
        elif name := next((n for n, kind in merged.items() if kind is None), None):
            errors[file.uri] = DataError(
                f"reserved column '{name}' has type {file.types[name]}, but {types[name]} in other files",
                where=f"{file.uri}, column {name}",
                expected="the same type in all files, or types that Arrow can promote to a common type",
                do="write all files with the same type, or use data.transforms: {do: cast, …}",
            )
        else:
            types = merged
    types |= {name: kinds[name] for name in from_folders}
    return types, from_folders, errors
