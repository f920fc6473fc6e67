"""Tasks of a configuration, resolved with a schema: names, labels, losses and errors."""

import subprocess
import sys
from pathlib import Path

import pytest
from small import SCHEMA

from raytrec.common.errors import ConfigError
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.config.trust import find_foreign_code
from raytrec.driver.preflight import check_fit
from raytrec.tasks.losses.pointwise import BinaryCrossEntropy
from raytrec.tasks.task import count_logits, key_columns, needs_vectors, resolve_tasks
from raytrec.tasks.task_columns import label_ranges, task_rows, whole_labels

TWO_LABELS = SCHEMA.model_copy(update={"labels": ["clicked", "watched s"]})


@pytest.fixture(autouse=True)
def run_in_tests_folder(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)


def load_task_config(tasks=None, **sections):
    values = {"data": {"train": "d/train"}, **({"tasks": tasks} if tasks is not None else {})}
    return load_config(values | sections)


def resolve_task_config(tasks=None, schema=SCHEMA):
    return resolve_tasks(load_task_config(tasks).tasks, schema)


def test_default_task_uses_binary_cross_entropy():
    (task,) = resolve_task_config()
    assert (task.name, task.label, task.column, task.weight) == ("y", "y", 0, 1.0)
    assert type(task.loss) is BinaryCrossEntropy and task.metrics == ("auc", "ne", "logloss", "calibration")


def test_first_label_is_the_default():
    (task,) = resolve_task_config([{}], TWO_LABELS)
    assert (task.name, task.label, task.column) == ("clicked", "clicked", 0)


def test_tasks_keep_their_order_and_settings():
    tasks = resolve_task_config(
        [
            {"label": "watched s", "loss": "mse", "weight": 0.1},
            {"label": "clicked", "loss": "own_parts:Focal", "options": {"gamma": 3}, "metrics": ["ne"]},
            {"name": "often", "label": "watched s", "loss": "own_parts:Count"},
        ],
        TWO_LABELS,
    )
    assert [task.name for task in tasks] == ["watched_s", "clicked", "often"]
    assert [task.column for task in tasks] == [1, 0, 1] and tasks[0].weight == 0.1
    assert [task.metrics for task in tasks] == [("mse", "mae"), ("ne",), ("mae",)]
    assert tasks[1].loss.gamma == 3


@pytest.mark.parametrize(
    "tasks,expected",
    [
        ([{"label": "clicked"}], {"clicked": (0, 1), "watched s": None}),
        ([{"label": "clicked", "loss": "mse"}], {"clicked": None, "watched s": None}),
        (
            [{"label": "clicked", "loss": "own_parts:Count"}, {"name": "b", "label": "clicked"}],
            {"clicked": (0, 1), "watched s": None},
        ),
        (
            [{"label": "clicked", "loss": "mse"}, {"name": "b", "label": "clicked", "loss": "own_parts:Count"}],
            {"clicked": (0, float("inf")), "watched s": None},
        ),
    ],
)
def test_label_ranges_satisfy_all_tasks(tasks, expected):
    assert label_ranges(resolve_task_config(tasks, TWO_LABELS), TWO_LABELS) == expected


THREE_CLASSES = {"loss": "cross_entropy", "options": {"classes": 3}}
MASK_CYCLE = [{"name": "a", "label": "clicked", "mask": "b"}, {"name": "b", "label": "watched s", "mask": "a"}]
MASKED_BY_OWN_MASK = [MASK_CYCLE[0], {"name": "b", "label": "watched s", "mask": "b"}]


@pytest.mark.parametrize(
    "tasks,schema,messages",
    [
        ([{}, {"loss": "mse"}], TWO_LABELS, ["2 tasks have the name clicked", "tasks[0], tasks[1]"]),
        ([{"label": "cliked"}], TWO_LABELS, ["no label 'cliked'; did you mean 'clicked'?"]),
        ([{"loss": "msee"}], SCHEMA, ["there is no loss 'msee'; did you mean 'mse'?", "tasks[0].loss"]),
        ([{"loss": "own_parts:Focall"}], SCHEMA, ["no attribute 'Focall'; did you mean 'Focal'?"]),
        ([{"loss": "no_such_parts:Focal"}], SCHEMA, ["no module named 'no_such_parts'"]),
        ([{"loss": "own_parts:NoLoss"}], SCHEMA, ["not a concrete subclass of raytrec.tasks.losses.Loss"]),
        ([{"loss": "own_parts:Unfinished"}], SCHEMA, ["a subclass of Loss that defines of_rows, or of BatchLoss"]),
        ([{"loss": "own_parts:Focal", "options": {"gama": 2}}], SCHEMA, ["keyword argument 'gama'"]),
        ([{"loss": "bce", "options": {"gamma": 2}}], SCHEMA, ["tasks[0].options"]),
        ([{"mask": "y"}], SCHEMA, ["task y is its own mask", "tasks[0].mask"]),
        (MASK_CYCLE, TWO_LABELS, ["masks of tasks form a cycle: a → b → a", "tasks[0].mask"]),
        (MASKED_BY_OWN_MASK, TWO_LABELS, ["task b is its own mask", "tasks[1].mask"]),
        ([{"loss": "mse", "positive_weight": 2}], SCHEMA, ["positive_weight is 2, but the loss mse has no positives"]),
        ([{**THREE_CLASSES, "positive_weight": 2}], SCHEMA, ["tasks[0].positive_weight"]),
        ([{"loss": "poisson", "negatives_kept": 0.5}], SCHEMA, ["negatives_kept is 0.5, but the logits of loss pois"]),
        ([{"loss": "bpr", "negatives_kept": 0.5}], SCHEMA, ["tasks[0].negatives_kept"]),
        ([{"loss": "huber", "options": {"delta": 0}}], SCHEMA, ["delta is 0, not a number between 0 and"]),
        ([{"loss": "focal", "options": {"gamma": "2"}}], SCHEMA, ["gamma is '2', not a number from 0"]),
        ([{"loss": "focal", "options": {"alpha": 1.0}}], SCHEMA, ["alpha is 1.0"]),
        ([{"loss": "cross_entropy", "options": {"classes": 1}}], SCHEMA, ["classes is 1, not a whole"]),
        ([{"loss": "in_batch_softmax", "options": {"temperature": -1}}], SCHEMA, ["temperature is -1"]),
        (
            [{"loss": "listwise_softmax", "options": {"learn_temperature": "no"}}],
            SCHEMA,
            ["learn_temperature is 'no', not true or false"],
        ),
        (
            [{"loss": "listwise_softmax", "options": {"temp": 2}}],
            SCHEMA,
            ["options of the loss: temperature, learn_temperature"],
        ),
        ([{"loss": "own_parts:WithinGroups"}], SCHEMA, ["requires group, which is not set", "tasks[0].group"]),
        ([{"item_frequency": "often"}], SCHEMA, ["item_frequency is often, but the loss bce does not use"]),
        ([{"loss": "bpr", "item_frequency": "often"}], SCHEMA, ["tasks[0].item_frequency"]),
    ],
)
def test_invalid_tasks_are_rejected(tasks, schema, messages):
    with pytest.raises(ConfigError) as error:
        resolve_task_config(tasks, schema)
    assert all(message in str(error.value) for message in messages), str(error.value)


@pytest.mark.parametrize(
    "tasks,message",
    [
        ([], "tasks: List should have at least 1 item"),
        ([{"lable": "y"}], "tasks.0.lable: unknown key; did you mean tasks.label?"),
        ([{"weight": 0}], "tasks.0.weight"),
        ([{"name": "a b"}], "tasks.0.name"),
        ("bce", "tasks: "),
        ([{"negatives_kept": 0}], "tasks.0.negatives_kept"),
        ([{"negatives_kept": 1.5}], "tasks.0.negatives_kept"),
        ([{"positive_weight": 0}], "tasks.0.positive_weight"),
        ([{"nulls": "drop"}], "tasks.0.nulls"),
        ([{"msk": "y"}], "tasks.0.msk: unknown key; did you mean tasks.mask?"),
    ],
)
def test_invalid_task_settings_are_rejected(tasks, message):
    with pytest.raises(ConfigError) as error:
        load_task_config(tasks)
    assert message in str(error.value), str(error.value)


def test_task_rows_follow_the_task_settings():
    tasks = resolve_task_config(
        [
            {"label": "clicked", "sample_weight": "w"},
            {"name": "time", "label": "watched s", "loss": "mse", "mask": "clicked"},
            {"name": "again", "label": "clicked", "mask": "shown", "nulls": "error"},
        ],
        TWO_LABELS,
    )
    assert [(each.mask, each.mask_label, each.nulls, each.sample_weight) for each in task_rows(tasks)] == [
        (None, None, "skip", "w"),
        (None, "clicked", "skip", None),
        ("shown", None, "error", None),
    ]
    assert [each.nulls for each in task_rows(resolve_task_config([{"mask": "shown"}], TWO_LABELS))] == ["error"]


def test_tasks_define_logit_and_key_columns():
    tasks = resolve_task_config(
        [
            {"label": "clicked", "group": "user", "item": "film"},
            {"name": "kind", "label": "watched s", "loss": "cross_entropy", "options": {"classes": 3}},
            {"name": "near", "label": "clicked", "loss": "in_batch_softmax", "item": "film"},
        ],
        TWO_LABELS,
    )
    assert count_logits(tasks) == {"clicked": 1, "kind": 3}
    assert needs_vectors(tasks) and not needs_vectors(tasks[:2])
    assert key_columns(tasks) == ("user", "film")
    assert key_columns(tasks, ["country", "user"]) == ("user", "film", "country")
    assert whole_labels(tasks) == {"watched s"}
    assert label_ranges(tasks, TWO_LABELS)["watched s"] == (0, 2)


def test_vector_losses_require_a_model_with_vectors():
    tasks = [{"label": "clicked"}, {"label": "watched s", "loss": "in_batch_softmax"}]
    check_fit(load_task_config(tasks, model={"name": "own_parts:Linear"}), TWO_LABELS, on_this_machine=False)
    with pytest.raises(ConfigError, match=r"query and item vectors, but model\.name=dlrm returns none") as error:
        check_fit(load_task_config(tasks), TWO_LABELS, on_this_machine=False)
    assert error.value.where == "tasks, model.name"


def test_remote_losses_and_metrics_are_foreign_code():
    tasks = [{"loss": "bce", "metrics": ["auc", "mine:A"]}, {"loss": "mine:L"}, {"metrics": 3}, "x"]
    assert find_foreign_code({"tasks": tasks}) == {"tasks[0].metrics[1]": "mine:A", "tasks[1].loss": "mine:L"}
    assert find_foreign_code({"tasks": "mine:L"}) == {}
    with pytest.raises(ConfigError, match=r"tasks\[0\].loss: mine:L"):
        load_config({"data": {"train": "d"}, "tasks": [{"loss": "mine:L"}]}, elsewhere="s3://there")
    load_config({"data": {"train": "d"}, "tasks": [{"loss": "mine:L"}]}, elsewhere="s3://t", allow_code=True)


@pytest.mark.slow
def test_loss_registry_does_not_import_torch():
    code = "import sys; from raytrec.tasks.losses import loss; [part() for part in loss.parts.values()]\n"
    code += "from raytrec.tasks import task; from raytrec.config.run_config import RunConfig\n"
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_task_name_replaces_invalid_label_characters():
    schema = Schema.parse(SCHEMA.model_dump() | {"labels": ["user.liked?"]}, "test")
    assert [task.name for task in resolve_task_config(None, schema)] == ["user_liked_"]
