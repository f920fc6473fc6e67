"""The configuration's tasks, held to a schema: names, labels, losses; and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from small import SCHEMA

from raytrec.common.errors import ConfigError
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.config.trust import code_in
from raytrec.driver.preflight import check_fit
from raytrec.tasks.losses import loss
from raytrec.tasks.losses.bce import BinaryCrossEntropy
from raytrec.tasks.task import label_ranges, resolve_tasks

TWO = SCHEMA.model_copy(update={"labels": ["clicked", "watched s"]})


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)


def configured(tasks=None, **sections):
    values = {"data": {"train": "d/train"}, **({"tasks": tasks} if tasks is not None else {})}
    return load_config(values | sections)


def resolved(tasks=None, schema=SCHEMA):
    return resolve_tasks(configured(tasks).tasks, schema)


def test_without_tasks_the_label_is_learned_by_cross_entropy():
    (task,) = resolved()
    assert (task.name, task.label, task.column, task.weight) == ("y", "y", 0, 1.0)
    assert type(task.loss) is BinaryCrossEntropy and task.metrics == ("auc", "ne", "logloss", "calibration")


def test_the_first_label_is_the_default():
    (task,) = resolved([{}], TWO)
    assert (task.name, task.label, task.column) == ("clicked", "clicked", 0)


def test_tasks_keep_their_order_and_take_what_is_set():
    tasks = resolved(
        [
            {"label": "watched s", "loss": "mse", "weight": 0.1},
            {"label": "clicked", "loss": "own_parts:Focal", "options": {"gamma": 3}, "metrics": ["ne"]},
            {"name": "often", "label": "watched s", "loss": "own_parts:Count"},
        ],
        TWO,
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
            [
                {"label": "clicked", "loss": "mse"},
                {"name": "b", "label": "clicked", "loss": "own_parts:Count"},
            ],
            {"clicked": (0, float("inf")), "watched s": None},
        ),
    ],
)
def test_a_label_must_suit_all_of_its_tasks(tasks, expected):
    assert label_ranges(resolved(tasks, TWO), TWO) == expected


@pytest.mark.parametrize(
    "tasks,schema,says",
    [
        ([{}, {"loss": "mse"}], TWO, "two tasks are called clicked"),
        ([{"label": "cliked"}], TWO, "no label 'cliked'; did you mean 'clicked'?"),
        ([{"loss": "msee"}], SCHEMA, "there is no loss 'msee'; did you mean 'mse'?"),
        ([{"loss": "msee"}], SCHEMA, "tasks[0].loss"),
        ([{}, {"loss": "mse"}], SCHEMA, "two tasks are called y"),
        ([{"loss": "own_parts:Focall"}], SCHEMA, "the module has no Focall; did you mean Focal?"),
        ([{"loss": "no_such_parts:Focal"}], SCHEMA, "there is no module no_such_parts"),
        ([{"loss": "own_parts:NoLoss"}], SCHEMA, "it is no raytrec.tasks.losses.Loss"),
        ([{"loss": "own_parts:Unfinished"}], SCHEMA, "it is no raytrec.tasks.losses.Loss with of_rows"),
        ([{"loss": "own_parts:Focal", "options": {"gama": 2}}], SCHEMA, "unexpected keyword argument 'gama'"),
        ([{"loss": "bce", "options": {"gamma": 2}}], SCHEMA, "tasks[0].options"),
    ],
)
def test_refused(tasks, schema, says):
    with pytest.raises(ConfigError) as error:
        resolved(tasks, schema)
    assert says in str(error.value), str(error.value)


@pytest.mark.parametrize(
    "tasks,says",
    [
        ([], "tasks: List should have at least 1 item"),
        ([{"lable": "y"}], "tasks.0.lable: unknown key; did you mean tasks.label?"),
        ([{"weight": 0}], "tasks.0.weight"),
        ([{"name": "a b"}], "tasks.0.name"),
        ("bce", "tasks: "),
    ],
)
def test_refused_as_a_configuration(tasks, says):
    with pytest.raises(ConfigError) as error:
        configured(tasks)
    assert says in str(error.value), str(error.value)


def test_an_override_replaces_all_tasks():
    config = load_config({"data": {"train": "d/train"}}, ["tasks=[{loss: mse}]"])
    assert [task.loss for task in config.tasks] == ["mse"]
    assert load_config(config).tasks == config.tasks


@pytest.mark.parametrize("model", ["dlrm", "dcn"])
def test_models_with_one_logit_take_one_task(model):
    tasks = [{"label": "clicked"}, {"label": "watched s", "loss": "mse"}]
    with pytest.raises(ConfigError) as error:
        check_fit(configured(tasks, model={"name": model}), TWO, here=False)
    assert f"there are 2 tasks, and model.name={model} gives one logit a row" in str(error.value)
    assert "where:    tasks, model.name" in str(error.value)
    check_fit(configured(tasks[:1], model={"name": model}), TWO, here=False)
    check_fit(configured(tasks, model={"name": "own_parts:Linear"}), TWO, here=False)


def test_losses_and_metrics_elsewhere_are_code():
    tasks = [{"loss": "bce", "metrics": ["auc", "mine:A"]}, {"loss": "mine:L"}, {"metrics": 3}, "x"]
    assert code_in({"tasks": tasks}) == {"tasks[0].metrics[1]": "mine:A", "tasks[1].loss": "mine:L"}
    assert code_in({"tasks": "mine:L"}) == {}
    with pytest.raises(ConfigError, match=r"tasks\[0\].loss: mine:L"):
        load_config({"data": {"train": "d"}, "tasks": [{"loss": "mine:L"}]}, elsewhere="s3://there")
    load_config({"data": {"train": "d"}, "tasks": [{"loss": "mine:L"}]}, elsewhere="s3://t", allow_code=True)


def test_losses_of_this_package_are_found_by_their_files():
    from raytrec.tasks import losses

    files = {file.stem for file in Path(losses.__file__).parent.glob("*.py")} - {"__init__"}
    assert set(loss.parts) == files


def test_the_driver_asks_losses_without_torch():
    code = "import sys; from raytrec.tasks.losses import loss; [part() for part in loss.parts.values()]\n"
    code += "from raytrec.tasks import task; from raytrec.config.run_config import RunConfig\n"
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_of_a_label_that_is_none_elsewhere():
    schema = Schema.parse(SCHEMA.model_dump() | {"labels": ["user.liked?"]}, "test")
    assert [task.name for task in resolved(None, schema)] == ["user_liked_"]
