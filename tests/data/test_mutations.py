"""Corrupted Parquet files raise an error with a location or give the same rows.

Files with random columns are read, or rejected by column name.
"""

import os
import random
from functools import cache

import numpy as np
import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from any_parquet import column_names, column_types, random_array, read_every_row, read_with_schema_text
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from ranks import run_on_ranks
from reading import make_schema, read_canonical_rows

from raytrec.common.errors import DataError, SchemaError
from raytrec.config.schema import Schema
from raytrec.data.pages.decode import ReadErrorPolicy
from raytrec.data.read_plans import ReadPlan
from raytrec.inspection.propose import inspect

ROWS, GROUP = 600, 150
SCHEMA = Schema.parse(
    {
        "labels": ["label"],
        "dense": ["price"],
        "sparse": {
            "user": {"table": "user"},
            "tags": {"table": "tag", "weights": "tag_weights"},
            "pair": {"table": "tag"},
        },
        "tables": {"user": {"rows": 50, "dim": 4}, "tag": {"rows": 9, "dim": 4}},
    },
    "test",
)


def make_table():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, ROWS)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.table(
        {
            "label": rng.integers(0, 2, ROWS),
            "price": rng.normal(size=ROWS),
            "user": rng.integers(0, 50, ROWS),
            "tags": pa.ListArray.from_arrays(offsets, rng.integers(0, 9, offsets[-1])),
            "tag_weights": pa.ListArray.from_arrays(offsets, rng.random(offsets[-1])),
            "pair": pa.FixedSizeListArray.from_arrays(rng.integers(0, 9, 2 * ROWS), 2),
        }
    )


def replace_column(name, values):
    table = make_table()
    return table.set_column(table.column_names.index(name), name, values)


def replace_value(name, row, value):
    """Return the table with one value changed."""
    values = make_table()[name].to_pylist()
    values[row] = value
    return replace_column(name, pa.array(values))


def to_parquet_bytes(table):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=GROUP, write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def flip_bit(data, position):
    data = bytearray(data)
    data[position] ^= 1 << position % 8
    return bytes(data)


@cache
def make_mutations():
    """Return the bytes of each mutated file by name."""
    whole = to_parquet_bytes(make_table())
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    shares = (0, 0.01, 0.3, 0.7, 0.95, 0.999)
    out = {f"cut at {share:.1%}": whole[: int(len(whole) * share)] for share in shares}
    rng = random.Random(0)
    for position in sorted(rng.sample(range(4, footer), 8)):
        out[f"bit flipped in the data, {position}"] = flip_bit(whole, position)
    out |= {f"last byte {n} flipped": flip_bit(whole, len(whole) - n) for n in (1, 5, 8)}
    out["zeros inside"] = whole[:2000] + bytes(500) + whole[2500:]
    out["text"] = b"label,price\n0,1.5\n"
    for name in make_table().column_names:
        out[f"without {name}"] = to_parquet_bytes(make_table().drop_columns([name]))
    for name, values in {
        "label": pa.array(["yes"] * ROWS),
        "price": make_table()["tags"],
        "user": pa.array(np.full(ROWS, 0.5)),
        "tags": pa.array([[0.5]] * ROWS),
        "tag_weights": pa.array([["a"]] * ROWS),
        "pair": pa.array(["x"] * ROWS),
    }.items():
        out[f"{name} of type {values.type}"] = to_parquet_bytes(replace_column(name, values))
    for name, row, value in [
        ("label", 311, None),
        ("label", 5, 2),
        ("label", 5, -1),
        ("price", 599, None),
        ("price", 7, float("nan")),
        ("price", 7, float("inf")),
        ("user", 160, -1),
        ("user", 160, 50),
        ("user", 160, 2.5),
        ("user", 160, 2**62),
        ("user", 160, -(2**63)),
        ("tags", 449, [1, None]),
        ("tags", 449, [9]),
        ("tag_weights", 450, [0.5] * 7),
        ("tag_weights", 450, None),
        ("pair", 33, [-3]),
    ]:
        out[f"{name} {value} in row {row}"] = to_parquet_bytes(replace_value(name, row, value))
    users = make_table()["user"].to_numpy().astype(np.uint64)
    users[10] = 2**64 - 1
    out["user of 2**64 - 1"] = to_parquet_bytes(replace_column("user", pa.array(users)))
    out["no rows"] = to_parquet_bytes(make_table().slice(0, 0))
    return out


def read_rows(place, skip):
    """Return (error text, None) or ("", rows in canonical form)."""
    try:
        return "", parquet.canonical_to_dicts(
            *read_canonical_rows(place, ReadPlan(SCHEMA), ReadErrorPolicy(skip), skip)
        )
    except DataError as error:
        return str(error), None


def read_outcomes(rank, world, folder):
    """Read a.parquet, and all files of the folder with the skip policy."""
    return read_rows(f"{folder}/a.parquet", False), read_rows(folder, True)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the rows of the unchanged file by skip policy."""
    path = tmp_path_factory.mktemp("good") / "a.parquet"
    path.write_bytes(to_parquet_bytes(make_table()))
    return {skip: read_rows(path, skip)[1] for skip in (False, True)}


# Mutations that leave the rows unchanged.
HARMLESS = {"tag_weights None in row 450"} if not make_table()["tags"][450].as_py() else set()


@pytest.mark.parametrize("name", make_mutations())
def test_mutated_files_give_an_error_or_the_same_rows(name, expected, tmp_path):
    """With the skip policy, all rows of a good file are kept; rows of the mutated file are correct or skipped."""
    (tmp_path / "a.parquet").write_bytes(make_mutations()[name])
    (tmp_path / "b.parquet").write_bytes(to_parquet_bytes(make_table()))
    (((text, rows), (skip_text, kept)),) = run_on_ranks(1, read_outcomes, str(tmp_path))
    if rows is None:
        check_error(name, text)
    else:
        assert rows == expected[False], "the rows are silently wrong"
        assert "flipped" in name or name in HARMLESS, "the mutation was not detected"
    assert kept is not None, skip_text
    assert kept[-ROWS:] == expected[True]
    mutated = kept[:-ROWS]
    assert len(mutated) in (0, ROWS)
    assert all(row == right or not row["present"] for row, right in zip(mutated, expected[True], strict=False))
    if "in row" in name:
        assert [i for i, row in enumerate(mutated) if not row["present"]] in ([int(name.split()[-1])], [])


def check_error(name, text):
    assert "a.parquet" in text and "Traceback" not in text
    words = name.split()
    if name.startswith("without") or words[0] in make_table().column_names:
        assert words[name.startswith("without")] in text
    if "in row" in name:
        group, row = divmod(int(words[-1]), GROUP)
        assert f"row group {group}, column" in text and f"row {row}\n" in text


def write_random_file(path, columns, seed, rows=60):
    """Write a file with a label, users and random values in columns of these names and types."""
    rng = random.Random(seed)
    arrays = [random_array(kind, rng, rows) for _, kind in columns]
    names = ["label", "user", *(name for name, _ in columns)]
    plain = [pa.array([i % 2 for i in range(rows)]), pa.array([i % 7 for i in range(rows)])]
    try:
        pq.write_table(pa.table([*plain, *arrays], names), path, row_group_size=25)
    except pa.ArrowNotImplementedError:  # Parquet has no such column
        assume(False)


COLUMNS = st.lists(st.tuples(column_names, column_types), min_size=1, max_size=4)
FUZZ_SETTINGS = settings(
    max_examples=int(os.environ.get("RAYTREC_EXAMPLES", 25)), deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@FUZZ_SETTINGS
@example([[("x", pa.map_(pa.string(), pa.decimal128(20, 0)))]], 0)  # weights that are decimals
@example([[("click", pa.int8())]], 0)  # a label with a null in a later row group
@given(st.lists(COLUMNS, min_size=1, max_size=2), st.integers(0, 99))
def test_inspected_schema_reads_random_files(tmp_path_factory, files, seed):
    folder = tmp_path_factory.mktemp("any")
    for i, columns in enumerate(files):
        write_random_file(folder / f"{i}.parquet", columns, seed + i)
    try:
        text = inspect(str(folder)).schema_yaml()
    except SchemaError as error:  # a column is named like a label but has other values
        assert "label" in error.what and len(str(error).encode()) < 4096
        return
    read_with_schema_text(text, folder)


@FUZZ_SETTINGS
@given(COLUMNS, st.integers(0, 99), st.sampled_from(["dense", "sparse", "weights", "labels"]))
@example([("", pa.int8())], 0, "weights")
def test_random_columns_are_read_or_rejected_by_name(tmp_path_factory, columns, seed, role):
    path = tmp_path_factory.mktemp("any") / "a.parquet"
    write_random_file(path, columns, seed)
    name = columns[0][0]
    feature = {"column": name} if role == "sparse" else {"weights": name} if role == "weights" else {}
    labels, dense = [name if role == "labels" else "label"], [name] if role == "dense" else []
    features = {"feature": {"column": "user", **feature}}
    try:
        read_every_row(path, make_schema(features, 100, labels, dense, out_of_range="hash"))
    except SchemaError as error:  # a label that is also an input
        assert name in ("label", "user"), error
    except DataError as error:
        assert "a.parquet" in str(error) and len(str(error).encode()) < 4096
        named = [n for n, _ in columns] + ["label", "user"]
        assert any(n in str(error) or not n.isprintable() for n in named)
