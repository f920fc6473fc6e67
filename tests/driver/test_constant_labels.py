"""Test that Parquet footers reveal constant labels before training starts."""

from dataclasses import replace

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import DataError
from raytrec.config.run_config import load_config
from raytrec.driver.preflight import check_constant_labels, check_plan
from raytrec.driver.prepare import RunPlan, open_run


def constant_label(row):
    return 1


@pytest.fixture
def plan(tmp_path):
    """Function that plans a run whose training labels are `label_of(row)`."""
    folder = parquet.write_dataset(tmp_path / "d", train=60, valid=20, test=20)

    def made(label_of, *transforms, statistics=True, **task) -> RunPlan:
        for path in (folder / "train").glob("*.parquet"):
            table = pq.read_table(path)
            labels = pa.array(map(label_of, table["row"].to_pylist()), pa.int64())
            table = table.set_column(0, "label", labels)
            pq.write_table(table, path, row_group_size=7, write_statistics=statistics)
        values = parquet.config_values(folder, tmp_path / "run", data__transforms=transforms)
        return open_run(load_config(values | {"tasks": [task]}), resumed=False)

    return made


def list_warnings(plan):
    return check_constant_labels(plan)


CLASSES = {"loss": "cross_entropy", "options": {"classes": 2}}


@pytest.mark.parametrize("task", [{}, {"loss": "focal"}, CLASSES])
def test_constant_class_label_is_rejected(plan, task):
    with pytest.raises(DataError, match=r"the label of task label is 1 in every row") as error:
        check_plan(plan(constant_label, **task))
    assert "data.train" in error.value.where and "in_batch_softmax" in error.value.do
    with pytest.raises(DataError):
        list_warnings(plan(lambda row: None if row % 9 == 3 else 1, nulls="skip"))
    with pytest.raises(DataError):  # the label of the first file is null in all rows
        list_warnings(plan(lambda row: None if row < 20 else 1, nulls="skip"))


def test_trained_model_may_continue_with_one_class(plan):
    for start in ("warm", "resumed"):
        (line,) = list_warnings(replace(plan(constant_label), start=start))
        assert line.startswith("the label of task label is 1 in every row of data.train")


def test_constant_regression_label_causes_a_warning(plan):
    (line,) = check_plan(plan(constant_label, loss="mse"))
    assert line.startswith("the label of task label is 1 in every row of data.train, so mse cannot learn")


def test_labels_that_may_vary_cause_no_warning(plan):
    """The labels differ between files, have no statistics, come from a transform, or belong to a loss that
    needs only positives."""
    made = {"do": "binarize", "columns": ["row"], "at_least": 5, "into": ["label"]}
    for each in (
        plan(lambda row: int(row > 50)),
        plan(constant_label, statistics=False),
        plan(constant_label, made),
        plan(constant_label, loss="in_batch_softmax"),
        plan(constant_label, loss="from_model"),
    ):
        assert list_warnings(each) == []
