"""A label with one value in all training data: refused or noted before the start, by the footers."""

from dataclasses import replace

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import DataError
from raytrec.config.run_config import load_config
from raytrec.driver.preflight import check_constant_labels, check_plan
from raytrec.driver.prepare import RunPlan, open_run


def always(row):
    return 1


@pytest.fixture
def plan(tmp_path):
    """Gives the plan of a run whose training data have these labels (row → label)."""
    folder = parquet.dataset(tmp_path / "d", train=60, valid=20, test=20)

    def made(label_of, *transforms, statistics=True, **task) -> RunPlan:
        for path in (folder / "train").glob("*.parquet"):
            table = pq.read_table(path)
            labels = pa.array(map(label_of, table["row"].to_pylist()), pa.int64())
            table = table.set_column(0, "label", labels)
            pq.write_table(table, path, row_group_size=7, write_statistics=statistics)
        values = parquet.settings(folder, tmp_path / "run", data__transforms=transforms)
        return open_run(load_config(values | {"tasks": [task]}), resumed=False)

    return made


def noted(plan):
    return check_constant_labels(plan)


CLASSES = {"loss": "cross_entropy", "options": {"classes": 2}}


@pytest.mark.parametrize("task", [{}, {"loss": "focal"}, CLASSES])
def test_classification_of_one_class_is_refused(plan, task):
    with pytest.raises(DataError, match=r"the label of task label is 1 in every row") as error:
        check_plan(plan(always, **task))
    assert "data.train" in error.value.where and "in_batch_softmax" in error.value.do
    with pytest.raises(DataError):
        noted(plan(lambda row: None if row % 9 == 3 else 1, nulls="skip"))


def test_a_model_that_has_learned_from_both_classes_continues_with_one(plan):
    for start in ("warm", "resumed"):
        (line,) = noted(replace(plan(always), start=start))
        assert line.startswith("the label of task label is 1 in every row of data.train")


def test_a_number_that_never_changes_is_noted(plan):
    (line,) = check_plan(plan(always, loss="mse"))
    assert line.startswith("the label of task label is 1 in every row of data.train, so mse cannot learn")


def test_what_may_differ_or_need_not_is_not_noted(plan):
    """Labels that differ though those of a file are one; without statistics; made by a transform; for losses
    that learn from positives alone."""
    made = {"do": "binarize", "columns": ["row"], "at_least": 5, "into": ["label"]}
    for each in (
        plan(lambda row: int(row > 50)),
        plan(always, statistics=False),
        plan(always, made),
        plan(always, loss="in_batch_softmax"),
        plan(always, loss="from_model"),
    ):
        assert noted(each) == []
