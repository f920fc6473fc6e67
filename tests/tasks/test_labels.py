"""Label values are checked against the ranges of the task losses."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small import make_small_schema

from raytrec.common.errors import DataError
from raytrec.config.tasks import TaskSection
from raytrec.data.fragments import scan
from raytrec.data.item_reader import check_suspect_groups, read_item
from raytrec.data.order import LaneItem, Part
from raytrec.data.read_plans import ReadPlan
from raytrec.tasks.task import resolve_tasks
from raytrec.tasks.task_columns import label_ranges

SCHEMA = make_small_schema(
    labels=["clicked", "stars"], dense=[], sparse={"user": {"table": "user"}}, tables={"user": {"rows": 9, "dim": 4}}
)
STARS = {"label": "stars", "loss": "mse"}
COUNT = {"label": "stars", "loss": "own_parts:Count"}


def write_labels(tmp_path, stars):
    table = pa.table({"clicked": [0, 1], "stars": pa.array(stars, pa.float32()), "user": [1, 1]})
    pq.write_table(table, tmp_path / "a.parquet")
    return str(tmp_path / "a.parquet")


def read(path, *tasks, check=True):
    ranges = label_ranges(resolve_tasks([TaskSection(**task) for task in tasks], SCHEMA), SCHEMA)
    dataset = scan(path, ReadPlan(SCHEMA, label_ranges=ranges))
    if check:
        check_suspect_groups(dataset)
    item = LaneItem(0, 0, (Part(path, 0, 0, dataset.rows),), None, 0)
    return read_item(item, dataset.form)["labels"].to_pylist(), bool(dataset.suspect_groups)


@pytest.fixture(autouse=True)
def add_own_parts_to_path(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


@pytest.mark.parametrize("task,star", [(STARS, -3.0), (COUNT, 3.0), ({"label": "clicked"}, -3.0)])
def test_labels_inside_the_range_of_the_loss_are_accepted(task, star, tmp_path):
    """The range of a label without a task is not checked."""
    assert read(write_labels(tmp_path, [4.5, star]), task) == ([[0, 4.5], [1, star]], False)


@pytest.mark.parametrize(
    "task,stars,message",
    [
        ({"label": "stars"}, [0.5, 4.5], "label 'stars' is 4.5"),
        ({"label": "stars"}, [0.5, 4.5], "a number in [0, 1]"),
        ({"label": "stars"}, [0.5, 4.5], "tasks: [{label: stars, loss: mse}]"),
        (COUNT, [3.0, -1.0], "label 'stars' is -1"),
        (COUNT, [3.0, -1.0], "a number in [0, inf]"),
        (STARS, [0.5, float("nan")], "column 'stars' contains NaN"),
        (STARS, [0.5, float("inf")], "column 'stars' contains inf"),
    ],
)
def test_labels_outside_the_range_of_the_loss_are_rejected(task, stars, message, tmp_path):
    with pytest.raises(DataError) as error:
        read(write_labels(tmp_path, stars), task, check=False)
    assert message in str(error.value) and "row 1" in str(error.value)


def test_invalid_labels_are_detected_from_footers(tmp_path):
    path = write_labels(tmp_path, [3.0, -1.0])
    with pytest.raises(DataError, match="label 'stars' is 3"):
        read(path, {"label": "stars"})
    with pytest.raises(DataError, match="label 'stars' is -1"):
        read(path, COUNT)
