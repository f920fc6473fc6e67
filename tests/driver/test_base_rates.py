"""Test the initial bias of a model: the log-odds of the rows that each task uses."""

from math import log

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import DataError
from raytrec.config.run_config import load_config
from raytrec.driver.datasets import open_data
from raytrec.tasks.task_columns import explain_ignored_log_odds

LABELS = [1.0, 0, 0, 0, 1, None, 0, 0.5]
COLUMNS = {
    "y": [1, 0, 0, 0, 1, 0, 0, 1],
    "z": LABELS,
    "shown": [1, 1, 1, 0, 0, 1, 1, 1],
    "weight": [2.0, 1, 1, 1, 1, 1, 1, 1],
    "price": [1.0, 2, 3, 4, 5, 6, 7, 8],
    "item": [0, 1, 2, 3, 0, 1, 2, 3],
}
OTHER_TASKS = [{"label": "z", "name": "other", "nulls": "skip"}, {"label": "price", "name": "p", "loss": "mse"}]
SCHEMA = """
labels: [y, z, price]
sparse: {item: {table: item}}
tables: {item: {rows: 4, dim: 4}}
"""


def settings(folder, tasks, **train):
    (folder / "train").mkdir(exist_ok=True)
    pq.write_table(pa.table(COLUMNS), folder / "train" / "a.parquet", row_group_size=3)
    (folder / "schema.yaml").write_text(SCHEMA)
    train = {"initial_bias": "log_odds"} | train
    return load_config({"data": {"train": f"{folder}/train"}, "tasks": tasks, "train": train})


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"label": "y"}, log(3 / 5)),
        ({"label": "y", "sample_weight": "weight"}, log(4 / 5)),
        ({"label": "y", "mask": "shown"}, log(2 / 4)),
        ({"label": "y", "positive_weight": 2.0}, log(6 / 5)),
        ({"label": "z", "nulls": "skip"}, log(2.5 / 4.5)),
        ({"label": "y", "loss": "focal"}, log(3 / 5)),
        ({"label": "price", "loss": "mse"}, 0.0),
    ],
)
def test_initial_bias_is_the_log_odds_of_used_rows(tmp_path, task, expected):
    _, datasets = open_data(settings(tmp_path, [task, *OTHER_TASKS]))
    assert datasets["train"].log_odds == pytest.approx((expected, log(2.5 / 4.5), 0.0))


def test_a_constant_label_has_no_log_odds(tmp_path):
    config = settings(tmp_path, [{"label": "y"}, *OTHER_TASKS])
    pq.write_table(pa.table(COLUMNS | {"y": [1] * 8}), tmp_path / "train" / "a.parquet")
    assert open_data(config)[1]["train"].log_odds[0] == 0.0
    drawn = load_config(config, ["train.initial_bias=drawn"])
    assert open_data(drawn)[1]["train"].log_odds == ()


def test_log_odds_exclude_held_out_rows(tmp_path):
    config = load_config(settings(tmp_path, [{"label": "y"}]), ["data.holdout=0.1", "train.eval_every_steps=5"])
    columns = {name: np.resize(values, 100) for name, values in COLUMNS.items()}
    rows = np.arange(100)
    pq.write_table(pa.table(columns | {"z": rows % 2, "y": rows % 2}), tmp_path / "train" / "a.parquet")
    _, datasets = open_data(config)
    held = datasets["valid"].groups[0].split.rows()
    positive = 50 - sum(held % 2)
    assert len(held) == 10 and datasets["train"].log_odds == pytest.approx((log(positive / (90 - positive)),))
    _, datasets = open_data(load_config(config, [f"data.valid={tmp_path}/train"]))
    assert datasets["train"].rows == datasets["valid"].rows == 100
    pq.write_table(pa.table(columns | {"z": rows % 2, "y": rows % 2}), tmp_path / "train/a.parquet", row_group_size=9)
    with pytest.raises(DataError, match="cannot hold out a row of every 10, because all row groups are smaller"):
        open_data(config)


def test_log_odds_include_labels_of_partition_folders(tmp_path):
    for label in 0, 1:
        rows = {name: values for name, values in COLUMNS.items() if name not in ("y", "z", "price")}
        (tmp_path / f"folders/y={label}").mkdir(parents=True)
        pq.write_table(pa.table(rows).slice(0, 2 + label), tmp_path / f"folders/y={label}/a.parquet")
    (tmp_path / "schema.yaml").write_text(SCHEMA.replace("[y, z, price]", "[y]"))
    config = load_config({"data": {"train": f"{tmp_path}/folders"}, "train": {"initial_bias": "log_odds"}})
    assert open_data(config)[1]["train"].log_odds == pytest.approx((log(3 / 2),))


@pytest.mark.parametrize(
    "evaluation", [{"slices": ["shown"]}, {"retrieval": {"items": "items", "item": "item", "seen": ["old"]}}]
)
def test_held_out_rows_include_evaluation_columns(tmp_path, evaluation, monkeypatch):
    monkeypatch.setattr("raytrec.driver.datasets.open_items", lambda *_: {})
    values = settings(tmp_path, [{"label": "y"}]).model_dump(by_alias=True) | {"eval": evaluation}
    values["data"] |= {"holdout": 0.2, "test": f"{tmp_path}/train", "reserve_columns": ["shown", "item"]}
    pq.write_table(pa.table(COLUMNS | {"z": [0.5] * 8, "old": [[0]] * 8}), tmp_path / "train" / "a.parquet")
    _, datasets = open_data(load_config(values))
    plans = {name: datasets[name].form.plan for name in ("train", "valid")}
    assert datasets["train"].rows + datasets["valid"].rows == 8
    assert plans["train"].reserved != plans["valid"].reserved, "the test requires different plans"


@pytest.mark.parametrize(
    ("schema", "task", "mistake"),
    [
        ("candidates: [item, y]\n", {"label": "y", "loss": "bce"}, "the rows are requests with candidates"),
        ("", {"label": "price", "loss": "mse"}, "the logits of the loss mse are not log-odds"),
        (
            "",
            {"label": "y", "loss": "in_batch_softmax"},
            "the model returns vectors of queries and items instead of logits",
        ),
    ],
)
def test_log_odds_without_effect_are_named(tmp_path, schema, task, mistake):
    config = settings(tmp_path, [task])
    lists = {"y": [[1, 0]], "item": [[0, 1]], "z": [1.0], "price": [1.0]} if schema else COLUMNS | {"z": [0.5] * 8}
    pq.write_table(pa.table(lists), tmp_path / "train" / "a.parquet")
    (tmp_path / "schema.yaml").write_text(SCHEMA + schema)
    parsed, datasets = open_data(config)
    assert datasets["train"].log_odds == ()
    assert explain_ignored_log_odds(config, parsed) == mistake
