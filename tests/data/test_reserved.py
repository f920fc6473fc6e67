"""Reserved columns, which batches carry unchanged, and the keys of grouping columns."""

import pickle
import random
from datetime import date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from any_parquet import LEAF_TYPES, random_array
from reading import DirectStream, make_schema

from raytrec.common.errors import DataError
from raytrec.config.transforms import Cast
from raytrec.data.arrow import plain, plain_array
from raytrec.data.fragments import scan
from raytrec.data.ids import NULL_KEY, compute_group_keys
from raytrec.data.item_reader import read_item
from raytrec.data.order import Order
from raytrec.data.pages.decode import ReadErrorPolicy
from raytrec.data.read_plans import ReadPlan, ReservedColumnSet
from raytrec.data.row_slices import Rows

SCHEMA = make_schema(["u"], 50)


def write(path, rows=None, **columns):
    """Write a file in row groups of 20 rows; `u` numbers the rows."""
    rows = len(next(iter(columns.values()))) if rows is None else rows
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"y": np.arange(rows) % 2, "u": np.arange(rows), **columns}
    pq.write_table(pa.table(whole), path, row_group_size=20)


def batches(data, order, world=1, faults=None):
    """Yield the batches of every rank without Ray."""
    for rank in range(world):
        yield from DirectStream(data, order, rank=rank, world=world, faults=faults).batches()


def scan_reserving(folder, *columns, keys=(), groups=(), skip=False, **how):
    """Scan a folder with these reserved columns."""
    plan = ReadPlan(SCHEMA, reserved=ReservedColumnSet(columns=columns, keys=keys, groups=groups), **how)
    return scan(str(folder), plan, skip=skip)


def collect_reserved(data, order=None, **how):
    """Return the reserved columns of each row by `u`, after checking the row counts of all batches."""
    found = {}
    for batch in batches(data, order or Order(7, 1, "none"), **how):
        users = batch.sparse.values().tolist()
        assert batch.reserved.num_rows == int(batch.weights.sum()) == len(users)
        assert batch.reserved.column_names == list(data.form.plan.reserved.columns)
        found |= dict(zip(users, batch.reserved.to_pylist(), strict=True))
    return found


@pytest.mark.parametrize("shuffle", ["none", "groups", "window"])
@pytest.mark.parametrize("world", [1, 3])
def test_reserved_columns_stay_with_their_rows(tmp_path, shuffle, world):
    names = [f"n{i}" for i in range(45)]
    for part in range(2):
        mine = slice(25 * part, 25 * part + 20 + 5 * (1 - part))
        columns = {"y": np.zeros(len(names[mine])), "u": np.arange(50)[mine], "name": names[mine]}
        pq.write_table(pa.table(columns), tmp_path / f"{part}.parquet", row_group_size=10)
    data = scan_reserving(tmp_path, "name", "u", keys=("name",))
    found = collect_reserved(data, Order(9, 3, shuffle, seed=5), world=world)
    assert found == {u: {"name": names[u], "u": u} for u in range(45)}
    for batch in batches(data, Order(9, 3, shuffle, seed=5), world):
        present = batch.weights == 1
        assert batch.keys.shape == (len(batch.weights), 1) and not batch.keys[~present].any()
        expected = compute_group_keys(batch.reserved["name"].combine_chunks())
        assert batch.keys[present, 0].tolist() == expected.tolist()
        assert len(pickle.dumps(batch.reserved)) < 2000, "reserved must hold only the rows of the batch"


def test_skipped_rows_have_no_reserved_values(tmp_path):
    users = np.arange(30)
    users[[3, 17]] = 99  # no such id
    write(tmp_path / "a.parquet", u=users, name=[f"n{i}" for i in range(30)])
    write(tmp_path / "b.parquet", u=np.arange(30, 40), name=pa.nulls(10))
    data = scan_reserving(tmp_path, "name", keys=("name",))
    found = collect_reserved(data, faults=ReadErrorPolicy(skip=True))
    kept = [u for u in range(30) if u not in (3, 17)]
    assert found == {u: {"name": f"n{u}"} for u in kept} | {u: {"name": None} for u in range(30, 40)}


@pytest.mark.parametrize("kind", [k for k in LEAF_TYPES if not pa.types.is_null(k)], ids=str)
def test_reserved_columns_keep_every_type(tmp_path, kind):
    array = random_array(kind, random.Random(1), 30)
    try:
        write(tmp_path / "a.parquet", x=array)
    except pa.ArrowNotImplementedError:
        pytest.skip("Parquet has no such type")
    data = scan_reserving(tmp_path, "x", keys=("x",))
    read = pq.read_table(tmp_path / "a.parquet")["x"].combine_chunks()
    assert data.form.types["x"] == plain(read.type)
    found = collect_reserved(data, Order(30, 1, "none"))
    expected = plain_array(read).to_pylist()
    assert [repr(found[u]["x"]) for u in range(30)] == [repr(value) for value in expected]
    (batch,) = batches(data, Order(30, 1, "none"))
    same, distinct = {}, plain_array(read).dictionary_encode().indices.to_pylist()
    for value, key in zip(distinct, batch.keys[:, 0].tolist(), strict=True):
        assert (key == NULL_KEY) == (value is None)
        assert same.setdefault(value, key) == key
    assert len(set(same.values())) == len(same), "two values have the same key"


@pytest.mark.parametrize(
    "first,second,whole",
    [
        (pa.array([1, 2], pa.int32()), pa.array([2**40, None], pa.int64()), pa.int64()),
        (pa.array(["a", "b"]), pa.array(["c", "a"], pa.large_string()), pa.large_string()),
        (pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", "a"]), pa.string()),
        (pa.nulls(2), pa.array(["c", "a"]), pa.string()),
        (pa.array([1, 2], pa.int16()), pa.array([7, 8], pa.uint8()), pa.int16()),
    ],
)
def test_reserved_columns_of_compatible_types_are_unified(tmp_path, first, second, whole):
    write(tmp_path / "a.parquet", x=first)
    write(tmp_path / "b.parquet", x=second, u=[2, 3])
    data = scan_reserving(tmp_path, "x", keys=("x",))
    assert data.form.types == {"x": whole}
    values = first.to_pylist() + second.to_pylist()
    assert collect_reserved(data, Order(3, 2, "window")) == {u: {"x": value} for u, value in enumerate(values)}
    keys = {value: compute_group_keys(pa.array([value], whole))[0] for value in values if value is not None}
    for batch in batches(data, Order(4, 1, "none")):
        assert batch.keys[:, 0].tolist() == [keys.get(value, NULL_KEY) for value in values]


def test_reserved_columns_of_conflicting_types_are_rejected(tmp_path):
    write(tmp_path / "a.parquet", x=[1, 2])
    write(tmp_path / "b.parquet", x=["a", "b"])
    with pytest.raises(DataError, match="reserved column 'x' has type string, but int64 in other files"):
        scan_reserving(tmp_path, "x")
    data = scan_reserving(tmp_path, "x", skip=True)
    assert len(data.left_out) == 1 and data.rows == 2 and "b.parquet" in data.left_out[0].where
    assert scan(str(tmp_path), ReadPlan(SCHEMA), declared=("x",)).rows == 4, "unread columns may differ"


def test_partition_keys_can_be_reserved(tmp_path):
    for number, day in enumerate(("2026-11-01", "2026-11-02", "__HIVE_DEFAULT_PARTITION__")):
        folder = tmp_path / f"date={day}" / f"hour={number}" / "city=S%C3%A3o%20Paulo"
        write(folder / "a.parquet", 2, u=[2 * number, 2 * number + 1])
    data = scan_reserving(tmp_path, "hour", "date", "city", keys=("date", "hour"))
    assert data.form.types == {"date": pa.string(), "hour": pa.int64(), "city": pa.string()}
    found = collect_reserved(data, Order(4, 2, "window"))
    days = ["2026-11-01", "2026-11-02", None]
    expected = [{"hour": i, "date": day, "city": "São Paulo"} for i, day in enumerate(days)]
    assert found == {u: expected[u // 2] for u in range(6)}
    keys = np.concatenate([batch.keys.numpy() for batch in batches(data, Order(6, 1, "none"))])
    assert keys[:, 1].tolist() == [0, 0, 1, 1, 2, 2]
    assert keys[:, 0].tolist() == [*compute_group_keys(pa.array(days)).repeat(2)]
    write(tmp_path / "b.parquet", 2)
    with pytest.raises(DataError, match=r"column '\w+' is missing"):
        scan_reserving(tmp_path, "date")


def test_partition_key_overrides_a_column_of_some_files(tmp_path):
    write(tmp_path / "day=1" / "a.parquet", 1)
    write(tmp_path / "day=2" / "a.parquet", u=[1], day=[7])
    data = scan_reserving(tmp_path, "day")
    assert collect_reserved(data) == {0: {"day": 1}, 1: {"day": 2}}
    write(tmp_path / "b.parquet", u=[1], day=[7])
    with pytest.raises(DataError, match="'day' is stored in this file, but other files take it from folders day="):
        scan_reserving(tmp_path, "day")


def test_struct_fields_and_transform_outputs_can_be_reserved(tmp_path):
    who = pa.array([{"id": 4, "zip": "x"}, None, {"id": 6, "zip": None}])
    write(tmp_path / "a.parquet", who=who)
    cast = Cast(do="cast", columns=["who.id"], to="string", into=["id"])
    data = scan_reserving(tmp_path, "who.zip", "id", keys=("id",), transforms=(cast,))
    found = collect_reserved(data)
    assert [list(found[u].values()) for u in range(3)] == [["x", "4"], [None, None], [None, "6"]]


@pytest.mark.parametrize("name,near", [("user_idd", "user_id"), ("zzz", None)])
def test_missing_reserved_column_is_reported(tmp_path, name, near):
    write(tmp_path / "a.parquet", user_id=[1, 2])
    for reserved, declared in (
        (ReservedColumnSet((name,)), ()),
        (ReservedColumnSet(), (name,)),
        (ReservedColumnSet(keys=(name,)), ()),
    ):
        with pytest.raises(DataError, match=f"column '{name}' is missing") as error:
            scan(str(tmp_path), ReadPlan(SCHEMA, reserved=reserved), declared=declared)
        assert "data.reserve_columns" in error.value.do and (not near or f"'{near}'?" in error.value.do)


@pytest.mark.parametrize(
    "column,message",
    [
        ([[1], [2]], "reserved column 'x' has type list"),
        ([{"a": 1}, {"a": 2}], "reserved column 'x' has type struct"),
        ([0.5, 1.5], "column 'x' of groups or items has type double"),
        ([Decimal("0.5"), Decimal(1)], "column 'x' of groups or items has type decimal"),
        ([datetime(2026, 1, 1), None], "column 'x' of groups or items has type timestamp"),
    ],
)
def test_grouping_rejects_unsupported_types(tmp_path, column, message):
    write(tmp_path / "a.parquet", x=column)
    with pytest.raises(DataError, match=message) as error:
        scan_reserving(tmp_path, keys=("x",), groups=("x",))
    assert "a.parquet, column x" in error.value.where and error.value.do


@pytest.mark.parametrize("column", [[1, 2], ["a", "b"], [True, None], [date(2026, 1, 1), None], [b"x", b""]])
def test_grouping_accepts_supported_types(tmp_path, column):
    write(tmp_path / "a.parquet", x=column)
    data = scan_reserving(tmp_path, keys=("x",), groups=("x",))
    assert data.form.plan.reserved.keys == ("x",)


def test_group_keys_keep_integers_and_hash_other_types():
    assert compute_group_keys(pa.array([5, -1, None, 2**63 - 1])).tolist() == [5, -1, NULL_KEY, 2**63 - 1]
    assert compute_group_keys(pa.array([2**64 - 1], pa.uint64())).tolist() == [-1]
    assert compute_group_keys(pa.array([True, False, None])).tolist() == [1, 0, NULL_KEY]
    assert compute_group_keys(pa.nulls(0)).tolist() == [], "such as the items of empty lists"
    assert compute_group_keys(pa.array([date(1970, 1, 3)])).tolist() == [2]
    floats = compute_group_keys(pa.array([0.0, -0.0, 1.0, float("nan"), -float("nan")]))
    assert floats[0] == floats[1] != floats[2] and floats[3] == floats[4]
    words = [str(i) for i in range(20_000)]
    keys = compute_group_keys(pa.array(words))
    assert len(set(keys.tolist())) == len(words)
    assert compute_group_keys(pa.array(words, pa.large_string()).dictionary_encode()).tolist() == keys.tolist()
    assert compute_group_keys(pa.array([w.encode() for w in words])).tolist() == keys.tolist()
    assert abs(np.sign(keys).mean()) < 0.03


def test_batches_without_reserved_columns_have_none(tmp_path):
    write(tmp_path / "a.parquet", 5)
    data = scan(str(tmp_path), ReadPlan(SCHEMA))
    (batch,) = batches(data, Order(5, 1, "none"))
    assert batch.reserved is None and batch.keys is None and batch.task_weights is None
    table = read_item(Order(5, 1, "none").items(data, 0, 0, 1)[0], data.form)
    assert table.column_names == ["labels", "ids"]
    assert Rows.of(table.to_batches()[0]).chunk.reserved is None
