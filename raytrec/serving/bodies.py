"""Bodies of requests and responses: JSON and Arrow streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from dataclasses import field as make_field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json, to_json
from starlette.responses import Response

from raytrec.common.errors import DataError, RaytrecError, get_first_line
from raytrec.data.arrow import is_list
from raytrec.data.row_slices import Rows
from raytrec.scoring.column_splits import ColumnSplit
from raytrec.scoring.manifest import ProgramName
from raytrec.scoring.matrices import DENSE_MATRIX, ID_MATRIX, Matrices, read_matrices, split_matrices
from raytrec.scoring.request_rows import ROWS_PLACE, ObjectRows, concat_rows, repeat_users, to_column
from raytrec.scoring.scorer import Scorer
from raytrec.serving.arrow_bodies import read_stream

JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"


@dataclass(frozen=True)
class Limits:
    """Maximum sizes of requests.

    Attributes:
        body_bytes: Size of a body in bytes.
        all_bodies_bytes: Total size in bytes of all bodies that a process is receiving.
        rows: Number of rows or candidates in a request.
        ids: Number of values in a list in one row.
    """

    body_bytes: int = 16 << 20
    all_bodies_bytes: int = 256 << 20
    rows: int = 10_000
    ids: int = 10_000


class RefusedRequest(Exception):
    """Exception for a request that is rejected with an HTTP status, an error in the body and additional headers."""

    def __init__(self, status: int, error: RaytrecError, **headers: str):
        super().__init__(str(error))
        self.status, self.error, self.headers = status, error, headers


@dataclass(frozen=True)
class Query:
    """Rows that a request asks a model to score.

    Attributes:
        scorer: Model that serves the request.
        program: Program of the model: predict, or a tower.
        rows: Rows, or candidates if there is a user. Plain rows (numbers and ids without nulls) have the type `Rows`.
        user: The user's single row in the same form, whose columns the candidates do not repeat; None: `rows` have
            all columns.
        split: Division of the columns between user and candidates; None without a user and in queries for the log.
        read_original: Function that returns the query with its rows as the client sent them, for the log; None:
            `rows` are in this form.
        missing_shards: Table shards whose vectors were replaced by zeros; filled when the rows are scored.
    """

    scorer: Scorer
    program: ProgramName
    rows: pa.Table | ObjectRows | Rows
    user: pa.Table | Rows | None = None
    split: ColumnSplit | None = None
    read_original: Callable[[], Query] | None = None
    missing_shards: set[int] = make_field(default_factory=set, compare=False)

    def to_table(self) -> pa.Table:
        """Return the rows as a table. If there is a user, the candidates also have the columns of the user."""
        query = self.read_original() if self.read_original else self
        table = concat_rows([query.rows])
        if isinstance(query.user, pa.Table):
            table = repeat_users(table, query.user, query.user.column_names, [len(table)])
        return table

    def score(self, parts: Sequence[pa.Table | ObjectRows | Rows], users: Sequence[Any] = ()) -> list[np.ndarray]:
        """Score rows of this query and of other queries of the same kind, and return the scores as Scorer.score does.

        Args:
            parts: Rows of several queries, which are scored in one batch.
            users: User of each part; ignored if this query has no `split`.

        Raises:
            DataError: A value does not fit the model.
            UnavailableError: A table shard is unavailable or late.
        """
        if self.split is not None:
            return self.scorer.rank(self.split, users, parts)
        if isinstance(self.rows, Rows):
            return self.scorer.score([part for part in parts if isinstance(part, Rows)], self.program)
        return self.scorer.score([self.scorer.get_reader(self.program).read(concat_rows(parts))], self.program)

    def name_scores(self, scores: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return score column → scores, given the scores of each task in the order of the manifest."""
        return {task.column: each for task, each in zip(self.scorer.manifest.tasks, scores, strict=True)}


def decode_request(content_type: str, body: bytes, scorer: Scorer, program: ProgramName, limits: Limits) -> Query:
    """Decode the body of a request to /predict or /vectors with this Content-Type header, for a program of a model.

    Raises:
        RefusedRequest: The content type is not supported, JSON is malformed, or the rows are missing or exceed a limit.
        DataError: An Arrow body is malformed, a row lacks a column, or a value does not fit its column; or user and
            candidates are invalid, as in `Scorer.to_ranking_tables`.
        ConfigError: The model does not have the program.
    """
    if check_type(content_type, JSON, ARROW) == ARROW:
        table = _decode_arrow(body, scorer.columns, limits)
        matrices = read_matrices(table, scorer.get_reader(program).matrices)
        return make_query(matrices, lambda: table, scorer, program, limits)
    plain_reader = scorer.get_plain_reader(program)
    plain = plain_reader and plain_reader.read_json(body, limits.rows, limits.ids)
    if plain is not None:  # the body is decoded again only if the request is logged
        return Query(scorer, program, plain, read_original=lambda: _decode_json(body, scorer, program, limits))
    query = _decode_json(body, scorer, program, limits)
    _check_count(query.rows, limits)
    places = (ROWS_PLACE, "") if query.user is None else ("candidates", "user")
    for part, place in zip((query.rows, query.user), places, strict=True):
        if not isinstance(part, Rows | None):
            _check_lists(part, limits, place)
    return query


def make_query(
    matrices: Matrices, make_table: Callable[[], pa.Table], scorer: Scorer, program: ProgramName, limits: Limits
) -> Query:
    """Return the query of the rows in matrices. Rows that are not plain are read from a table instead.

    Args:
        matrices: Matrices with all columns of the rows, [B, columns]; {} if the rows have other columns.
        make_table: Function that returns the same rows as a table, which may contain matrices.
        scorer: Model that serves the request.
        program: Program of the model.
        limits: Limits of requests.

    Raises:
        RefusedRequest: There are no rows, or the rows exceed a limit.
        DataError: A row of a matrix does not have one value for each column, or `make_table` raises the error.
    """
    plain_reader, columns = scorer.get_plain_reader(program), scorer.get_reader(program).matrices
    plain = plain_reader and plain_reader.read_matrices(matrices, limits.rows, limits.ids)
    if plain is None:
        _check_count(table := make_table(), limits)
        table = split_matrices(table, columns)
        plain = plain_reader and plain_reader.read_table(table, limits.rows, limits.ids)
    if plain is not None:
        make = partial(Query, scorer, program)
        return make(plain, read_original=lambda: make(split_matrices(make_table(), columns)))
    _check_lists(table, limits)
    return Query(scorer, program, table)


def check_type(content_type: str, *supported_types: str) -> str:
    """Return the media type in a Content-Type header, in lower case and without parameters.

    Raises:
        RefusedRequest: The type is not one of `supported_types`.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in supported_types:
        what = f"the content type '{kind}' is not supported" if kind else "the request names no content type"
        raise RefusedRequest(415, DataError(what, where="Content-Type", expected=" or ".join(supported_types)))
    return kind


def _decode_arrow(body: bytes, columns: pa.Schema, limits: Limits) -> pa.Table:
    table, expanded_bytes = read_stream(body, [*columns.names, DENSE_MATRIX, ID_MATRIX])
    if expanded_bytes > limits.body_bytes:
        what = f"the dictionary-encoded texts of the rows have {expanded_bytes:,} bytes after decoding"
        raise _make_refusal(what, "the body", f"at most {limits.body_bytes:,} bytes", 413)
    return table


def _decode_json(body: bytes, scorer: Scorer, program: ProgramName, limits: Limits) -> Query:
    check_object_count(body, limits)
    forms = "rows, columns, or user and candidates" if program == "predict" else "rows or columns"
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        what = f"invalid JSON: {get_first_line(error)}"
        raise _make_refusal(what, "the body", "UTF-8 JSON without NaN or Infinity") from None
    if not isinstance(values, dict):
        raise _make_refusal("the body is not an object", "the body", f"an object with {forms}")
    if set(values) not in ({"rows"}, {"columns"}, {"user", "candidates"}):
        names = [*sorted(values)[:8], *(["…"] if len(values) > 8 else [])]
        what = f"the body has the keys [{', '.join(names)}]" if values else "the body is an empty object"
        raise _make_refusal(what, "the body", f"an object with {forms}")
    if "columns" in values:
        return Query(scorer, program, _table_from_columns(values["columns"], scorer.columns))
    rows = values.get("rows", values.get("candidates"))
    if not isinstance(rows, list):
        name = "rows" if "rows" in values else "candidates"
        raise _make_refusal(f"the {name} are not a list", name, "a list of objects")
    # The rows are counted before the conversion, which takes more memory.
    _check_count(rows, limits, "row" if "rows" in values else "candidate")
    if "rows" in values:
        return Query(scorer, program, ObjectRows(rows, scorer.get_reader(program).columns))
    if program != "predict":
        raise _make_refusal("/vectors does not accept user and candidates", "the body", f"an object with {forms}")
    if not isinstance(values["user"], dict):
        raise _make_refusal("user is not an object", "user", "an object that maps columns to values")
    candidates, user, split = scorer.read_candidates(values["user"], rows, limits.ids)
    tables = partial(scorer.to_ranking_tables, values["user"], rows)
    return Query(scorer, program, candidates, user, split, read_original=lambda: Query(scorer, program, *tables()))


def check_object_count(body: bytes, limits: Limits) -> None:
    """Raise RefusedRequest if a JSON body contains too many opening braces: parsing so many objects takes seconds."""
    if (count := body.count(b"{")) > 10 * limits.rows:
        what = f"the body has too many objects, with {count:,} opening braces"
        raise _make_refusal(what, "the body", f"at most {10 * limits.rows:,} opening braces", 413)


def _table_from_columns(lists: Any, columns: pa.Schema) -> pa.Table:
    """Return the model's columns of a body as a table; other columns are ignored.

    Raises:
        RefusedRequest: `lists` is not a mapping of columns to lists of the same length, or has no column of the model.
        DataError: A value does not match the type of its column.
    """
    if not isinstance(lists, dict) or not all(isinstance(values, list) for values in lists.values()):
        raise _make_refusal("columns is not an object of lists", "columns", "a list of values for each column")
    arrays = {field.name: to_column(lists[field.name], field) for field in columns if field.name in lists}
    if lists and not arrays:
        raise _make_refusal("no column is one of the model's columns", "columns", ", ".join(columns.names))
    if len({len(array) for array in arrays.values()}) > 1:
        raise _make_refusal("the columns have different numbers of values", "columns", "one value per row and column")
    return pa.table(arrays)


def _check_count(rows: Sized, limits: Limits, kind: str = "row") -> None:
    """Raise RefusedRequest if a request has no rows or candidates, or too many."""
    where = ROWS_PLACE if kind == "row" else "candidates"
    if not len(rows):
        raise _make_refusal(f"there are no {kind}s", where, f"at least one {kind}")
    if len(rows) > limits.rows:
        raise _make_refusal(f"there are {len(rows):,} {kind}s", where, f"at most {limits.rows:,} {kind}s", 413)


def _check_lists(rows: pa.Table | ObjectRows, limits: Limits, where: str = ROWS_PLACE) -> None:
    """Raise RefusedRequest if a row contains a list with too many values."""
    for place, field in enumerate(rows.schema):
        if is_list(field.type):
            longest = _longest_list(rows, place, field.name)
            if longest > limits.ids:
                what = f"a list in column '{field.name}' has {longest:,} values"
                raise _make_refusal(what, f"{where}, column {field.name}", f"at most {limits.ids:,} values", 413)


def _longest_list(rows: pa.Table | ObjectRows, place: int, name: str) -> int:
    if isinstance(rows, pa.Table):
        return pc.max(pc.list_value_length(rows.column(place))).as_py() or 0
    values = (row.get(name) for row in rows.rows if isinstance(row, dict))
    return max((len(value) for value in values if isinstance(value, list)), default=0)


def json_response(values: Any) -> Response:
    """Return a JSON response with these values."""
    return Response(to_json(values), media_type=JSON)


def encode_response(accept: str, version: str, names: Sequence[str], values: Sequence[np.ndarray]) -> tuple[str, bytes]:
    """Return the media type and the body of a response. In JSON, NaN and infinity become null.

    Args:
        accept: Accept header of the request; the response is Arrow if the header names Arrow's type, else JSON.
        version: Version of the model.
        names: Columns of the response.
        values: Values of each column, [rows] or [rows, width].
    """
    if ARROW in accept:
        arrays = [pa.array(each if each.ndim == 1 else list(each)) for each in values]
        table = pa.table(dict(zip(names, arrays, strict=True))).replace_schema_metadata({"version": version})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return ARROW, sink.getvalue().to_pybytes()
    columns = {name: each.tolist() for name, each in zip(names, values, strict=True)}
    return JSON, to_json({"version": version, "predictions": columns}, inf_nan_mode="null")


def _make_refusal(what: str, where: str, expected: str, status: int = 400) -> RefusedRequest:
    return RefusedRequest(status, DataError(what, where=where, expected=expected))
