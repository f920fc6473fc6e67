"""Folders key=value: their order, ranges of them; several folders."""

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import DataError
from raytrec.data.fragments import scan
from raytrec.data.listing import list_files
from raytrec.data.order import Order
from raytrec.data.partitions import NO_VALUE
from raytrec.data.read_plan import ReadPlan, Reserved
from raytrec.data.rows import read_item

SCHEMA = parquet.schema()
HOURS = [f"date=2026-11-0{day}/hour={hour}" for day in (1, 2, 3) for hour in (2, 9, 10)]


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    root = tmp_path_factory.mktemp("lake") / "clicks"
    for hour in HOURS:
        (root / hour).mkdir(parents=True)
        pq.write_table(parquet.table(3, 0), root / hour / "a.parquet")
    return root


def between(root, first, last):
    """The partitions that a range takes in."""
    files = list_files(str(root), "data.train", (first, last)).files
    return [file.removeprefix(f"{root}/").removesuffix("/a.parquet") for file in files]


def test_order_is_that_of_time(clicks):
    assert between(clicks, None, None) == HOURS, "hour 9 comes before hour 10"
    groups = scan(str(clicks), ReadPlan(SCHEMA)).groups
    assert [group.path.split("hour=")[1][0] for group in groups[:3]] == list("291")


@pytest.mark.parametrize(
    "first,last,expected",
    [
        ("date=2026-11-02", None, HOURS[3:]),
        (None, "date=2026-11-02", HOURS[:6]),
        ("date=2026-11-02", "date=2026-11-02", HOURS[3:6]),
        ("date=2026-11-01/hour=9", "date=2026-11-02/hour=2", HOURS[1:4]),
        ("date=2026-11-01/hour=10", "date=2026-11-02", HOURS[2:6]),
        ("date=2026-11-01/hour=3", "date=2026-11-01/hour=09", HOURS[1:2]),
    ],
)
def test_ranges(clicks, first, last, expected):
    assert between(clicks, first, last) == expected


@pytest.mark.parametrize(
    "first,last,message",
    [
        ("2026-11-02", None, "'2026-11-02' is not a partition"),
        ("day=2026-11-02", None, "data.partitions has day=2026-11-02"),
        ("hour=9", None, "a file's partition is date=2026-11-01/hour=2"),
        ("date=2027-01-01", None, "no partition between date=2027-01-01 and the last"),
        ("date=2026-11-03", "date=2026-11-01", "no partition between"),
    ],
)
def test_wrong_ranges(clicks, first, last, message):
    with pytest.raises(DataError, match=message):
        between(clicks, first, last)


def test_files_outside_of_partitions(clicks, tmp_path):
    parquet.write(tmp_path / "plain", 10, 0, files=1)
    with pytest.raises(DataError, match="a file's partition is none"):
        between(tmp_path / "plain", "date=2026-11-01", None)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["4", "-10", "0", NO_VALUE], pa.int64()),
        (["04", "4"], pa.string()),
        (["-0", "0"], pa.string()),
        (["+4", "4"], pa.string()),
        (["1_000", "1000"], pa.string()),
        (["٤", "4"], pa.string()),
        (["²", "2"], pa.string()),
        (["9" * 19, "1"], pa.string()),
        (["1.0", "1"], pa.string()),
        (["true", "1"], pa.string()),
        (["", "1"], pa.string()),
        (["a%2Fb", "a b"], pa.string()),
        (["%FF", "%FE"], pa.string()),
    ],
)
def test_no_two_values_become_one(tmp_path, values, kind):
    for value in values:
        (tmp_path / f"k={value}").mkdir()
        pq.write_table(parquet.table(1, 0), tmp_path / f"k={value}/a.parquet")
    data = scan(str(tmp_path), ReadPlan(SCHEMA, reserved=Reserved(("k",))))
    tables = [read_item(item, data.form) for item in Order(1, 1, shuffle="none").items(data, 0, 0, 1)]
    found = [value for table in tables for value in table["reserved.k"].to_pylist()]
    assert data.form.types == {"k": kind} and len(set(found)) == len(values), found
    assert (None in found) == (NO_VALUE in values)


def test_order_of_numbers_in_names(tmp_path):
    names = ["k=-2", "k=4", "k=04", "k=10", "k=²"]
    for name in names:
        (tmp_path / name).mkdir()
        pq.write_table(parquet.table(1, 0), tmp_path / name / "a=b.parquet")
    order = [file.split("/")[-2] for file in list_files(str(tmp_path), "data.train").files]
    assert order == ["k=-2", "k=04", "k=4", "k=10", "k=²"]
    assert len(list_files(str(tmp_path), "data.train", ("k=4", "k=04")).files) == 2


def test_bounds_are_written_as_values_are_read(tmp_path):
    for hour in (1, 2, 3):
        (tmp_path / f"at=day%20{hour}").mkdir()
        pq.write_table(parquet.table(1, 0), tmp_path / f"at=day%20{hour}/a.parquet")
    assert len(list_files(str(tmp_path), "data.train", ("at=day 2", None)).files) == 2
    assert len(list_files(str(tmp_path), "data.train", ("at=day%202", None)).files) == 2


def test_several_folders_in_their_order(clicks):
    late, early = (str(clicks / HOURS[i]) for i in (4, 0))
    data = scan([late, early], ReadPlan(SCHEMA))
    assert [group.path.split("clicks/")[1][:23] for group in data.groups] == [
        "date=2026-11-02/hour=9/",
        "date=2026-11-01/hour=2/",
    ]
    assert data.rows == 6
    with pytest.raises(DataError, match="1 files are named twice"):
        scan([str(clicks), late], ReadPlan(SCHEMA), "data.train")
    with pytest.raises(DataError, match=r"data.train=.*no such folder|no such folder"):
        scan([late, str(clicks / "gone")], ReadPlan(SCHEMA), "data.train")
