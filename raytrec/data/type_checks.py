"""Check that the columns of a dataset's files exist, and that their types fit the schema and the other files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow import types

from raytrec.common.errors import DataError, find_similar_word
from raytrec.config.schema import Schema, advise_transform, format_yaml_scalar
from raytrec.config.transforms import Hash, LookupVocabulary, Transform
from raytrec.data.arrow import (
    AmbiguousColumnError,
    find_column,
    is_list,
    is_number,
    is_text,
    leaf_names,
    plain,
    value_type,
)
from raytrec.data.column_conversion import NULL_LABEL_ADVICE

if TYPE_CHECKING:
    from raytrec.data.files.footers import FooterStatistics
    from raytrec.data.read_plans import ReservedColumnSet, ResolvedReadPlan

MAX_NAMES_IN_MESSAGE = 30  # maximum number of column names in a message
RELEVANT_ITEM_KEYS = ("eval.retrieval.item", "eval.retrieval.right_items")
# Sparse feature → True if its ids are text, False if they are numbers. Tables that hash or manage ids accept both, but
# have different rows for the id 5 and the text '5'. Columns that transforms hash or look up have keys from name_input.
IdKinds = Mapping[str, bool]
INPUT = "input of transforms, column "
ONE_KIND = "values of one kind, because the hashes of 5 and '5' differ, and their rows of managed ids"
CONVERSION_ADVICE = "leave the column out, or convert it to numbers with {do: 'module:function'} in data.transforms"


def check_present(
    arrow: pa.Schema, columns: list[str], where: str, form: ResolvedReadPlan, fields: bool = True
) -> None:
    """Check that each required column exists in a file, and that its name is unambiguous.

    Args:
        arrow: Schema of a file.
        columns: Names of the required columns.
        where: Path or URI of the file, for messages.
        form: Resolved read plan, from which messages take configuration keys and the names of folder columns.
        fields: True if a struct field such as `user.age`, or a key of folders, is accepted as a column.

    Raises:
        DataError: A column is missing (the message suggests a similar name), or several columns have its name.
    """
    for column in columns:
        try:
            path = find_column(arrow, column)
            path = path if fields or len(path or ()) == 1 else None
        except AmbiguousColumnError:
            raise DataError(
                f"column '{column}' exists more than once",
                where=f"{where}, column {column}",
                expected="a single column or struct field with this name",
                do="give each column a unique name, in the file or in the result of a user-defined transform",
            ) from None
        if path is None:
            available = list(dict.fromkeys([*arrow.names, *leaf_names(arrow), *form.types]))
            near, key = find_similar_word(column, available), form.plan.named_by(column)
            place, folders = key or "the schema or data.transforms", f" or folders {column}=VALUE" * fields
            raise DataError(
                f"column '{column}' is missing",
                where=where,
                expected=f"column '{column}' ({place}){folders}; available: {format_names(available)}",
                do=f"did you mean '{near}'? Correct {place}, or the data" if near else f"correct {place}, or the data",
            )


def format_names(names: list[str]) -> str:
    """Return at most MAX_NAMES_IN_MESSAGE column names, truncated and joined by commas, and the number of others."""
    more = f" … and {len(names) - MAX_NAMES_IN_MESSAGE:,} more" if len(names) > MAX_NAMES_IN_MESSAGE else ""
    return ", ".join(name if len(name) < 80 else f"{name[:80]}…" for name in names[:MAX_NAMES_IN_MESSAGE]) + more


def check_types(arrow: pa.Schema, form: ResolvedReadPlan, uri: str) -> None:
    """Check the types of all columns named by the schema, the tasks and the reserved columns of a read plan.

    Args:
        arrow: Columns of a file, after the transforms.
        form: Resolved read plan of the rows.
        uri: Path or URI of the file, for messages.

    Raises:
        DataError: A column has a wrong type; the message suggests a transform or another name.
    """
    schema = form.schema
    for name in schema.select_candidate_names([*form.plan.labels, *schema.dense, *schema.sparse]):
        column = schema.get_ids_column(name) if name in schema.sparse else name
        if not is_list(plain(kind := arrow.field(column).type)):
            what, advice = f"candidate column '{column}'", f"write lists, or remove {name} from the schema's candidates"
            expected = "a list in each row, with one value per candidate"
            raise _unsupported_type_error(what, kind, column, uri, expected, advice)
    numbers = [(name, "label", form.plan.skips_nulls(name)) for name in form.plan.labels]
    numbers += [(read.column, read.role, read.role == "mask") for read in form.plan.task_columns]
    numbers += [(name, "dense column", False) for name in schema.dense]
    for column, role, may_be_null in numbers:
        kind = arrow.field(column).type
        in_tasks = schema.candidates and column not in schema.columns  # masks and weights: numbers or lists
        kind = value_type(kind) if column in schema.candidates or in_tasks else kind
        if not is_number(plain(kind)) and not (may_be_null and types.is_null(plain(kind))):
            advice = _advise_number(plain(kind), column, role)
            unit = "candidate" if column in schema.candidates else "row" + " or candidate" * bool(in_tasks)
            raise _unsupported_type_error(f"{role} '{column}'", kind, column, uri, f"one number per {unit}", advice)
    for column in form.plan.reserved.names:
        _check_reserved(plain(arrow.field(column).type), column, form.plan.reserved, uri)
    for feature, spec in schema.sparse.items():
        column = schema.get_ids_column(feature)
        is_text_allowed = schema.tables[spec.table].takes_text
        _check_ids(arrow.field(column).type, feature, column, spec.table, is_text_allowed, uri)
        if spec.weights is not None:
            what = f"weights column '{spec.weights}' of '{feature}'"
            _check_values_of_ids(arrow.field(spec.weights).type, spec.weights, what, uri, may_be_times=False)
        for side in spec.side_features:
            what = f"side feature '{side}' of sequence '{feature}'"
            _check_values_of_ids(arrow.field(side).type, side, what, uri, may_be_times=True)


def _unsupported_type_error(what: str, kind: pa.DataType, column: str, uri: str, expected: str, do: str) -> DataError:
    """Return a DataError for a column of an unsupported type."""
    return DataError(
        f"{what} has type {_truncate_type(kind)}", where=f"{uri}, column {column}", expected=expected, do=do
    )


def _advise_number(kind: pa.DataType, column: str, role: str) -> str:
    """Return advice on how to convert a column to numbers, given its role (label, dense column, mask, …)."""
    if is_text(kind):
        sparse = "list the column under sparse with a table that sets out_of_range: hash"
        binarize = f"{advise_transform('binarize', column, positive='[…]')}, listing the texts that mean 1"
        advice = {"dense column": f"{sparse}; ", "sample weight": ""}.get(role, f"{binarize}; ")
        return f"{advice}for numbers as text, {advise_transform('cast', column, to='float32')}"
    if is_list(kind) or types.is_map(kind):
        requests = f"if a row is a request with a list of candidates, add {column} to candidates in schema.yaml"
        advice = {
            "label": f"{requests}; otherwise, remove the column",
            "dense column": f"{requests}; otherwise, list the column under sparse",
        }.get(role, "name another column")
        return _advise_fields(kind, column) or f"{advice}, or transform each value of {column} to one number"
    if types.is_null(kind):
        fill = f"{advise_transform('fill_null', column, value='NUMBER')} to replace nulls, the only values"
        return NULL_LABEL_ADVICE.format(label=format_yaml_scalar(column)) if role == "label" else fill
    return _advise_fields(kind, column) or _advise_time(kind, column) or CONVERSION_ADVICE


def _check_ids(kind: pa.DataType, feature: str, column: str, table: str, is_text_allowed: bool, uri: str) -> None:
    value = value_type(kind)
    is_integral = types.is_integer(value) or types.is_floating(plain(kind))  # floats: integers with nulls
    if is_integral or (is_text(value) and is_text_allowed) or types.is_null(value):
        return
    nesting = " (nested lists)" if is_list(value) else ""
    text_advice = f"for numbers as text, {advise_transform('cast', column, to='int64')}; for other text in new runs, "
    text_advice += f"set tables.{table}.out_of_range to hash, or tables.{table}.ids to managed"
    raise DataError(
        f"sparse feature '{feature}' has values of type {_truncate_type(value)}{nesting}",
        where=f"{uri}, column {column}",
        expected="whole numbers, text (if out_of_range is hash or ids are managed), or lists of such values",
        do=text_advice if is_text(value) else _advise_ids(plain(kind), value, column),
    )


def _advise_ids(kind: pa.DataType, value: pa.DataType, column: str) -> str:
    """Return advice on how to convert a column to ids."""
    if is_number(value):
        ids = f"for whole numbers, {advise_transform('cast', column, to='int64')}"
        return ids if is_list(kind) else f"{ids}; or list the column under dense"
    return _advise_fields(kind, column) or _advise_time(value, column) or CONVERSION_ADVICE


def _check_reserved(kind: pa.DataType, column: str, reserved: ReservedColumnSet, uri: str) -> None:
    if column in reserved.lists and not is_list(kind):
        what, advice = f"column '{column}' of seen items", "name another column in eval.retrieval.seen"
        raise _unsupported_type_error(what, kind, column, uri, "lists of items", advice)
    is_key = column in reserved.keys
    may_be_list = column in (*reserved.lists, *reserved.optional_lists)
    kind, expected = (value_type(kind), "one value per item") if may_be_list else (kind, "one value per row")
    if is_list(kind) or types.is_nested(kind) or (is_key and types.is_interval(kind)):
        advice = _advise_fields(kind, column) or CONVERSION_ADVICE
        if is_key and is_list(kind) and reserved.named_by.get(column) in RELEVANT_ITEM_KEYS:
            advice = "write the lists to another column and set eval.retrieval.right_items=COLUMN"
        raise _unsupported_type_error(f"reserved column '{column}'", kind, column, uri, expected, advice)
    if column in reserved.groups:
        _check_group(plain(kind), column, uri)


def _check_group(kind: pa.DataType, column: str, uri: str) -> None:
    allowed = types.is_integer(kind) or types.is_boolean(kind) or types.is_date(kind) or types.is_null(kind)
    if not allowed and not is_text(kind):
        cast = advise_transform("cast", column, to="int64")
        advice = (_advise_time(kind, column) if types.is_time(kind) else cast) + "; or name another column"
        what, expected = f"column '{column}' of groups or items", "integers, text, bools or dates"
        raise _unsupported_type_error(what, kind, column, uri, expected, advice)


def _check_values_of_ids(kind: pa.DataType, column: str, what: str, uri: str, *, may_be_times: bool) -> None:
    value = value_type(kind)
    fits = types.is_floating(value) or types.is_integer(value) or types.is_null(value)
    expected = "lists with one number per id"
    advice = f"for lists of other numbers, {advise_transform('cast', column, to='float32')}; or remove `weights`"
    if may_be_times:  # side features
        fits = fits or is_number(value) or types.is_timestamp(value) or types.is_date(value) or types.is_duration(value)
        expected = "lists with one number, time or date per id"
        advice = "remove the column from side_features, or convert it to numbers with a transform"
    if not (fits and is_list(kind)):
        raise _unsupported_type_error(what, kind, column, uri, expected, _advise_fields(plain(kind), column) or advice)


def _advise_time(kind: pa.DataType, column: str) -> str | None:
    """Return advice on how to convert times or durations to numbers; None for other types, such as intervals."""
    if types.is_duration(kind):
        return f"{advise_transform('age', column, unit='days')} to convert the durations to numbers"
    if not types.is_temporal(kind) or types.is_interval(kind):
        return None
    part = "weekday" if types.is_date(kind) else "hour"
    into = f"{column}_{part}"
    advice = advise_transform("date_part", column, part=part, into=f"[{format_yaml_scalar(into)}]")
    advice += f", and add {into} to the schema"
    if types.is_time(kind):
        return advice
    into = f"[{format_yaml_scalar(f'{column}_age')}]"
    age = advise_transform("age", column, until="2026-01-01", unit="days", into=into)
    return f"{advice}; or, for the age, {age}"


def _advise_fields(kind: pa.DataType, column: str) -> str | None:
    """Return the advice to use a field of a column that has fields (arrow.leaf_names); None for other columns."""
    fields = leaf_names(pa.schema([(column, kind)]))
    if fields == [column]:
        return None
    return f"use a field of the column: {format_names(fields)} (in a sparse feature, as column: NAME)"


def _truncate_type(kind: pa.DataType) -> str:
    text = str(kind)
    return text if len(text) < 200 else f"{text[:200]}…"


def find_id_kinds(arrow: pa.Schema, schema: Schema, footer: FooterStatistics) -> dict[str, bool]:
    """Return the kinds of ids (IdKinds) in a file, without features that have no value in the file.

    Args:
        arrow: Columns of the file, after the transforms.
        schema: Schema of the run.
        footer: Footer statistics of the file.
    """
    columns = {name: schema.get_ids_column(name) for name in schema.sparse}
    kinds = {name: value_type(arrow.field(column).type) for name, column in columns.items()}
    has_values = {n for n, kind in kinds.items() if not types.is_null(kind) and not footer.lacks_values(columns[n])}
    return {name: is_text(kinds[name]) for name in columns if name in has_values}


def find_input_kinds(transform: Transform, arrow: pa.Schema, from_folders: Container[str]) -> dict[str, bool]:
    """Return a mapping from each column that a transform hashes to True if it is text, and to False if it is numbers.

    The mapping also contains folder keys that a transform looks up in a vocabulary. The hashes of 5 and '5' differ. As
    folder keys, 5 and 05 are different words, but as numbers they are equal.

    Args:
        transform: Transform.
        arrow: Columns before the transform.
        from_folders: Columns whose values are in folder names.
    """
    columns = transform.columns if isinstance(transform, Hash | LookupVocabulary) else ()
    compared = (name for name in columns if isinstance(transform, Hash) or name in from_folders)
    kinds = {name: value_type(arrow.field(name).type) for name in compared if name in arrow.names}
    return {name: is_text(kind) for name, kind in kinds.items() if not types.is_null(kind)}


def name_input(column: str) -> str:
    """Return the key in IdKinds of a column that transforms hash or look up."""
    return f"{INPUT}'{column}'"


def describe_kind(name: str, is_text_kind: bool) -> str:
    """Return a clause that states the kind of the ids of a key of IdKinds."""
    subject = f"values in the {name}," if name.startswith(INPUT) else f"ids of feature '{name}'"
    return f"the {subject} are {'text' if is_text_kind else 'numbers'}"


def compare_id_kinds(
    files: Sequence[tuple[str, int, IdKinds]], trained: IdKinds
) -> tuple[dict[str, bool], dict[str, DataError]]:
    """Return the kinds of ids of a dataset, and a mapping from each file with other kinds to an error.

    Args:
        files: (path or URI, number of rows, kinds of ids) of each file.
        trained: Kinds of ids in the training data, which the files must have. For features not in the mapping, the
            kind with the most rows is the kind of the dataset.
    """
    rows = defaultdict[str, Counter[bool]](Counter)
    for _, count, found in files:
        for name, kind in found.items():
            rows[name][kind] += count
    kinds = {name: trained.get(name, counts.most_common(1)[0][0]) for name, counts in rows.items()}
    errors = {}
    for uri, _, found in files:
        if name := next((each for each, kind in found.items() if kind != kinds[each]), None):
            others = "the training data" if name in trained else "other files"
            errors[uri] = DataError(
                f"{describe_kind(name, found[name])}, but {'text' if kinds[name] else 'numbers'} in {others}",
                where=uri,
                expected=ONE_KIND,
                do=f"write the file with the type of {others}, or use data.transforms: {{do: cast, …}}",
            )
    return kinds, errors
