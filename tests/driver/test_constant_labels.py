"""A label with one value in all training data: a warning at the start, out of the footers."""

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.config.run_config import load_config
from raytrec.driver.preflight import check_plan, note_constant_labels
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
    return note_constant_labels(plan.config, plan.schema, plan.datasets["train"])


def test_a_label_with_one_value_in_all_files_is_noted(plan):
    (line,) = check_plan(plan(always))
    assert line.startswith(
        "the label of task label is 1 in every row of data.train, from which bce learns nothing"
    )
    assert noted(plan(lambda row: None if row % 9 == 3 else 1, nulls="skip"))


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
