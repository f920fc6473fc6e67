"""Task weights of rows, compared with a reference definition row by row."""

import math
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import collate_table, make_schema
from reading import read_canonical_rows as read_file
from test_reserved import batches

from raytrec.common.errors import DataError
from raytrec.config.transforms import FillNull
from raytrec.data.fragments import scan
from raytrec.data.item_reader import check_suspect_groups
from raytrec.data.order import Order
from raytrec.data.pages.decode import ReadErrorPolicy
from raytrec.data.read_plans import ReadPlan, TaskRows
from raytrec.worker.nonfinite import dump

SCHEMA = make_schema(["u"], 99, labels=["click", "buy"])
RANGES = {"click": (0.0, 1.0), "buy": (1.0, 5.0)}
CLICK, BUY = TaskRows("click", "click", "skip"), TaskRows("buy", "buy", "skip")


def write(path, group=1000, **columns):
    rows = len(next(iter(columns.values())))
    whole = {"click": [0, 1] * (rows // 2) + [0] * (rows % 2), "buy": [1] * rows, "u": range(rows)} | columns
    pq.write_table(pa.table({n: pa.array(v) for n, v in whole.items()}), path, row_group_size=group)
    return str(path)


def read(path, tasks, faults=None, transforms=()):
    """Read all rows of a file into one batch with three padding rows."""
    plan = ReadPlan(SCHEMA, tasks=tuple(tasks), label_ranges=RANGES, transforms=transforms)
    return collate_table(*read_file(path, plan, faults), padding=3)


def compute_task_weight(task, row):
    """Return the weight of a row in a task, as defined in docs/correctness.md."""

    def missing(value):
        return value is None or (isinstance(value, float) and math.isnan(value))

    masked = task.mask or task.mask_label
    if (task.nulls == "skip" and missing(row[task.label])) or (masked and row[masked] != 1):
        return 0
    return row[task.sample_weight] if task.sample_weight else 1


ROW = st.fixed_dictionaries(
    {
        "click": st.sampled_from([0.0, 1.0, 0.5, None, math.nan]),
        "buy": st.sampled_from([1, 3, 5, None]),
        "mask": st.sampled_from([0, 1, None]),
        "flag": st.sampled_from([True, False, None]),
        "w": st.sampled_from([0.0, 0.25, 1.0, 7.0]),
    }
)
TASK = st.builds(
    TaskRows,
    label=st.sampled_from(["click", "buy"]),
    nulls=st.just("skip"),
    mask=st.sampled_from([None, "mask", "flag"]),
    mask_label=st.sampled_from([None, None, "click", "buy"]),
    sample_weight=st.sampled_from([None, "w"]),
).filter(lambda task: not (task.mask and task.mask_label))


@settings(max_examples=30, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=12), TASK, TASK)
def test_task_weights_match_the_definition(tmp_path_factory, rows, first, second):
    path = tmp_path_factory.mktemp("rows") / "a.parquet"
    tasks = [first, second, *(task for task in (CLICK, BUY) if task.label not in (first.label, second.label))]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    kinds = {"click": pa.float64(), "buy": pa.int8(), "mask": pa.int32(), "flag": pa.bool_()}
    arrays = {name: pa.array(values, kinds.get(name)) for name, values in columns.items()}
    batch = read(write(path, **arrays), tasks)
    padding = [[0.0] * len(tasks)] * 3
    assert batch.task_weights.tolist() == [[compute_task_weight(task, row) for task in tasks] for row in rows] + padding
    clicks = [0 if row["click"] is None or math.isnan(row["click"]) else row["click"] for row in rows]
    assert batch.labels[: len(rows), 0].tolist() == clicks
    assert batch.labels[: len(rows), 1].tolist() == [row["buy"] or 1 for row in rows], "closest to 0 in range"


def test_row_can_count_in_a_single_task(tmp_path):
    path = write(
        tmp_path / "a.parquet", click=[0, None, 1], buy=[None, 2, 3], w=[Decimal(n) for n in ("1.0", "2.0", "0.5")]
    )
    weighted = TaskRows("buy", "buy", "skip", sample_weight="w")
    assert read(path, [CLICK, weighted]).task_weights[:3].tolist() == [[1, 0], [0, 2], [1, 0.5]]
    with pytest.raises(DataError, match=r"column 'click' contains a null") as error:
        read(path, [TaskRows("click"), weighted])
    assert "row group 0, column click, row 1" in error.value.where
    assert "tasks: [{label: click, nulls: skip}]" in error.value.do
    strict = TaskRows("click", "strict", "error")
    with pytest.raises(DataError, match="column 'click' contains a null"):
        read(path, [CLICK, strict, weighted])


def test_label_used_only_as_mask_can_be_null(tmp_path):
    path = write(tmp_path / "a.parquet", click=[0, None, 1], buy=[1, 2, 3])
    batch = read(path, [TaskRows("buy", mask_label="click")])
    assert batch.task_weights[:3].tolist() == [[0], [0], [1]]
    task = TaskRows("buy", mask_label="click")
    assert not scan(path, ReadPlan(SCHEMA, tasks=(task,), label_ranges=RANGES)).suspect_groups


def test_null_labels_are_skipped_after_transforms(tmp_path):
    path = write(tmp_path / "a.parquet", click=[0, None, 1], buy=pa.nulls(3, pa.int8()))
    fill = FillNull(do="fill_null", columns=["click"], value=1)
    batch = read(path, [CLICK, BUY], transforms=(fill,))
    assert batch.task_weights[:3].tolist() == [[1, 0]] * 3 and batch.labels[1, 0] == 1
    path = write(tmp_path / "b.parquet", click=[0, 1], buy=pa.nulls(2))
    assert read(path, [CLICK, BUY]).task_weights[:2].tolist() == [[1, 0]] * 2
    with pytest.raises(DataError, match="label 'buy' has type null"):
        read(path, [CLICK, TaskRows("buy")])


def test_skipped_rows_have_zero_weight_in_all_tasks(tmp_path):
    path = write(tmp_path / "a.parquet", w=[1.0, -1.0, 2.0, 3.0], mask=[1, 1, 2, 1])
    tasks = [TaskRows("click", sample_weight="w"), TaskRows("buy", mask="mask")]
    batch = read(path, tasks, ReadErrorPolicy(skip=True))
    assert batch.weights.tolist() == [1, 0, 0, 1, 0, 0, 0]
    assert batch.task_weights[:4].tolist() == [[1, 1], [0, 0], [0, 0], [3, 1]]


@pytest.mark.parametrize(
    "columns,task,expected_text,in_footer",
    [
        ({"w": [1.0, 2.0, math.nan]}, {"sample_weight": "w"}, "column 'w' contains NaN", False),
        ({"w": [1.0, 2.0, None]}, {"sample_weight": "w"}, "column 'w' contains a null", True),
        ({"w": [1.0, 2.0, math.inf]}, {"sample_weight": "w"}, "column 'w' contains inf", True),
        ({"w": [1.0, 2.0, -0.5]}, {"sample_weight": "w"}, "sample weight 'w' is -0.5", True),
        ({"m": [1.0, None, 0.5]}, {"mask": "m"}, "mask 'm' is 0.5", False),
        ({"m": [0, 1, 2]}, {"mask": "m"}, "mask 'm' is 2", True),
        ({"click": [0.5, None, math.inf]}, {}, "column 'click' contains inf", True),
        ({"click": [0.5, None, -1]}, {}, "label 'click' is -1", True),
    ],
)
def test_invalid_weights_masks_and_labels_are_rejected(tmp_path, columns, task, expected_text, in_footer):
    """The error names the row; values visible in footer statistics are reported before the run."""
    path = write(tmp_path / "a.parquet", group=2, **columns)
    tasks = (TaskRows("click", "click", "skip", **task),)
    with pytest.raises(DataError, match=expected_text) as error:
        read(path, tasks)
    assert f"a.parquet, row group 1, column {next(iter(columns))}, row 0" in error.value.where
    data = scan(path, ReadPlan(SCHEMA, tasks=tasks, label_ranges=RANGES))
    assert [group.index for group in data.suspect_groups] == [1] * in_footer
    if in_footer:
        with pytest.raises(DataError, match=expected_text):
            check_suspect_groups(data)


@pytest.mark.parametrize(
    "column,task,expected_advice",
    [
        ({"m": ["yes", "no"]}, {"mask": "m"}, "{do: binarize, columns: [m], positive: […]}"),
        ({"w": ["1", "2"]}, {"sample_weight": "w"}, "add to data.transforms: {do: cast, columns: [w], to: float32}"),
        ({"w": [[1.0], [2.0]]}, {"sample_weight": "w"}, "or transform each value of w to one number"),
    ],
)
def test_advice_for_masks_and_weights_keeps_their_role(tmp_path, column, task, expected_advice):
    path = write(tmp_path / "a.parquet", click=[0, 1], **column)
    with pytest.raises(DataError) as error:
        scan(path, ReadPlan(SCHEMA, tasks=(TaskRows("click", **task),), label_ranges=RANGES))
    assert expected_advice in error.value.do and "sparse" not in error.value.do


def test_class_label_must_be_a_whole_number(tmp_path):
    path = write(tmp_path / "a.parquet", buy=[1.0, 2.0, 2.5])
    with pytest.raises(DataError, match=r"label 'buy' is 2.5") as error:
        read_file(path, ReadPlan(SCHEMA, label_ranges=RANGES, whole_labels=("buy",)))
    assert "a whole number in [1, 5]" in error.value.expected


@pytest.mark.parametrize(
    "columns,task,why",
    [
        ({"click": [None] * 4}, {}, "its label 'click' is null in every row"),
        ({"m": [0, 0, None, 0]}, {"mask": "m"}, "its mask 'm' is not 1 in any row"),
        ({"m": [False] * 4}, {"mask": "m"}, "its mask 'm' is not 1 in any row"),
        ({"buy": [0.5] * 4}, {"mask_label": "buy"}, "its mask 'buy' is not 1 in any row"),
        ({"w": [0.0] * 4}, {"sample_weight": "w"}, "its sample weight 'w' is 0 in every row"),
        ({"click": [None, None, 1, 1], "m": [1, 1, 0, 0]}, {"mask": "m"}, "label, mask or weight excludes every row"),
        ({"click": [None, 1, 1, 1], "m": [1, 0, 0, 1]}, {"mask": "m"}, None),
        ({"w": [0, 0, 0, 1]}, {"sample_weight": "w"}, None),
    ],
)
def test_tasks_without_rows_are_detected_from_footers(tmp_path, columns, task, why):
    columns = {n: pa.array(v, pa.int8()) if set(v) == {None} else v for n, v in columns.items()}
    for part in range(2):
        write(tmp_path / f"{part}.parquet", group=2, **columns)
    write(tmp_path / "empty.parquet", **{n: pa.array(v).slice(0, 0) for n, v in columns.items()})
    tasks = (TaskRows("click", "it", "skip", **task), TaskRows("buy", "other", "skip"))
    empty = scan(str(tmp_path), ReadPlan(SCHEMA, tasks=tasks)).empty_tasks
    assert list(empty) == ["it"] * bool(why) and (not why or why in empty["it"])
    if why:
        write(tmp_path / "more.parquet", **{"click": [1], "buy": [1.0], "m": [True], "w": [1]})
        some = {n: v for n, v in columns.items() if n not in ("click", "buy")}
        assert not some or not scan(str(tmp_path / "more.parquet"), ReadPlan(SCHEMA, tasks=tasks)).empty_tasks


@pytest.mark.parametrize(
    "columns,task,expected_text",
    [
        ({"m": ["a", "b"]}, {"mask": "m"}, "mask 'm' has type string"),
        ({"m": [[1], [0]]}, {"mask": "m"}, "mask 'm' has type list"),
        ({"w": ["a", "b"]}, {"sample_weight": "w"}, "sample weight 'w' has type string"),
        ({"w": pa.nulls(2)}, {"sample_weight": "w"}, "sample weight 'w' has type null"),
        ({"x": [1, 2]}, {"mask": "mask"}, "column 'mask' is missing"),
        ({"weigth": [1, 2]}, {"sample_weight": "weight"}, "column 'weight' is missing"),
    ],
)
def test_unusable_mask_and_weight_columns_are_rejected(tmp_path, columns, task, expected_text):
    path = write(tmp_path / "a.parquet", **columns)
    with pytest.raises(DataError, match=expected_text) as error:
        scan(path, ReadPlan(SCHEMA, tasks=(TaskRows("click", "click", **task),)))
    assert "a.parquet" in error.value.where and error.value.do
    if "missing" in expected_text:
        assert f"{next(iter(task))} of task click" in error.value.expected


def test_unweighted_tasks_read_no_extra_columns(tmp_path):
    path = write(tmp_path / "a.parquet", click=[0, 1])
    assert read(path, [TaskRows("click"), TaskRows("buy")]).task_weights is None
    data = scan(path, ReadPlan(SCHEMA, read_labels=False, tasks=(CLICK, TaskRows("buy", mask="nowhere"))))
    assert data.form.columns == ["u"]
    (batch,) = batches(data, Order(2, 1, "none"))
    assert batch.task_weights is None and not batch.labels.any() and batch.labels.shape == (2, 2)
    assert np.array_equal(batch.weights, [1, 1])


def test_batch_dump_includes_task_weights(tmp_path):
    path = write(tmp_path / "a.parquet", click=[0, None, 1], buy=[None, 2, 3])
    kept = dump(read(path, [CLICK, BUY]), SCHEMA, str(tmp_path), 5, 0)
    assert pq.read_table(kept)["task_weights"].to_pylist() == [[1, 0], [0, 1], [1, 1]]
    kept = dump(read(write(tmp_path / "b.parquet", click=[0, 1]), []), SCHEMA, str(tmp_path), 6, 0)
    assert "task_weights" not in pq.read_table(kept).column_names
