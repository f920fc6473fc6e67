"""Infer a schema and transforms from Parquet files.

The role of a column is inferred in this order (column_roles.py):

    label      named with --label, or called label, target, click, …; a transform (binarize) converts text
               and numbers outside [0, 1] to 0 and 1
    reserved   named with --reserve: kept with its rows, not a feature
    skipped    missing in a file, or of incompatible types; constant or only nulls; integers and text that
               differ in each row; copies of a label; dates and times (also integers that could be times
               since 1970)
    sparse     lists of integers or text (mean pooling; sequences if called history, clicked, …); text;
               whole numbers called …id; repeated integers that fill a range, wherever it begins, or are too
               large to be quantities; codes (few, often repeated integers in a range far above 0)
    weights    lists of floats named after a sparse list: tags_weights or tags_weight for tags
    dense      other numbers; if no column is sparse, they are also looked up in buckets (bucketize)

Struct fields are columns, such as user.age. Features share a table if their names and values agree, or if
they have many values in common that cannot agree by chance (text, ids with large gaps; shared_tables.py).

A table whose ids fill their range or are below 100,000 has one row for each id up to the highest, and `out_of_range:
clamp`. For ordinals (at most 100 values, such as an age), larger values are read as the highest value. Other larger
ids use one additional row, which is not trained. If only a sample was read, the table has a tenth more rows, and
larger ids are hashed. Text, negative ids, and ids from 100,000 on with large gaps are hashed. Their table has at
least ten rows per value (two if there are many values), so that frequent values rarely share a row
(shared_tables.py). Whole floats are treated like integers.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from raytrec.common.errors import ConfigError, DataError, SchemaError, make_unknown_word_error
from raytrec.common.storage import find_sibling_parts, find_train_folder
from raytrec.config.schema import Schema
from raytrec.inspection.column_roles import LABEL_NAMES, Finding, fill_weights, find_reserved, find_role, has_label_name
from raytrec.inspection.column_scan import scan_columns
from raytrec.inspection.column_stats import ColumnStats
from raytrec.inspection.result import Inspection, to_flow_yaml
from raytrec.inspection.shared_tables import (
    SharedTable,
    bucket_boundaries,
    find_tables,
    has_history_name,
    make_table_name,
)

MIN_COPY_ROWS = 100  # with at most this many rows, a column may agree with a label by chance
# Order of transforms. In lists, all except fill_null remove nulls, but not the weights of the nulls.
ORDER = ("fill_null", "cast", "drop_null", "binarize", "clip", "bucketize")


def inspect(
    uri: str,
    *,
    dim: int = 16,
    labels: list[str] | None = None,
    reserve_columns: list[str] | None = None,
    max_rows: int | None = None,
) -> Inspection:
    """Infer a schema from Parquet files, which are read one row group at a time.

    Args:
        uri: Folder or file; local, s3:// or gs://. In a folder with train/, valid/ and test/, train/ is
            inspected, and the other folders are read for ids, nulls and types. A folder train/ next to such
            folders is treated in the same way.
        dim: Width of the embeddings of all tables; a multiple of 4.
        labels: Columns to predict; default: columns with a name that is common for labels (LABEL_NAMES).
        reserve_columns: Columns, also from key=value folders, to keep with their rows instead of using them
            as features.
        max_rows: Approximate number of rows to read from each of training, validation and test data, in row
            groups spread over the files; None: all rows.

    Returns:
        Inspection with the proposed schema, the transforms that it needs, and a reason for the role of each column.

    Raises:
        DataError: The path is empty, contains no Parquet files or rows, or cannot be read.
        SchemaError: No label or no feature is recognized, a named column is missing or unsuitable, or `dim` is invalid.
        ConfigError: `max_rows` is less than one.
    """
    if not uri.strip():
        raise DataError("the path of the data is empty", where="raytrec inspect", expected="a Parquet file or folder")
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"cannot read {max_rows} rows", where="--rows", expected="a number ≥ 1")
    uri, labels, reserve_columns = find_train_folder(uri), labels or [], list(dict.fromkeys(reserve_columns or []))
    scan = scan_columns(
        uri, max_rows, find_sibling_parts(uri), lambda name: name in labels if labels else has_label_name(name)
    )
    names = [column.name for column in scan.columns]
    _check_columns_exist(labels, names, uri)
    _check_columns_exist(reserve_columns, [*names, *scan.folders], uri)
    plain_labels = any(has_label_name(c.name) and c.is_probability for c in scan.columns)
    findings = [
        find_reserved(column)
        if column.name in reserve_columns and column.name not in labels
        else find_role(column, labels, plain_labels)
        for column in scan.columns
    ]
    _check_has_label(findings, uri)
    _skip_copies(findings)
    _pair_weights(findings)
    _add_buckets(findings)
    tables = find_tables(findings)
    schema = _schema(findings, tables, dim, not scan.whole, uri)
    return Inspection(uri, findings, schema, _transforms(findings), tables, scan, reserve_columns)


def _add_buckets(findings: list[Finding]) -> None:
    """If no column is sparse, add transforms that also turn dense columns into ids of buckets."""
    if any(f.kind == "sparse" for f in findings):
        return
    taken = {f.stats.name for f in findings}
    for f in findings:
        if f.kind == "dense":
            into = make_table_name(f"{f.stats.name}_bucket", taken)
            taken.add(into)
            f.add_transform("bucketize", boundaries=bucket_boundaries(f.stats.scale()), into=[into])
            f.notes.append("also looked up in buckets, because no column contains ids")


def _check_columns_exist(named: list[str], names: list[str], uri: str) -> None:
    if missing := [name for name in named if name not in names]:
        what, expected = f"there is no column '{missing[0]}'", f"one of {', '.join(names[:50])}"
        raise make_unknown_word_error(what, missing[0], names, uri, expected, kind=SchemaError)


def _check_has_label(findings: list[Finding], uri: str) -> None:
    if any(f.kind == "label" for f in findings):
        return
    likely = [f.stats.name for f in findings if f.stats.is_probability and f.stats.distinct == 2]
    ratings = [f.stats.name for f in findings if f.kind in ("dense", "sparse") and _could_be_rating(f.stats)]
    others = f"; columns of few values, which a transform can convert to 0 and 1: {', '.join(ratings[:20])}"
    raise SchemaError(
        "cannot determine the label column",
        where=uri,
        expected=f"a column named {', '.join(LABEL_NAMES[:5])} or similar",
        do=f"pass --label COLUMN; columns of two values in [0, 1]: {', '.join(likely[:20]) or 'none'}"
        + (others if ratings else ""),
    )


def _skip_copies(findings: list[Finding]) -> None:
    """Change the role of dense and sparse columns that copy a label to skipped."""
    labels = [f.stats.name for f in findings if f.kind == "label"]
    for f in findings:
        if f.kind in ("dense", "sparse") and (label := next((n for n in labels if _is_copy(f.stats, n)), None)):
            f.kind, f.why, f.notes = "skipped", f"copies the label {label}", []


def _is_copy(column: ColumnStats, label: str) -> bool:
    """Return True if the values of a column and a label correspond one to one; null and NaN count as one value."""
    pairs = column.pairs.get(label) or {}
    return column.rows > MIN_COPY_ROWS and len(pairs) >= 2 and len(set(pairs.values())) == len(pairs)


def _could_be_rating(s: ColumnStats) -> bool:
    return not s.is_list and s.few is not None and 2 <= len(s.few) <= 11 and not s.is_probability


def _pair_weights(findings: list[Finding]) -> None:
    """Change the role of each list of floats named after a list of ids to weights, e.g. tags_weights for tags.

    Both columns must have equally many lists of each length. Null ids are replaced by an additional id, because removal
    would shorten their lists.
    """
    lists = {f.stats.name: f for f in findings if f.kind == "sparse" and f.stats.is_list}
    for f in findings:
        name = f.stats.name
        owner = re.sub("_weights?$", "", name)
        owner = f"{name.removesuffix('.value')}.key" if name.endswith(".value") else owner  # of a map
        floats = f.stats.is_list and f.stats.base in ("float", "decimal") and not f.stats.trouble
        if floats and owner in lists and owner != name:
            if not np.array_equal(f.stats.lengths, lists[owner].stats.lengths):
                f.why = f"lists of floats whose lengths differ from the lengths in {owner}"
                continue
            f.kind, f.why, f.transforms = "weights", f"of {owner}", []
            fill_weights(f)
            _keep_length(lists[owner])


def _keep_length(f: Finding) -> None:
    """Replace the transform that removes nulls from a weighted list by a transform to one additional id."""
    kept = [t for t in f.transforms if t["do"] != "drop_null"]
    if len(kept) < len(f.transforms):
        f.transforms, is_text = kept, f.stats.base == "text"
        if not is_text:
            f.stats.high = max(int(f.stats.highest) + 1, 0)
        f.add_transform("fill_null", value="" if is_text else f.stats.high)


def _schema(findings: list[Finding], tables: list[SharedTable], dim: int, sampled: bool, uri: str) -> Schema:
    of_column = {f.stats.name: table for table in tables for f in table.members}
    weights = {f.why.removeprefix("of "): f.stats.name for f in findings if f.kind == "weights"}
    sparse = {}
    for f in findings:
        if f.kind == "sparse":
            name = f.stats.name
            pooling = "sequence" if has_history_name(f) else "mean" if f.stats.is_list else "sum"
            sparse[name] = {"table": of_column[name].name, "pooling": pooling, "weights": weights.get(name)}
    sizes = {table.name: table.choose_size(sampled) for table in tables}
    for transform in (t for f in findings for t in f.transforms if t["do"] == "bucketize"):
        (name,) = transform["into"]
        sparse[name], sizes[name] = {"table": name}, {"rows": len(transform["boundaries"]) + 1}
    if not sparse:
        reasons = "; ".join(f"{f.stats.name} is {f.kind} ({f.why})" for f in findings)
        raise SchemaError(f"no column can be a feature: {reasons}", where=uri, expected="numbers, ids or text")
    values: dict[str, Any] = {
        "labels": [f.stats.name for f in findings if f.kind == "label"],
        "dense": [f.stats.name for f in findings if f.kind == "dense"],
        "scale": {f.stats.name: f.stats.scale() for f in findings if f.kind == "dense"},
        "sparse": sparse,
        "tables": {name: {"dim": dim, **size} for name, size in sizes.items()},
    }
    values["statistics"] = {f.stats.name: f.stats.statistics() for f in findings if f.kind == "sparse"}
    return Schema.parse(values, uri, "correct the options, such as --dim, or the columns")


def _transforms(findings: list[Finding]) -> list[dict]:
    """Return the entries of data.transforms for all columns, in ORDER; entries with equal settings are merged."""
    together: dict[str, dict] = {}
    for transform in (t for f in findings if f.kind != "skipped" for t in f.transforms):
        settings = {key: value for key, value in transform.items() if key != "columns"}
        merged = together.setdefault(to_flow_yaml(settings), {"do": transform["do"], "columns": [], **settings})
        merged["columns"] += transform["columns"]
    return sorted(together.values(), key=lambda t: ORDER.index(t["do"]))
