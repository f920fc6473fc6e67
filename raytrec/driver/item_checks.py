"""Checks of the items of eval.retrieval, and of the keys by which rows of the data refer to items.

An item's key is its value in the column eval.retrieval.item.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raytrec.common.errors import DataError
from raytrec.common.formatting import format_count
from raytrec.config.features import resolve_input_columns, select_needed_transforms
from raytrec.config.tasks import RetrievalSection
from raytrec.config.transforms import Sample
from raytrec.data.arrow import is_text, plain, to_plain_array, value_type
from raytrec.data.column_conversion import Place
from raytrec.data.files.footers import read_footer
from raytrec.data.fragments import Dataset, RowGroup
from raytrec.data.ids import NULL_KEY, compute_group_keys, compute_row_keys
from raytrec.data.pages.decode import decode_columns
from raytrec.data.transform import apply_transforms

SAMPLE_ROWS = 1000  # number of rows, the first of a dataset's first row group, that `check_item_ids` reads
MIN_KNOWN_SHARE = 0.05  # share of seen items above which a column is assumed to contain keys
MIN_MATCHING_SHARE = 0.5  # share of a row's known items above which a column refers to the same items


def read_columns(dataset: Dataset, group: RowGroup, columns: list[str], rows: int) -> pa.Table:
    """Read columns of the first `rows` rows of a row group, and apply the transforms that produce these columns.

    The result can contain further columns, which the transforms read or write.

    Raises:
        DataError: The row group cannot be decoded, or a transform fails.
    """
    transforms = select_needed_transforms(dataset.form.plan.transforms, columns)
    inputs, rows = resolve_input_columns(transforms, columns), min(rows, group.rows)
    table = decode_columns(group.path, group.index, 0, rows, inputs, dataset.form.folders)
    where = f"{group.path}, row group {group.index}"
    return apply_transforms(table, transforms, where, dataset.form.plan.folder)


def read_keys(items: Dataset, column: str) -> np.ndarray:
    """Read a column of all items as keys: int64 [items], encoded by `data.ids.compute_group_keys`.

    Raises:
        DataError: As in `read_columns`.
    """
    tables = (read_columns(items, group, [column], group.rows) for group in items.groups)
    return np.concatenate([compute_group_keys(to_plain_array(table[column])) for table in tables])


def check_item_keys(items: Dataset, column: str) -> None:
    """Check that each item has a key, and that no two items have the same key; the keys of all items are read.

    Raises:
        DataError: The key comes from folder names, the files cannot be read, or an item has no key or the key of an
            earlier item. For an item, the error names the file, row group and row.
    """
    option = items.form.plan.reserved.named_by.get(column, "eval.retrieval.item")
    if column in items.form.from_folders:
        raise DataError(
            f"the item key '{column}' comes from the names of the folders, not from a column",
            where=items.uri,
            expected="a column with a unique key for each item",
            do=f"choose another column ({option})",
        )
    keys = read_keys(items, column)
    if len(missing := np.flatnonzero(keys == NULL_KEY)):
        raise DataError(
            f"the items have {format_count(len(missing), 'missing key')}",
            where=_place(items, column, int(missing[0])),
            expected="a key per item",
            do=f"remove the items, or choose another column of keys ({option})",
        )
    order = np.argsort(keys, kind="stable")
    if len(duplicates := order[1:][keys[order[1:]] == keys[order[:-1]]]):
        raise DataError(
            f"the items contain {format_count(len(duplicates), 'duplicate key')}",
            where=_place(items, column, int(duplicates.min())),
            expected="one row for each item",
            do=f"remove the duplicates, or choose another column of keys ({option})",
        )


def _place(items: Dataset, column: str, row: int) -> str:
    """Return the file, row group, column and row of a row number of the dataset as text for messages."""
    for group in items.groups:
        if row < group.rows:
            break
        row -= group.rows
    return Place(group.path, group.index, 0).of(column, row)


def check_item_types(section: RetrievalSection, items: Dataset, dataset: Dataset) -> None:
    """Check in the footers that the columns that refer to items are text if and only if the items' key is text.

    The columns are right_items (default: item) and those in `seen`. Columns that the dataset lacks are not checked.

    Raises:
        DataError: A column is text and the key is not, or vice versa.
    """
    key_type, types = items.form.types[section.item], dataset.form.types
    for column in (section.right_column, *section.seen):
        kind = types.get(column) and value_type(types[column])
        if kind is not None and is_text(kind) != is_text(key_type) and not pa.types.is_null(kind):
            raise DataError(
                f"column '{column}' has type {kind}, but the item key has type {key_type}",
                where=f"{dataset.uri}, eval.retrieval.items={section.items}",
                expected="item keys of the same type in all data",
                do="set another column in eval.retrieval, or use data.transforms: {do: cast, …}",
            )


def check_item_ids(section: RetrievalSection, items: Dataset, dataset: Dataset) -> None:
    """Check on a sample of rows that the columns of eval.retrieval refer to items by the items' key.

    These columns are right_items (default: item), which contains the relevant items of a row, and those in `seen`.
    The features of a row name items as well: its target item, and histories that look up the same table. The relevant
    items include the target item, and seen items usually include most of a history. The check counts how many of
    these items a column contains, if its values are taken as values of each column of the items. It rejects a column
    that matches another column of the items, and not the key. Without histories, it rejects a column of seen items if
    most of its values occur in another column of the items, and almost none is a key. If no id feature is unique per
    item, nothing is checked.

    Args:
        section: Section eval.retrieval of the run.
        items: Dataset of eval.retrieval.items.
        dataset: Dataset for whose rows the items are ranked.

    Raises:
        DataError: A column refers to items by a column other than the key, or the items cannot be read.
    """
    read = cache(partial(read_keys, items))
    schema = dataset.form.schema
    columns = {schema.get_ids_column(name): name for name in items.form.singles}
    ordered = sorted(columns, key=lambda column: column != section.item)
    own_key = next((column for column in ordered if len(np.unique(read(column))) == len(read(column))), None)
    if own_key is None or not dataset.groups:
        return
    sampled = {each.column for each in dataset.form.plan.transforms if isinstance(each, Sample)}
    table = schema.sparse[columns[own_key]].table
    same_table = {schema.get_ids_column(f) for f in dataset.form.lists if schema.sparse[f].table == table}
    histories = sorted(same_table - sampled)
    sources = {section.right_column: [own_key]} | dict.fromkeys(section.seen, histories)
    try:
        rows = read_columns(dataset, dataset.groups[0], list({own_key, *histories, *sources}), SAMPLE_ROWS)
    except DataError:
        return  # the workers will raise or skip the same error when they read the rows
    for column, references in sources.items():
        known_pairs = [_pairs(rows[each], read(own_key)) for each in references]
        count = 0 if references else len(compute_row_keys([rows[column]])[1])
        for key in (section.item, *_find_id_columns(items)):
            pairs = _pairs(rows[column], read(key))
            shares = [np.isin(each, pairs).mean() for each in known_pairs if len(each)]
            shares += [len(pairs) / count] if count else []
            least = MIN_MATCHING_SHARE if references or key != section.item else MIN_KNOWN_SHARE
            if not any(share > least for share in shares):
                continue
            if key == section.item:
                break
            raise DataError(
                f"column '{column}' refers to items by '{key}', not by '{section.item}'",
                where=f"{dataset.groups[0].path}, eval.retrieval.item={section.item}",
                expected=f"values of {section.item} in {items.uri}",
                do=f"set eval.retrieval.item={key}, or write {column} with values of {section.item}",
            )


def _find_id_columns(items: Dataset) -> list[str]:
    """Return the columns of the items' files that contain integers or text."""
    fields = read_footer(items.groups[0].path).schema.to_arrow_schema()
    return [each.name for each in fields if pa.types.is_integer(plain(each.type)) or is_text(plain(each.type))]


def _pairs(column: pa.ChunkedArray, keys: np.ndarray) -> np.ndarray:
    """Encode each pair (row, id) as row · len(keys) + index of the id in `keys`; omit ids that `keys` lacks.

    The result is int64 [pairs], or float64 [pairs] if ids were omitted.
    """
    counts, ids = compute_row_keys([column])
    place = pc.index_in(pa.array(ids), value_set=pa.array(keys)).to_numpy(zero_copy_only=False)
    pairs = np.repeat(np.arange(len(counts)), counts) * len(keys) + place
    return pairs[~np.isnan(pairs)] if pairs.dtype.kind == "f" else pairs
