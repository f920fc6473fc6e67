"""Bodies of requests and answers: JSON, and Arrow's streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json, to_json

from raytrec.common.errors import DataError, RaytrecError, first_line
from raytrec.data.arrow import is_list
from raytrec.scoring.rows import THE_ROWS, to_array
from raytrec.serving.arrow_bodies import TooMuch, read_stream

JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
FORMS = "rows, columns, or user and candidates"


@dataclass(frozen=True)
class Limits:
    """What a request may have at most.

    Attributes:
        body_bytes: of its body. all_bodies_bytes: of those that a process is receiving.
        rows: rows or candidates. ids: of one row's list.
    """

    body_bytes: int = 16 << 20
    all_bodies_bytes: int = 256 << 20
    rows: int = 10_000
    ids: int = 10_000


class Refused(Exception):
    """A request that gets no predictions: a status of HTTP, and an error for people."""

    def __init__(self, status: int, error: RaytrecError, **headers: str):
        super().__init__(str(error))
        self.status, self.error, self.headers = status, error, headers

    @property
    def body(self) -> bytes:
        """JSON: error, where, expected and do, as far as they are known."""
        parts = {"error" if name == "what" else name: text for name, text in self.error.parts.items()}
        return to_json({name: text for name, text in parts.items() if text})


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    Attributes:
        rows: a table, or a list of mappings; None: there are a user and candidates.
    """

    rows: Any = None
    user: Any = None
    candidates: Any = None

    @property
    def given(self) -> Any:
        """What gets scores: the rows, or the candidates."""
        return self.candidates if self.rows is None else self.rows


def read_body(content_type: str, body: bytes, columns: pa.Schema, limits: Limits) -> Asked:
    """What a body asks for.

    Args:
        columns: of the model, with their types.

    Raises:
        Refused: it is none, or has too much.
    """
    if check_type(content_type, JSON, ARROW) == ARROW:
        asked = Asked(rows=_arrow(body, columns, limits))
    else:
        asked = _json(body, columns, limits)
    _check_size(asked, columns, limits)
    return asked


def check_type(content_type: str, *known: str) -> str:
    """The type of a body.

    Raises:
        Refused: it is not among those known.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in known:
        what = f"the body is {kind or 'of no type'}"
        raise Refused(415, DataError(what, where="Content-Type", expected=" or ".join(known)))
    return kind


def _arrow(body: bytes, columns: pa.Schema, limits: Limits) -> pa.Table:
    try:
        return read_stream(body, columns.names, limits.body_bytes)
    except ValueError as error:
        raise _bad(f"not a stream of Arrow: {error}", "the body", "a schema and record batches") from None
    except TooMuch:
        what, expected = "rows share values that would take more than a body may have", limits.body_bytes
        raise _bad(what, "the body", f"at most {expected:,} bytes", 413) from None


def _json(body: bytes, columns: pa.Schema, limits: Limits) -> Asked:
    if body.count(b"{") > 10 * limits.rows:  # which would take seconds to read
        raise _bad("too many objects", "the body", f"{limits.rows:,} rows", 413)
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise _bad(
            f"not JSON: {first_line(error)}", "the body", "JSON in UTF-8, without NaN and Infinity"
        ) from None
    if not isinstance(values, dict):
        raise _bad("the body is not an object", "the body", f"an object with {FORMS}")
    forms = {frozenset(("rows",)), frozenset(("columns",)), frozenset(("user", "candidates"))}
    if frozenset(values) not in forms:
        raise _bad(f"the body has {', '.join(sorted(values)[:8]) or 'nothing'}", "the body", FORMS)
    if "columns" in values:
        return Asked(rows=_of_columns(values["columns"], columns))
    if not isinstance(values.get("rows", values.get("candidates")), list):
        raise _bad("rows are not a list", "rows or candidates", "a list of objects")
    if "rows" in values:
        return Asked(rows=values["rows"])
    if not isinstance(values["user"], dict):
        raise _bad("user is not an object", "user", "an object of columns and values")
    return Asked(user=values["user"], candidates=values["candidates"])


def _of_columns(given: Any, columns: pa.Schema) -> pa.Table:
    """Columns of a body as a table; those that are not the model's are passed over."""
    if not isinstance(given, Mapping) or not all(isinstance(values, list) for values in given.values()):
        raise _bad("columns is not an object of lists", "columns", "a list of values for each column")
    arrays = {}
    for field in columns:
        if field.name in given:
            try:
                arrays[field.name] = to_array(given[field.name], field.type)
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                raise _bad(first_line(error), f"columns, {field.name}", str(field.type)) from None
    if len({len(array) for array in arrays.values()}) > 1:
        raise _bad("columns have different numbers of values", "columns", "one value for each row")
    return pa.table(arrays)


def _check_size(asked: Asked, columns: pa.Schema, limits: Limits) -> None:
    """Raises Refused where a request has no rows, too many, or too many ids in a row."""
    rows = asked.given
    if not len(rows):
        raise _bad("there are no rows", THE_ROWS, "at least one")
    if len(rows) > limits.rows:
        raise _bad(f"{len(rows):,} rows", THE_ROWS, f"at most {limits.rows:,} a request", 413)
    for name, longest in _lengths(rows, columns):
        if longest > limits.ids:
            raise _bad(f"a row of '{name}' has {longest:,} values", name, f"at most {limits.ids:,}", 413)
    if asked.user is not None:
        _check_size(Asked(rows=[asked.user]), columns, limits)


def _lengths(rows: Any, columns: pa.Schema) -> list[tuple[str, int]]:
    """(column of the model, how many values a list of it has)."""
    if isinstance(rows, pa.Table):
        return [
            (field.name, pc.max(pc.list_value_length(rows.column(place))).as_py() or 0)
            for place, field in enumerate(rows.schema)
            if is_list(field.type)
        ]
    lists = [field.name for field in columns if field.type.num_fields]
    found = ((name, row.get(name)) for name in lists for row in rows if isinstance(row, dict))
    return [(name, len(value)) for name, value in found if isinstance(value, list)]


def write_body(
    accept: str, version: str, names: Sequence[str], values: Sequence[np.ndarray]
) -> tuple[str, bytes]:
    """(type, body) of an answer.

    Args:
        names, values: of columns, [rows] or [rows, width].
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


def _bad(what: str, where: str, expected: str, status: int = 400) -> Refused:
    return Refused(status, DataError(what, where=where, expected=expected))
