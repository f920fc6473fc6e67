"""Plain rows have exactly the values that the reader of all rows gives them, or are left to that reader."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raytrec.common.errors import DataError, RaytrecError
from raytrec.config.features import Features
from raytrec.config.schema import Schema
from raytrec.config.transforms import Age
from raytrec.data.assembler import Assembler
from raytrec.scoring.matrices import read_matrices, split_matrices
from raytrec.scoring.plain_rows import PlainRowReader, make_plain_reader
from raytrec.scoring.request_rows import RowReader, to_table
from raytrec.serving.bodies import Limits, RefusedRequest, _decode_json

LIMITS = Limits(rows=5, ids=4)
SCHEMA = Schema.parse(
    {
        "labels": ["label"],
        "dense": ["price", "age", "days"],
        "scale": {"price": {"mean": 2.5, "std": 0.3, "log": True}, "age": {"mean": 40.0, "std": 7.0, "nulls": "mean"}},
        "sparse": {
            "user": {"table": "user"},
            "item": {"table": "item", "column": "item id"},
            "again": {"table": "item", "column": "item id"},
            "shop": {"table": "shop"},
            "tags": {"table": "tag", "pooling": "mean"},
            "history": {"table": "item", "pooling": "sequence"},
        },
        "tables": {
            "user": {"rows": 9, "dim": 4, "out_of_range": "hash"},
            "item": {"rows": 7, "dim": 4},
            "shop": {"rows": 8, "dim": 4, "ids": "managed"},
            "tag": {"rows": 6, "dim": 4, "out_of_range": "clamp"},
        },
    },
    "the test",
)
KINDS = {"days": pa.int64(), "tags": pa.list_(pa.int64()), "history": pa.list_(pa.int64())}
COLUMNS = ("price", "age", "days", "user", "item id", "shop", "tags", "history")
TYPES = pa.schema(
    [(name, KINDS.get(name, pa.float64() if name in ("price", "age") else pa.int64())) for name in COLUMNS]
)
PLAIN_VALUES = {
    "price": 1.5, "age": 33, "days": 4, "user": 8, "item id": 6, "shop": -(2**62), "tags": [0, 5], "history": [1, 2, 3]
}  # fmt: skip


@pytest.fixture(scope="module")
def reader():
    return RowReader(SCHEMA, (), ("tags", "history"), TYPES)


@pytest.fixture(scope="module")
def assembler(reader):
    return Assembler(reader.form, Features(SCHEMA, {"history": 2}))


class Program:
    """The part of a scorer that decoding uses."""

    def __init__(self, reader):
        self.columns, self._reader = reader.columns, reader

    def get_reader(self, program):
        return self._reader


def read_as_all_rows(body, reader):
    """Return the rows of a body as read without the plain reader, or the error."""
    try:
        rows = _decode_json(body, Program(reader), "predict", LIMITS).rows
        return reader.read(to_table(rows.rows, rows.schema) if not isinstance(rows, pa.Table) else rows)
    except (RaytrecError, RefusedRequest) as error:
        return error


def assert_same_tensors(assembler, found, expected):
    one, other = (assembler.assemble([rows], len(rows)) for rows in (found, expected))
    assert torch.equal(one.dense, other.dense)
    for name in ("keys", "counts", "rows"):
        assert getattr(one.bags, name) == getattr(other.bags, name)
    assert torch.equal(one.bags.ids, other.bags.ids) and torch.equal(one.bags.lengths, other.bags.lengths)


ids = st.integers(-2, 10) | st.sampled_from([2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30, 10**400])
odd_values = st.sampled_from(
    [None, True, 5.0, "5", 1e400, -0.0, 2**53, 2**53 + 1, 1e39, [], [[1]], {}, {"a": [1]}, "ö", "\\"]
)
numbers = st.integers(-5, 5) | st.floats(width=32, allow_nan=False, allow_infinity=False) | st.floats(allow_nan=True)
VALUES = {name: ids for name in ("days", "user", "item id", "shop")}
VALUES |= {name: numbers for name in ("price", "age")} | {
    name: st.lists(ids, max_size=5) for name in ("tags", "history")
}


@st.composite
def bodies(draw):
    """Draw a body: mostly plain values, with some odd, missing and additional columns."""
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        row = dict(PLAIN_VALUES)
        for name in draw(st.lists(st.sampled_from(COLUMNS), max_size=3)):
            row[name] = draw(VALUES[name] | odd_values)
        for name in draw(st.lists(st.sampled_from(COLUMNS), max_size=1)):
            if draw(st.booleans()):
                del row[name]
        if draw(st.booleans()):
            row["other"] = draw(odd_values)
        rows.append(row)
    if draw(st.booleans()):
        value = {"rows": rows}
    else:
        value = {"columns": {name: [row[name] for row in rows if name in row] for name in (*COLUMNS, "other")}}
    if draw(st.integers(0, 9)) == 0:
        value["more"] = 1
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    if draw(st.integers(0, 9)) == 0:
        place = draw(st.integers(0, len(text)))
        return (
            text[:place].encode()
            + draw(st.sampled_from([b"\xff", b"[", b"\\ud800", b" ", b"0"]))
            + text[place:].encode()
        )
    return text.encode()


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(bodies())
def test_plain_json_rows_equal_rows_read_by_the_general_reader(reader, assembler, body):
    found = PlainRowReader(reader).read_json(body, LIMITS.rows, LIMITS.ids)
    if found is not None:
        assert_same_tensors(assembler, found, read_as_all_rows(body, reader))


@settings(max_examples=300, deadline=None)
@given(bodies())
@example(b'{"rows": [{"\\ud800price": 1.5, "age": 33}]}')
def test_plain_mappings_equal_rows_read_by_the_general_reader(reader, assembler, body):
    try:
        rows = json.loads(body)["rows"]
    except (ValueError, KeyError):
        return
    found = PlainRowReader(reader).read_objects(rows, LIMITS.ids)
    if found is not None:
        assert_same_tensors(assembler, found, reader.read(to_table(rows, reader.columns)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plain_arrow_rows_equal_rows_read_by_the_general_reader(reader, assembler, data):
    number = data.draw(st.integers(1, 4))
    columns = {}
    for name in COLUMNS:
        kind = TYPES.field(name).type
        if name in ("price", "age"):
            kind = data.draw(st.sampled_from([pa.float64(), pa.float32(), pa.int64(), pa.float16(), pa.bool_()]))
        elif not pa.types.is_list(kind):
            kind = data.draw(st.sampled_from([pa.int64(), pa.int32(), pa.uint64(), pa.uint8(), pa.float64()]))
        else:
            kind = data.draw(st.sampled_from([pa.list_(pa.int64()), pa.list_(pa.uint64()), pa.large_list(pa.int16())]))
        value = PLAIN_VALUES[name]
        if name == "shop":
            value = 3
        values = [value] * number
        if data.draw(st.integers(0, 9)) == 0:
            values[-1] = None
        if pa.types.is_boolean(kind):
            values = [value and True for value in values]
        columns[name] = pa.array(
            np.array(values, np.float16) if kind == pa.float16() and None not in values else values,
            None if kind == pa.float16() else kind,
        )
    table = pa.table(columns)
    found = PlainRowReader(reader).read_table(table, 5, 4)
    if found is not None:
        assert_same_tensors(assembler, found, reader.read(table))


@pytest.fixture(scope="module")
def reader_without_lists():
    schema = SCHEMA.select_features([*SCHEMA.dense, "user", "item", "again", "shop"])
    return RowReader(schema, (), (), TYPES)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plain_matrices_equal_rows_of_their_columns(reader_without_lists, data):
    reader, rows = reader_without_lists, data.draw(st.integers(1, 4))
    assert reader.matrices == {"dense": ["price", "age", "days"], "ids": ["user", "item id", "shop"]}
    kind = data.draw(st.sampled_from([np.float64, np.float32, np.int64, np.uint8]))
    value = st.integers(0, 9) if np.issubdtype(kind, np.integer) else numbers
    with np.errstate(over="ignore"):
        dense = np.array(data.draw(st.lists(st.tuples(value, value, value), min_size=rows, max_size=rows))).astype(kind)
    id_kind = data.draw(st.sampled_from([np.int64, np.int32, np.uint64]))
    id_values = st.integers(-2 if id_kind != np.uint64 else 0, 9) if data.draw(st.booleans()) else st.integers(0, 6)
    ids = np.array(
        data.draw(st.lists(st.tuples(id_values, id_values, id_values), min_size=rows, max_size=rows)), id_kind
    )
    found = PlainRowReader(reader).read_matrices({"dense": dense, "ids": ids}, 5, 4)
    table = pa.table({name: list(values) for name, values in (("dense", dense), ("ids", ids))})
    in_arrow = read_matrices(table, reader.matrices)
    assert (in_arrow["dense"].dtype, in_arrow["ids"].dtype) == (kind, id_kind)
    np.testing.assert_array_equal(in_arrow["dense"], dense)
    if found is not None:
        expected = reader.read(split_matrices(table, reader.matrices))
        assert_same_tensors(Assembler(reader.form, Features(reader.form.schema, {})), found, expected)
    elif id_kind != np.uint64 and np.isfinite(dense).all() and (ids >= 0).all() and (ids < 7).all():
        assert np.abs(dense).max() > 1e15  # only numbers that may be inexact are not plain


def test_matrices_of_another_form_are_not_plain(reader_without_lists):
    reader, plain_reader = reader_without_lists, PlainRowReader(reader_without_lists)
    dense, ids = np.ones((2, 3)), np.ones((2, 3), np.int64)
    assert len(plain_reader.read_matrices({"dense": dense, "ids": ids}, 5, 4)) == 2
    for matrices in (
        {}, {"dense": dense}, {"ids": ids}, {"dense": dense[:1], "ids": ids}, {"dense": dense, "ids": ids[:, :2]},
        {"dense": dense, "ids": ids.astype(np.float64)}, {"dense": dense.astype(str), "ids": ids},
        {"dense": dense.ravel(), "ids": ids}, {"dense": np.ones((6, 3)), "ids": np.ones((6, 3), np.int64)},
    ):  # fmt: skip
        assert plain_reader.read_matrices(matrices, 5, 4) is None
    table = pa.table({"dense": [[1.0, 2.0, 3.0], None], "ids": [[1, 2, 3]] * 2})
    with pytest.raises(DataError, match="'dense' has 0 values"):
        read_matrices(table, reader.matrices)


@pytest.mark.parametrize("form", ["rows", "columns", "arrow"])
def test_usual_requests_are_plain(reader, assembler, form):
    rows = [PLAIN_VALUES, PLAIN_VALUES | {"tags": [], "history": [6, 5, 4, 3], "shop": 5, "other": "ö"}]
    table = pa.table({name: pa.array([row[name] for row in rows], TYPES.field(name).type) for name in COLUMNS})
    plain_reader = make_plain_reader(reader)
    if form == "arrow":
        found = plain_reader.read_table(table, LIMITS.rows, LIMITS.ids)
    else:
        value = rows if form == "rows" else {name: table[name].to_pylist() for name in COLUMNS}
        body = json.dumps({form: value}, ensure_ascii=False).encode()
        found = plain_reader.read_json(body, LIMITS.rows, LIMITS.ids)
    assert len(found) == 2 == len(plain_reader.read_objects(rows, LIMITS.ids))
    assert_same_tensors(assembler, found, reader.read(table))


def test_models_with_weights_or_computed_columns_have_no_plain_rows():
    weighted = Schema.parse(
        {"labels": ["y"], "sparse": {"a": {"table": "a", "weights": "w"}}, "tables": {"a": {"rows": 3, "dim": 4}}}, "x"
    )
    columns = pa.schema([("a", pa.list_(pa.int64())), ("w", pa.list_(pa.float64()))])
    assert make_plain_reader(RowReader(weighted, (), ("a",), columns)) is None
    features = {"sparse": {"a": {"table": "a"}}, "tables": {"a": {"rows": 3, "dim": 4}}}
    schema = Schema.parse({"labels": ["y"], "dense": ["days"], **features}, "x")
    age = Age.model_validate(
        {"do": "age", "columns": ["seen"], "until": "2026-11-01", "unit": "days", "into": ["days"]}
    )
    columns = pa.schema([("seen", pa.timestamp("s", "UTC")), ("a", pa.int64())])
    assert make_plain_reader(RowReader(schema, (age,), (), columns)) is None
