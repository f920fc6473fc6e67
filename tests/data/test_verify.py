"""Rows that a run would stop at, found by footers before it starts."""

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import DataError
from raytrec.config.schema import Schema
from raytrec.config.transforms import Clip, FillNull
from raytrec.data.fragments import scan
from raytrec.data.read_plan import ReadPlan
from raytrec.data.rows import check_accused

COLUMNS = ["label", "price", "user", "tags"]


@pytest.fixture
def folder(tmp_path):
    return parquet.dataset(tmp_path / "d", train=10, valid=10, test=900)


def change(folder, column, row, value):
    """Puts a value into a column of the second file of test/, whose row groups have 300 and 150 rows."""
    path = folder / "test/part-1.parquet"
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[row] = value
    place = table.schema.get_field_index(column)
    kind = table.schema.field(column).type
    pq.write_table(table.set_column(place, column, pa.array(values, kind)), path, row_group_size=300)


def scanned(folder, skip=False, **options):
    return scan(str(folder / "test"), ReadPlan(Schema.load(folder / "schema.yaml"), **options), skip=skip)


WRONG = [
    ("user", 40, "id 40 of feature 'user'"),
    ("user", -1, "id -1 of feature 'user'"),
    ("tags", [3, 99], "id 99 of feature 'tags'"),
    ("label", 7, "label 'label' is 7"),
    ("price", None, "column 'price' has a null"),
]


@pytest.mark.parametrize(("column", "value", "message"), WRONG)
def test_footers_accuse_and_the_row_is_named(folder, column, value, message):
    change(folder, column, 310, value)
    dataset = scanned(folder)
    assert [(g.path.rpartition("/")[2], g.index) for g in dataset.accused] == [("part-1.parquet", 1)]
    with pytest.raises(DataError, match=message) as error:
        check_accused(dataset)
    assert "part-1.parquet, row group 1" in error.value.where and "row 10" in error.value.where


def test_sound_data_is_not_accused(folder):
    assert scanned(folder).accused == ()


def test_rules_and_transforms_are_not_accused(folder):
    """What a table takes, what a transform mends, and what is skipped is nothing to stop at."""
    change(folder, "user", 310, 40)
    change(folder, "price", 5, None)
    schema = Schema.load(folder / "schema.yaml")
    assert len(scanned(folder).accused) == 2
    assert scanned(folder, skip=True).accused == ()
    schema.tables["user"].out_of_range = "hash"
    mend = (FillNull(do="fill_null", columns=["price"], value=0),)
    dataset = scan(str(folder / "test"), ReadPlan(schema, transforms=mend))
    assert dataset.accused == ()
    clip = (*mend, Clip(do="clip", columns=["user"], low=0, high=39))
    assert scanned(folder, transforms=clip).accused == ()
