"""Each transform compared with plain Python, on flat and list columns; user-defined functions."""

import math
from datetime import date, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import ValidationError
from reading import parse_transforms, read_canonical_rows

from raytrec.common.errors import DataError
from raytrec.config.features import resolve_input_columns
from raytrec.config.schema import Schema
from raytrec.data.read_plans import ReadPlan
from raytrec.data.transform import apply_transforms


def run(column, **spec):
    """Return the column `x` after one transform."""
    table = pa.table({"x": column, "other": pa.nulls(len(column))})
    (transform,) = parse_transforms([{"columns": ["x"], **spec}])
    after = apply_transforms(table, (transform,), "test")
    assert after.column_names == ["x", "other"]
    return after["x"].to_pylist()


NAN = float("nan")
LOG_10, MINUS_LOG_10 = pytest.approx(math.log(10)), pytest.approx(-math.log(10))  # do: log is sign(x) log(1 + |x|)


@pytest.mark.parametrize(
    "spec,column,expected",
    [
        ({"do": "fill_null", "value": 7}, [1, None, 3], [1, 7, 3]),
        ({"do": "fill_null", "value": 0.5}, [1.5, None, NAN], [1.5, 0.5, 0.5]),
        ({"do": "fill_null", "value": "?"}, ["a", None], ["a", "?"]),
        ({"do": "fill_null", "value": 9}, [[1, None], None, []], [[1, 9], [], []]),
        ({"do": "clip", "low": 0, "high": 10}, [-1, None, 5, 11], [0, None, 5, 10]),
        ({"do": "clip", "high": 2}, [1.5, 2.5], [1.5, 2.0]),
        ({"do": "clip", "low": 0}, [[-4, 4], [], [1]], [[0, 4], [], [1]]),
        ({"do": "decay", "half_life": 2}, [0, 2, 4, -1, None], [1.0, 0.5, 0.25, 1.0, None]),
        ({"do": "decay", "half_life": 3, "floor": 0.5}, [[3.0, 6.0], [], [1e9]], [[0.75, 0.625], [], [0.5]]),
        ({"do": "bucketize", "boundaries": [1, 2.5]}, [0, 1, 2, 3, None], [0, 1, 1, 2, None]),
        ({"do": "bucketize", "boundaries": [0]}, [[-1.0, NAN, 1.0], []], [[0, 1], []]),
        ({"do": "binarize", "at_least": 4}, [5, 4, 3, None], [1, 1, 0, None]),
        ({"do": "binarize", "at_least": 3.5}, [3.5, 3.4, NAN, None], [1, 0, None, None]),
        ({"do": "binarize", "positive": ["yes", "y"]}, ["yes", "no", "y", None], [1, 0, 1, None]),
        ({"do": "binarize", "positive": [1, 2]}, [1, 0, 2.0, None], [1, 0, 1, None]),
        ({"do": "binarize", "positive": [True]}, [True, False, None], [1, 0, None]),
        ({"do": "binarize", "at_least": 2}, [[1, 2], [], None], [[0, 1], [], []]),
        ({"do": "cast", "to": "int64"}, [" 12", "-3", None], [12, -3, None]),
        ({"do": "cast", "to": "int64"}, [4.0, NAN, None], [4, None, None]),
        ({"do": "cast", "to": "int64"}, [True, False, None], [1, 0, None]),
        ({"do": "cast", "to": "int64"}, [["7"], [None, "8"]], [[7], [8]]),
        ({"do": "cast", "to": "int64"}, [datetime(1970, 1, 2, 0, 0, 1, 900_000), None], [86_401, None]),
        ({"do": "cast", "to": "int64"}, [[datetime(1970, 1, 2), datetime(1970, 1, 1)], []], [[86_400, 0], []]),
        ({"do": "cast", "to": "float32"}, [date(1970, 1, 2), None], [86_400, None]),
        ({"do": "cast", "to": "int64"}, [timedelta(minutes=2), None], [120, None]),
        ({"do": "cast", "to": "float32"}, ["0.5", "1e3", None], [0.5, 1000, None]),
        ({"do": "cast", "to": "string"}, [12, None], ["12", None]),
        ({"do": "drop_null"}, [[1, None, 2], [None], None, []], [[1, 2], [], [], []]),
        ({"do": "drop_null"}, [["a", None]], [["a"]]),
        ({"do": "log"}, [0, 9, -9, None], [0, LOG_10, MINUS_LOG_10, None]),
        ({"do": "log"}, [[0.0], [9.0]], [[0], [LOG_10]]),
    ],
)
def test_built_in_transforms_match_plain_python(spec, column, expected):
    assert run(column, **spec) == expected


def test_hash_maps_values_to_stable_rows():
    ints, text = run([*range(1000), None], do="hash", rows=50), run([*"abcab", None], do="hash", rows=50)
    assert ints[-1] is None and text[-1] is None
    assert all(0 <= i < 50 for i in ints[:-1] + text[:-1])
    assert len(set(ints)) == 51 and text[:2] == text[3:5]
    assert run([[1, 2], [], [1]], do="hash", rows=50) == [ints[1:3], [], ints[1:2]]
    assert ints == run([*range(1000), None], do="hash", rows=50), "hashes differ between runs"


def test_lookup_vocabulary_maps_values_to_positions(tmp_path):
    text, table = tmp_path / "v.txt", tmp_path / "v.parquet"
    text.write_text("red\ngreen\nblue\n")
    pq.write_table(pa.table({"value": [30, 10, 20]}), table)
    spec = {"do": "lookup_vocabulary", "vocabulary": str(text)}
    assert run(["blue", "grey", None], **spec) == [2, None, None]
    assert run(["blue", "grey", None], **spec, unknown=3) == [2, 3, None]
    assert run([["blue", "grey", "red"], []], **spec) == [[2, 0], []]
    dictionary = pa.array(["green", "red"]).dictionary_encode()
    assert run(dictionary, **spec) == [1, 0]
    assert run([10, 11], do="lookup_vocabulary", vocabulary=str(table), unknown=0) == [1, 0]
    (tmp_path / "w.txt").write_text("red\nred\n")
    with pytest.raises(DataError, match="duplicate values"):
        run(["x"], do="lookup_vocabulary", vocabulary=str(tmp_path / "w.txt"))


TIMESTAMPS = [datetime(2026, 2, 28, 23, 59, 58), datetime(2024, 12, 30, 0, 5), datetime(1969, 7, 20, 20, 17, 40), None]
DATE_PARTS = {
    "weekday": lambda t: t.weekday(),
    "day": lambda t: t.day,
    "day_of_year": lambda t: t.timetuple().tm_yday,
    "week": lambda t: t.isocalendar().week,
    "month": lambda t: t.month,
    "quarter": lambda t: (t.month + 2) // 3,
    "year": lambda t: t.year,
}
TIME_PARTS = {"second": lambda t: t.second, "minute": lambda t: t.minute, "hour": lambda t: t.hour}


def apply_to_each(function, values):
    return [None if value is None else function(value) for value in values]


@pytest.mark.parametrize("part", [*DATE_PARTS, *TIME_PARTS])
def test_date_part_matches_python_datetime(part):
    parts = DATE_PARTS | TIME_PARTS
    expected = apply_to_each(parts[part], TIMESTAMPS)
    for kind in (pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("us", "UTC")):
        assert run(pa.array(TIMESTAMPS, kind), do="date_part", part=part) == expected
    text = apply_to_each(str, TIMESTAMPS)
    assert run(text, do="date_part", part=part) == expected
    assert run(pa.array(text, pa.string_view()), do="date_part", part=part) == expected
    assert run(apply_to_each(lambda t: f"{t.isoformat()}Z", TIMESTAMPS), do="date_part", part=part) == expected
    assert (
        run(apply_to_each(lambda t: f"{t - timedelta(hours=2)}-02:00", TIMESTAMPS), do="date_part", part=part)
        == expected
    )
    seconds = apply_to_each(lambda t: round((t - datetime(1970, 1, 1)).total_seconds()), TIMESTAMPS)
    assert run(seconds, do="date_part", part=part, since_1970="s") == expected
    thousands = apply_to_each(lambda s: s * 1000.0, seconds)
    assert run(thousands, do="date_part", part=part, since_1970="ms") == expected
    assert run([TIMESTAMPS[:2], [], None], do="date_part", part=part) == [expected[:2], [], []]
    if part in DATE_PARTS:
        assert run(pa.array(TIMESTAMPS, pa.date32()), do="date_part", part=part) == expected
    else:
        clock = [time(23, 59, 58), None]
        assert run(pa.array(clock, pa.time32("s")), do="date_part", part=part) == apply_to_each(parts[part], clock)


def test_date_part_uses_the_timezone():
    there = [t.replace(tzinfo=ZoneInfo("UTC")).astimezone(ZoneInfo("Asia/Kolkata")) for t in TIMESTAMPS[:2]]
    spec = {"do": "date_part", "timezone": "Asia/Kolkata"}
    assert run(TIMESTAMPS[:2], **spec, part="hour") == [t.hour for t in there]
    assert run(TIMESTAMPS[:2], **spec, part="day") == [t.day for t in there]
    assert run(TIMESTAMPS[:2], **spec, part="hour_of_week") == [24 * t.weekday() + t.hour for t in there]
    with pytest.raises(DataError, match="Asia/Kolkatta"):
        run(pa.array([], pa.timestamp("us")), do="date_part", part="hour", timezone="Asia/Kolkatta")


def test_age_is_the_time_until_a_reference():
    until = "2026-03-01"
    expected = apply_to_each(lambda t: pytest.approx((datetime(2026, 3, 1) - t).total_seconds() / 86400), TIMESTAMPS)
    assert run(TIMESTAMPS, do="age", until=until) == expected
    assert run(apply_to_each(str, TIMESTAMPS), do="age", until=until) == expected
    assert run([TIMESTAMPS[:2], []], do="age", until=until) == [expected[:2], []]
    hours = apply_to_each(lambda days: pytest.approx(24 * days.expected), expected)
    assert run(pa.array(TIMESTAMPS, pa.timestamp("ns", "Asia/Tokyo")), do="age", until=until, unit="hours") == hours
    assert run(pa.array([timedelta(minutes=90), None]), do="age", unit="hours") == [1.5, None]
    assert run([date(2026, 2, 27), date(2026, 3, 2)], do="age", until="2026-03-01T12:00") == [2.5, -0.5]
    assert run([1_700_000_000_000], do="age", until="2023-11-14T22:13:21", unit="seconds", since_1970="ms") == [1]
    table = pa.table({"joined": TIMESTAMPS, "now": [datetime(2026, 3, 1)] * 3 + [None]})
    (spec,) = parse_transforms([{"do": "age", "columns": ["joined"], "into": ["days"], "until_column": "now"}])
    assert resolve_input_columns([spec], ["days"]) == ["joined", "now"]
    assert apply_transforms(table, (spec,), "test")["days"].to_pylist() == expected
    (read,) = parse_transforms([yaml.safe_load("{do: age, columns: [x], until: 2026-03-01}")])
    assert read.until == "2026-03-01", "YAML parses unquoted dates"


@pytest.mark.parametrize(
    "spec,message",
    [
        ({"do": "binarize"}, "at_least .* or positive"),
        ({"do": "binarize", "at_least": 1, "positive": ["a"]}, "at_least .* or positive"),
        ({"do": "age", "until": "2026-01-01", "until_column": "b"}, "not both"),
        ({"do": "date_part", "part": "hours"}, "hour"),
        ({"do": "decay", "half_life": 0}, "greater than 0"),
        ({"do": "decay", "half_life": 1, "floor": 2}, "less than or equal to 1"),
        ({"do": "cast", "to": "int"}, "int64"),
    ],
)
def test_invalid_transform_settings_are_rejected(spec, message):
    with pytest.raises(ValidationError, match=message):
        parse_transforms([{"columns": ["x"], **spec}])


@pytest.mark.parametrize(
    "spec,column,message",
    [
        ({"do": "binarize", "positive": [True]}, ["yes"], "quote the value"),
        ({"do": "binarize", "positive": ["1"]}, [1], "has type int64, but positive contains '1'"),
        ({"do": "binarize", "at_least": 1}, ["1"], "for text, set positive"),
        ({"do": "date_part", "part": "hour"}, [1_700_000_000], "since_1970"),
        ({"do": "date_part", "part": "hour"}, ["noon"], "noon"),
        ({"do": "age"}, TIMESTAMPS, "until_column"),
        ({"do": "age", "until": "soon"}, TIMESTAMPS, "soon"),
        ({"do": "cast", "to": "int64"}, [1.5], "1.5"),
        ({"do": "cast", "to": "float32"}, ["many"], "many"),
    ],
)
def test_transforms_reject_unsuitable_columns(spec, column, message):
    with pytest.raises(DataError, match=message):
        run(column, **spec)


@pytest.mark.parametrize(
    "spec,expected",
    [
        ({"do": "fill_null", "value": 0.5}, [0.5, 0.5]),
        ({"do": "fill_null", "value": "?"}, ["?", "?"]),
        ({"do": "clip", "low": 0}, [None, None]),
        ({"do": "decay", "half_life": 1}, [None, None]),
        ({"do": "hash", "rows": 5}, [None, None]),
        ({"do": "date_part", "part": "hour"}, [None, None]),
        ({"do": "age", "until": "2026-01-01"}, [None, None]),
        ({"do": "binarize", "positive": ["yes"]}, [None, None]),
        ({"do": "binarize", "at_least": 1}, [None, None]),
        ({"do": "cast", "to": "string"}, [None, None]),
    ],
)
def test_transforms_handle_all_null_columns(spec, expected):
    assert run(pa.nulls(2), **spec) == expected
    lists = run(pa.array([[None], []], pa.list_(pa.null())), **spec)
    assert lists == ([expected[:1], []] if expected[0] is not None else [[], []])


def test_transforms_support_rare_arrow_types():
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([7, 1]))
    assert run(runs, do="clip", low=5) == [7, 7, 5]
    assert run(pa.array([1.5, None], pa.float16()), do="fill_null", value=0) == [1.5, 0]
    filled = run(pa.array([1, None], pa.decimal128(5, 2)), do="fill_null", value=0.25)
    assert filled == [1, pytest.approx(0.25)]
    assert run(pa.array([1, 20], pa.decimal32(5, 2)), do="clip", high=10) == [1, 10]
    assert run(pa.array(["a", None], pa.string_view()), do="fill_null", value="?") == ["a", "?"]


def test_transforms_support_all_list_types():
    for kind in (pa.large_list(pa.int64()), pa.list_(pa.int32(), 2), pa.list_view(pa.int64())):
        assert run(pa.array([[1, 20], [3, 4]], kind), do="clip", high=10) == [[1, 10], [3, 4]]
    sliced = pa.array([[9], None, [1, 20], [3, 4]])[1:]
    assert run(sliced, do="clip", high=10) == [[], [1, 10], [3, 4]]


def test_input_columns_of_transforms_are_resolved():
    steps = parse_transforms(
        [
            {"do": "log", "columns": ["a"]},
            {"do": "hash", "columns": ["b", "c"], "into": ["B", "C"], "rows": 5},
            {"do": "m:f", "reads": ["a", "d"], "writes": ["e"]},
        ]
    )
    assert sorted(resolve_input_columns(steps, ["a", "B", "e", "z"])) == ["a", "b", "c", "d", "z"]


@pytest.mark.parametrize(
    "spec,message",
    [
        ({"do": "log"}, r"transform log of x in data.transforms failed: "),
        ({"do": "lookup_vocabulary", "vocabulary": "no-such.txt"}, "no-such.txt"),
        ({"do": "fill_null", "value": "many"}, "fill_null"),
        ({"do": "cast", "to": "int64"}, "a time of day cannot be cast"),
    ],
)
def test_failing_transform_is_named(spec, message):
    values = {"fill_null": [1, 2], "cast": [time(3, 4)]}.get(spec["do"], ["a", "b"])
    with pytest.raises(DataError, match=message) as error:
        run(values, **spec)
    assert "test" in str(error.value)


USER_MODULE = """
import pyarrow.compute as pc

def ratio(table, smooth):
    value = pc.divide(table["clicks"].cast("float64"), pc.add(table["views"], smooth))
    return table.append_column("ratio", value)

def shorter(table):
    return table.slice(1)

def nothing(table, smooth):
    return None

def no_ratio(table, smooth):
    return table
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_features.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)


def read_transformed_rows(tmp_path, *transforms, **columns):
    """Write a file; return its transformed rows in canonical form and the resolved read plan."""
    schema = {
        "labels": ["label"],
        "dense": ["ratio"],
        "sparse": {"city": {"table": "city"}},
        "tables": {"city": {"rows": 100, "dim": 4}},
    }
    table = {"label": [0, 1, 1], "clicks": [1, 2, 3], "views": [9, 18, 27], "city": ["x", "y", None]}
    pq.write_table(pa.table({**table, **columns}), tmp_path / "a.parquet")
    plan = ReadPlan(Schema.parse(schema, "t"), transforms=parse_transforms(transforms))
    return read_canonical_rows(tmp_path / "a.parquet", plan)


RATIO = {"do": "my_features:ratio", "reads": ["clicks", "views"], "writes": ["ratio"], "options": {"smooth": 1}}
HASH = {"do": "hash", "columns": ["city"], "rows": 100}


def test_transforms_make_files_fit_the_schema(user_module, tmp_path):
    table, form = read_transformed_rows(tmp_path, RATIO, HASH, unused=[None] * 3)
    assert set(form.columns) == {"label", "clicks", "views", "city"}
    assert table["dense"].to_pylist() == [[pytest.approx(x)] for x in (0.1, 2 / 19, 3 / 28)]
    ids = [i for (i,) in table["ids"].to_pylist()]
    assert ids[2] == -1 and min(ids[:2]) >= 0 and max(ids) < 100


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([HASH], "column 'ratio' is missing"),
        ([RATIO | {"do": "my_features:no_ratio"}, HASH], "column 'ratio' is missing"),
        ([RATIO], "sparse feature 'city' has values of type string"),
        (
            [RATIO | {"do": "my_features:nothing"}],
            "my_features:nothing of ratio in data.transforms failed: it returned",
        ),
        ([RATIO | {"do": "nowhere:f"}], "No module named 'nowhere'"),
        ([RATIO, {"do": "my_features:shorter"}, HASH], "it returned 2 rows, not 3"),
    ],
)
def test_invalid_results_of_user_functions_are_rejected(user_module, tmp_path, transforms, message):
    with pytest.raises(DataError, match=message) as error:
        read_transformed_rows(tmp_path, *transforms)
    assert ("after data.transforms" in str(error.value)) == ("no_ratio" in str(transforms))
    assert ("a.parquet, row group 0" in str(error.value)) == ("2 rows" in message)


def test_transform_can_swap_columns():
    table = pa.table({"a": [1], "b": [5]})
    (swap,) = parse_transforms([{"do": "clip", "columns": ["a", "b"], "into": ["b", "a"], "high": 9}])
    assert apply_transforms(table, (swap,), "test").to_pylist() == [{"a": 5, "b": 1}]
