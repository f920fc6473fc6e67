"""A label with one value in all training data: a warning at the start, out of the footers."""

from contextlib import nullcontext

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.config.run_config import load_config
from raytrec.driver import run
from raytrec.driver.console import RunConsole
from raytrec.driver.datasets import open_data
from raytrec.driver.preflight import note_constant_labels


@pytest.fixture
def folder(tmp_path):
    return parquet.dataset(tmp_path / "d", train=60, valid=20, test=20)


def with_labels(folder, label_of, **settings):
    """Writes the training data's labels again: row → label."""
    paths, row = sorted((folder / "train").rglob("*.parquet")), 0
    for path in paths:
        table = pq.read_table(path)
        labels = pa.array([label_of(row + i) for i in range(table.num_rows)], pa.int64())
        place, row = table.column_names.index("label"), row + table.num_rows
        pq.write_table(table.set_column(place, "label", labels), path, row_group_size=7, **settings)
    return len(paths)


def lines(folder, *transforms, **task):
    config = load_config(parquet.settings(folder, "unused", data__transforms=transforms) | {"tasks": [task]})
    schema, datasets = open_data(config)
    return note_constant_labels(config, schema, datasets["train"])


def test_a_label_with_one_value_in_all_files_is_noted(folder):
    files = with_labels(folder, lambda row: 1)
    assert files > 1
    (line,) = lines(folder)
    assert line.startswith(
        "the label of task label is 1 in every row of data.train, from which bce learns nothing"
    )
    with_labels(folder, lambda row: None if row % 9 == 3 else 1)
    assert lines(folder, nulls="skip")


def test_labels_that_differ_are_not_noted_even_if_those_of_a_file_or_row_group_are_one(folder):
    with_labels(folder, lambda row: int(row > 50))
    assert lines(folder) == []


def test_without_statistics_or_with_a_transform_of_the_label_nothing_is_noted(folder):
    with_labels(folder, lambda row: 1, write_statistics=False)
    assert lines(folder) == []
    with_labels(folder, lambda row: 1)
    assert lines(folder, {"do": "binarize", "columns": ["row"], "at_least": 5, "into": ["label"]}) == []


def test_losses_that_learn_from_positives_alone_are_not_noted(folder):
    with_labels(folder, lambda row: 1)
    assert lines(folder, loss="in_batch_softmax") == lines(folder, loss="from_model") == []


def test_train_warns_of_it_at_its_start(folder, tmp_path, monkeypatch):
    with_labels(folder, lambda row: 1)
    warnings = []
    monkeypatch.setattr(RunConsole, "warn", lambda self, text: warnings.append(text))
    monkeypatch.setattr(run, "record_driver", lambda folder: nullcontext(0.0))
    monkeypatch.setattr(run, "_drive", lambda *args: None)
    run.train(parquet.settings(folder, tmp_path / "run"))
    assert any("is 1 in every row of data.train" in text for text in warnings)
