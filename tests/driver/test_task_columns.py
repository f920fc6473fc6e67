"""Test columns of tasks and evaluations: checks before workers start, columns read, and resume."""

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import ConfigError, DataError
from raytrec.config.run_config import load_config
from raytrec.driver.datasets import open_data
from raytrec.driver.preflight import check_fit
from raytrec.driver.resume import resume_config

BUY = {"name": "buy", "label": "label", "nulls": "skip", "loss": "mse"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Dataset with additional columns, some of which contain invalid values."""
    folder = parquet.write_dataset(tmp_path_factory.mktemp("columns") / "d", train=60, valid=20, test=20)
    for path in folder.rglob("*.parquet"):
        table, rows = pq.read_table(path), pq.read_metadata(path).num_rows
        columns = {
            "clicked": pa.array([i % 2 for i in range(rows)], pa.int8()),
            "odd": pa.array([i % 3 for i in range(rows)]),
            "never": pa.array([0] * rows),
            "weight": pa.array([0.5 * (i % 4) for i in range(rows)]),
            "below": pa.array([-1.0 if i == 7 else 1.0 for i in range(rows)]),
            "nothing": pa.nulls(rows, pa.float32()),
            "country": pa.array(["ch", "de", None, "ch", "fr"] * rows)[:rows],
            "share": pa.array([0.5] * rows),
        }
        for name, values in columns.items():
            table = table.append_column(name, values)
        pq.write_table(table, path, row_group_size=20)
    return folder


def open_datasets(folder, *tasks, reserve_columns=(), **eval_section):
    values = parquet.config_values(folder, "unused", data__reserve_columns=list(reserve_columns))
    values |= {"tasks": [{"label": "label", **task} for task in tasks or [{}]], "eval": eval_section}
    config = load_config(values)
    schema, datasets = open_data(config)
    check_fit(config, schema, on_this_machine=False)
    return datasets


@pytest.mark.parametrize(
    "how,error,message,where",
    [
        ({"reserve_columns": ["countri"]}, DataError, "column 'countri' is missing", "part-0.parquet"),
        ({"reserve_columns": ["tags"]}, DataError, "reserved column 'tags' has type list", "column tags"),
        (
            {"group": "share", "reserve_columns": ["share"]},
            DataError,
            "column 'share' of groups or items has type double",
            "column share",
        ),
        (
            {"loss": "in_batch_softmax", "item_frequency": "country", "reserve_columns": ["country"]},
            DataError,
            "column 'country', which tasks.item_frequency names, has type string",
            "column country",
        ),
        (
            {"loss": "in_batch_softmax", "item_frequency": "odd"},
            ConfigError,
            "column 'odd' is not in data.reserve_columns",
            "tasks[0].item_frequency",
        ),
        ({"group": "user"}, ConfigError, "column 'user' is not in data.reserve_columns", "tasks[0].group"),
        ({"item": "usr", "reserve_columns": ["user"]}, ConfigError, "did you mean 'user'?", "tasks[0].item"),
        ({"slices": ["country"]}, ConfigError, "column 'country' is not in data.reserve_columns", "eval.slices"),
        ({"mask": "clickd"}, DataError, "column 'clickd' is missing", "part-0.parquet"),
        ({"mask": "odd"}, DataError, "mask 'odd' is 2", "part-0.parquet, row group 0, column odd, row 2"),
        ({"mask": "never"}, DataError, "for task label: its mask 'never' is not 1 in any row", "d/train"),
        ({"mask": "country"}, DataError, "mask 'country' has type string", "column country"),
        ({"sample_weight": "below"}, DataError, "sample weight 'below' is -1", "column below, row 7"),
        ({"sample_weight": "nothing"}, DataError, "column 'nothing' contains a null", "column nothing, row 0"),
        ({"sample_weight": "never"}, DataError, "weight 'never' is 0 in every row", "d/train"),
    ],
)
def test_invalid_task_columns_are_rejected(folder, how, error, message, where):
    reserve_columns, slices = how.pop("reserve_columns", ()), how.pop("slices", [])
    with pytest.raises(error) as found:
        open_datasets(folder, how, reserve_columns=reserve_columns, slices=slices)
    assert message in found.value.what and where in found.value.where
    assert found.value.expected and found.value.do


def test_evaluation_without_usable_rows_is_rejected(tmp_path):
    folder = parquet.write_dataset(tmp_path / "d", train=60, valid=20, test=20)
    for path in folder.rglob("*.parquet"):
        table, train = pq.read_table(path), "train" in path.parts
        pq.write_table(table.append_column("seen", pa.array([int(train)] * len(table))), path)
    masked, weighted = {"name": "masked", "mask": "seen"}, {"name": "weighed", "sample_weight": "seen"}
    for tasks in ([masked], [weighted], [masked, weighted]):
        with pytest.raises(DataError, match=r"no row can be used.*(is not 1 in any row|is 0 in every row)") as found:
            open_datasets(folder, *tasks)
        assert "d/valid" in found.value.where and found.value.expected and found.value.do
    assert set(open_datasets(folder, {}, masked)) == {"train", "valid", "test"}, "the other task has usable rows"


def test_evaluations_read_slices_and_training_does_not(folder):
    """Evaluations also read the keys and texts of slices; training reads only the columns of its tasks."""
    click = {"sample_weight": "weight", "group": "user"}
    buy = {**BUY, "mask": "clicked", "item": "odd"}
    found = open_datasets(folder, click, buy, reserve_columns=["user", "odd", "country", "share"], slices=["country"])
    train, valid = found["train"].form, found["valid"].form
    reserved, evaluated = train.plan.reserved, valid.plan.reserved
    assert reserved.keys == ("user", "odd") and reserved.columns == ()
    assert evaluated.keys == ("user", "odd", "country") and evaluated.columns == ("country",)
    assert set(train.columns) - {"label", "price", "user", "tags"} == {"weight", "clicked", "odd"}
    assert set(valid.columns) - set(train.columns) == {"country"}


def test_unused_columns_are_not_read(folder):
    form = open_datasets(folder)["train"].form
    assert form.columns == ["label", "price", "user", "tags"] and not form.plan.has_task_weights
    assert open_datasets(folder, reserve_columns=["country", "row"])["test"].form.columns == form.columns


@pytest.mark.parametrize(
    "change",
    [
        "data.reserve_columns=[user]",
        "tasks=[{label: label, mask: clicked}]",
        "tasks=[{label: label, nulls: skip}]",
        "tasks=[{label: label, sample_weight: weight}]",
        "tasks=[{label: label, group: user}]",
        "plan.qcomms.forward_precision=fp16",
        "plan.tables.us*.dtype=fp16",
    ],
)
def test_resume_rejects_changed_columns_and_precision(folder, tmp_path, change):
    config = load_config(parquet.config_values(folder, tmp_path))
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    resume_config(tmp_path, None, ["plan.sharding_types=[row_wise]", "plan.tables.us*.sharding_type=row_wise"])
    with pytest.raises(ConfigError, match="these settings affect the result") as error:
        resume_config(tmp_path, None, [change])
    assert change.partition("=")[0] in error.value.what


def test_resume_rejects_another_run_folder(folder, tmp_path):
    config = load_config(parquet.config_values(folder, tmp_path / "first"))
    run = tmp_path / "moved"
    run.mkdir()
    (run / "config.yaml").write_text(config.to_yaml())
    for accepted in (config.run.dir, str(run)):
        assert resume_config(run, None, [f"run.dir={accepted}"]).run.dir == str(run)
    with pytest.raises(ConfigError, match=r"run\.dir cannot be changed on resume") as error:
        resume_config(run, None, [f"run.dir={tmp_path / 'other'}"])
    assert error.value.expected == str(run)
    other = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path / "other")})})
    assert resume_config(run, other, []).run.dir == str(run), "the folder of another run's configuration is not used"
