"""Test checks of configuration, schema and Parquet footers before Ray starts, and the literal display of names."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console
from small import make_small_schema

from raytrec.common.errors import ConfigError, DataError
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.data.files.file_identity import FileIdentity, fingerprint
from raytrec.driver import preflight as fit
from raytrec.driver.console import Result, RunConsole, print_summary
from raytrec.driver.prepare import open_run
from raytrec.driver.resume import check_same_data, check_warm_start, record_data
from raytrec.planning.dry_run import ClusterEstimate
from raytrec.planning.machines import Cluster
from raytrec.planning.memory import PlannedTable
from raytrec.planning.plan_report import print_plans

SCHEMA = yaml.safe_load(parquet.SCHEMA_YAML)
TWO_TOWER = {"name": "two_tower", "towers": {"query": ["user"], "item": ["tags"]}}


def check(values=(), schema=(), here=True, settings=()):
    """Run check_fit on these values and schema sections, with device cpu."""
    least = {"data": {"train": "d/train"}, "scaling": {"device": "cpu"}}
    config = load_config(least | dict(values), settings)
    fit.check_fit(config, Schema.parse(SCHEMA | dict(schema), "test"), on_this_machine=here)


@pytest.mark.parametrize(
    "schema,model,message",
    [
        ({"tables": {"user": {"rows": 4, "dim": 8}, "tag": {"rows": 4, "dim": 4}}}, {}, "dims 4, 8"),
        ({}, {"name": "sequence"}, "the schema has no sequence"),
        ({}, TWO_TOWER, "neither tower contains price"),
        ({"dense": []}, {"name": "dcn", "bottom_mlp": [4]}, "no dense columns"),
        ({"tables": SCHEMA["tables"] | {"user": {"rows": 10**12, "dim": 8}}}, {}, "the tables need"),
    ],
)
def test_check_fit_rejects_mismatched_model_and_schema(schema, model, message):
    with pytest.raises(ConfigError) as error:
        check({"model": model}, schema)
    assert message in str(error.value)


def test_check_fit_rejects_unsupported_cuda_graphs():
    graphs = ["scaling.device=auto", "train.compile=graphs"]
    check({}, settings=graphs, here=False)
    with pytest.raises(ConfigError, match="graphs, but scaling"):
        check({}, settings=graphs[1:], here=False)
    tags = {"sparse": SCHEMA["sparse"] | {"tags": {"table": "tag", "pooling": "sequence"}}}
    model = {"name": "bst", "max_length": 4, "target": "user", "top_mlp": [4]}
    with pytest.raises(ConfigError, match=r"the model reads \['tags'\] id by id"):
        check({"model": model}, tags, here=False, settings=graphs)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ({"metrics": ["auc", "nee"]}, [], "there is no metric 'nee'; did you mean 'ne'?"),
        ({"metrics": ["mine:Hits"]}, [], "the module has no attribute 'Hits'"),
        ({}, ["checkpoint.best_metric=mse"], "checkpoint.best_metric is mse, but the tasks have no metric"),
        ({"metrics": []}, ["checkpoint.keep_best=1"], "no metric whose values can be ranked"),
        ({}, ["train.early_stopping={metric: gini}"], "train.early_stopping.metric is gini"),
        (
            {},
            ["train.early_stopping={metric: auc, restore_best: true}", "checkpoint.keep_best=1"],
            "only the checkpoints with the best ne are kept",
        ),
    ],
)
def test_check_fit_rejects_unknown_metrics(task, settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    values = {"data": {"train": "d/train", "valid": "d"}, "tasks": [{"label": "label", **task}]}
    with pytest.raises(ConfigError) as error:
        check(values | {"train": {"eval_every_steps": 5}}, settings=settings)
    assert message in str(error.value)


def test_check_fit_accepts_valid_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise RuntimeError('the driver runs it')\nclass Model: ...\n")
    for model in (
        {},
        {"name": "dcn"},
        {"name": "mine:Model"},
        TWO_TOWER | {"towers": {"query": ["user", "price"], "item": ["tags"]}},
    ):
        check({"model": model})


def test_tables_in_files_must_fit_the_disk(tmp_path, monkeypatch):
    def fits(rows, **plan):
        plan = {"tables": {"user": {"compute_kernel": "fused_mmap"}}} | plan
        check({"plan": plan}, {"tables": SCHEMA["tables"] | {"user": {"rows": rows, "dim": 8}}})

    monkeypatch.setattr("raytrec.compat.ray_core.measure_system_memory", lambda: 1 << 20)
    with pytest.raises(ConfigError, match="compute_kernel=fused_mmap"):
        fits(100_000, tables={})
    for plan in ({}, {"tables": {}, "compute_kernels": ["fused", "fused_mmap"]}):
        fits(100_000, mmap_dir=str(tmp_path), **plan)  # 3.4 MiB, of which memory has 1
        with pytest.raises(ConfigError, match=r"table user needs [\d,.]+ TiB of disk.*but only .* are free"):
            fits(10**12, mmap_dir=str(tmp_path), **plan)


def test_check_fit_rejects_unsupported_mlflow_address():
    with pytest.raises(ConfigError, match="MLflow does not support this address") as error:
        check({"tracking": {"uri": "foo://here"}}, here=False)
    assert error.value.where == "foo://here"
    check({"tracking": {"uri": "foo://here", "enabled": False}}, here=False)


@pytest.mark.parametrize("name", ["[/x]", "[bold]x", ":smile:", "a[red", "\x1b[31mx"])
def test_console_shows_markup_in_names_literally(name):
    """Rich interprets markup on a terminal; names of tables, columns, folders and runs may contain it."""
    config = RunConfig.model_validate({"data": {"train": "d/train"}})
    schema = make_small_schema(sparse={"a": {"table": name}}, tables={name: {"rows": 1, "dim": 4}})
    table = PlannedTable(name, 1, 4, "row_wise", "fused", [0], [(0, 1, 4)], "fp32")
    planned = fit.Plans(config=config, schema=schema, on=[ClusterEstimate(Cluster(1, 1, 80, 160, 100), [table])])
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Console, "is_terminal", True)
        with RunConsole(name) as live:
            for show in (live.phase, live.note, live.warn):
                show(name)
            live.eval(1, auc=0.5)
        print_summary(Result({"name": name}, Path(), [name]))
        print_plans(planned)
    shown = name.replace("\x1b", "�")
    assert out.getvalue().count(shown) >= 6 and "\x1b[31m" not in out.getvalue()


def test_sampled_ids_must_exist_in_their_table():
    schema = {"sparse": SCHEMA["sparse"] | {"others": {"table": "tag", "column": "drawn"}}}

    def draw(rows):
        transform = {"do": "sample", "column": "drawn", "count": 3, "rows": rows}
        check({"data": {"train": "d/train", "transforms": [transform]}}, schema, here=False)

    with pytest.raises(ConfigError, match="up to 12 are sampled for others, but table tag has 12 rows"):
        draw(13)
    draw(12)


def check_counts(rows=None, steps=1000, **schedule):
    drawn = {"do": "sample", "column": "negatives", "count": 8, "rows": rows}
    values = {"data": {"train": "d/train", "transforms": [drawn]}, "optim": {"schedule": schedule}}
    sparse = {"item": {"table": "item"}, "negatives": {"table": "item", "pooling": "sequence"}}
    tables = {"item": {"rows": 12_101, "dim": 8}}
    schema = Schema.parse({"labels": ["label"], "sparse": sparse, "tables": tables}, "test")
    return fit.check_row_and_step_counts(load_config(values), schema, steps)


def test_sampling_fewer_rows_than_the_table_has_warns():
    [line] = check_counts(11_924)
    assert "rows is 11,924, but table item has 12,101 rows" in line and "without the key rows" in line
    assert check_counts(12_101) == check_counts() == []


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_decay_that_ends_before_the_run_warns(decay):
    [line] = check_counts(decay=decay, decay_steps=890, warmup_steps=100)
    assert "0 from step 990 on, but the run has 1,000 steps" in line and "without decay_steps" in line
    assert check_counts(decay=decay, decay_steps=900, warmup_steps=100) == []
    assert check_counts(decay=decay, warmup_steps=100) == []


@pytest.mark.parametrize(
    ("every", "stopping", "earliest"),
    [
        (2000, {}, "8,000"),
        (250, {}, "1,000"),
        (1000, {"target": 0.8}, "1,000"),
        (2000, {"restore_best": True}, "2,000"),
        ("auto", {"patience": 9}, "1,000"),
        (249, {}, None),
        (999, {"target": 0.8}, None),
        (500, {"patience": 100, "restore_best": True}, None),
    ],
)
def test_early_stopping_that_cannot_end_the_run_warns(every, stopping, earliest):
    train = {"eval_every_steps": every, "early_stopping": stopping}
    values = {"data": {"train": "d/train", "valid": "d/valid"}, "train": train, "checkpoint": {"keep_best": 1}}
    lines = fit.check_row_and_step_counts(load_config(values), Schema.parse(SCHEMA, "test"), 1000)
    assert (
        lines == []
        if earliest is None
        else f"could end at step {earliest} at the earliest, but the run has" in lines[0]
    )


def constant_label(row):
    return 1


@pytest.fixture
def plan_labels(tmp_path):
    """Function that plans a run whose training labels are `label_of(row)`."""
    folder = parquet.write_dataset(tmp_path / "d", train=60, valid=20, test=20)

    def make_plan(label_of, *transforms, statistics=True, **task):
        for path in (folder / "train").glob("*.parquet"):
            table = pq.read_table(path)
            labels = pa.array(map(label_of, table["row"].to_pylist()), pa.int64())
            table = table.set_column(0, "label", labels)
            pq.write_table(table, path, row_group_size=7, write_statistics=statistics)
        values = parquet.config_values(folder, tmp_path / "run", data__transforms=transforms)
        return open_run(load_config(values | {"tasks": [task]}), resumed=False)

    return make_plan


@pytest.mark.parametrize("task", [{}, {"loss": "focal"}, {"loss": "cross_entropy", "options": {"classes": 2}}])
def test_constant_class_label_is_rejected(plan_labels, task):
    with pytest.raises(DataError, match=r"the label of task label is 1 in every row") as error:
        fit.check_plan(plan_labels(constant_label, **task))
    assert "data.train" in error.value.where and "in_batch_softmax" in error.value.do


@pytest.mark.parametrize("is_null", [lambda row: row % 9 == 3, lambda row: row < 20], ids=["some rows", "row groups"])
def test_constant_label_with_nulls_is_rejected(plan_labels, is_null):
    with pytest.raises(DataError):
        fit.check_constant_labels(plan_labels(lambda row: None if is_null(row) else 1, nulls="skip"))


def test_trained_model_may_continue_with_one_class(plan_labels):
    for start in ("warm", "resumed"):
        (line,) = fit.check_constant_labels(replace(plan_labels(constant_label), start=start))
        assert line.startswith("the label of task label is 1 in every row that has it in data.train")


def test_constant_regression_label_causes_a_warning(plan_labels):
    (line,) = fit.check_plan(plan_labels(constant_label, loss="mse"))
    assert line.startswith("the label of task label is 1 in every row that has it in data.train, so mse may learn")


def test_labels_that_may_vary_cause_no_warning(plan_labels):
    """The labels differ between files, have no statistics, come from a transform, or belong to a loss that
    needs only positives."""
    binarize = {"do": "binarize", "columns": ["row"], "at_least": 5, "into": ["label"]}
    for each in (
        plan_labels(lambda row: int(row > 50)),
        plan_labels(constant_label, statistics=False),
        plan_labels(constant_label, binarize),
        plan_labels(constant_label, loss="in_batch_softmax"),
        plan_labels(constant_label, loss="from_model"),
    ):
        assert fit.check_constant_labels(each) == []


CLIP = {"do": "clip", "columns": ["price"], "high": 10}


@pytest.mark.parametrize(
    ("largest", "scale", "transforms", "warns"),
    [
        (100_000, {}, [], True),
        (-100_000, {}, [], True),
        (1000, {}, [], False),
        (100_000, {"price": {"log": True}}, [], False),
        (100_000, {}, [CLIP], False),
    ],
)
def test_unscaled_column_with_large_values_warns(tmp_path, largest, scale, transforms, warns):
    folder = parquet.write_dataset(tmp_path / "d", train=60, valid=20, test=20)
    parquet.change_column_values(folder / "train/part-0.parquet", "price", {29: largest}, row_group_size=7)
    with (folder / "schema.yaml").open("a") as schema:
        schema.write(yaml.safe_dump({"scale": scale}))
    values = parquet.config_values(folder, tmp_path / "run", data__transforms=transforms)
    lines = fit.check_plan(open_run(load_config(values), resumed=False))
    found = [line for line in lines if "dense column price has absolute values up to 100,000" in line]
    assert len(found) == warns
    assert all("{price: {log: true}}" in line and "{do: log, columns: [price]}" in line for line in found)


def test_warning_about_changed_items_names_their_key(tmp_path, monkeypatch):
    schema = Schema.parse(SCHEMA, "test")
    (tmp_path / "schema.yaml").write_text(schema.to_yaml())
    old = FileIdentity("items.parquet", [[0, 5]], 100, "a", "a", True)
    record_data(tmp_path, {}, {"train": [], "items": [old]})
    index = {"about": {"data": fingerprint([])}}
    monkeypatch.setattr("raytrec.driver.resume.find_newest_checkpoint", lambda root: ("/c", index))
    contents = {"train": [], "items": [replace(old, data="b")]}
    (line,) = check_same_data(tmp_path, "/c", schema, {}, contents)
    assert line.startswith("eval.retrieval.items has changed since the run started")


def test_warm_start_advises_null_for_an_unset_model_key(monkeypatch):
    schema = Schema.parse(SCHEMA, "test")
    values = {"data": {"train": "d/train"}, "model": {"name": "dcn"}}
    old, new = load_config(values), load_config(values, ["warm_start.from=/run", "model.cross_rank=2"])
    about = {"config": old.model_dump(by_alias=True, mode="json"), "schema": schema.to_yaml()}
    monkeypatch.setattr("raytrec.driver.resume.find", lambda place: (place, {"about": about, "tensors": {}}))
    with pytest.raises(ConfigError, match=r"model\.cross_rank is 2, but the checkpoint has null") as error:
        check_warm_start(new, schema, {})
    assert "set model.cross_rank=null, or" in error.value.do


def test_warm_start_rejects_another_kind_of_ids(monkeypatch):
    schema = Schema.parse(SCHEMA, "test")
    name, column = next(iter(schema.sparse)), "input of transforms, column 'zip'"
    values = {"data": {"train": "d/train"}, "scaling": {"device": "cpu"}}
    old = load_config(values)
    about = {"config": old.model_dump(by_alias=True, mode="json"), "schema": schema.to_yaml()}
    about["text_ids"] = {name: False, column: True}
    tensors = {"dense/head.model.logit.bias/value": {"shape": [1]}}
    monkeypatch.setattr("raytrec.driver.resume.find", lambda place: (place, {"about": about, "tensors": tensors}))
    config = load_config(values, ["warm_start={from: /run, dense: matching}"])
    for kinds, message in (
        ({name: True, column: True}, f"ids of feature '{name}' are text, but numbers in the checkpoint"),
        ({name: False, column: False}, "column 'zip', are numbers, but text in the checkpoint"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_warm_start(config, schema, kinds)
    for kinds in ({name: False, column: True}, {}):
        assert check_warm_start(config, schema, kinds)
    table = schema.sparse[name].table
    config = load_config(values, [f"warm_start={{from: /run, dense: matching, tables: {{{table}: new}}}}"])
    assert check_warm_start(config, schema, {name: True, column: False})


def test_warm_start_names_initialized_dense_parameters(monkeypatch):
    """Layer top.0 has another input width, so its weight is not loaded; top.2 is a new layer."""
    schema = Schema.parse(SCHEMA, "test")
    values = {"data": {"train": "d/train"}, "scaling": {"device": "cpu"}, "model": {"bottom_mlp": [16]}}
    old = load_config(values, ["model.top_mlp=[16]"])
    shapes = {"bottom.0.weight": [16, 1], "bottom.0.bias": [16], "bottom.2.weight": [8, 16], "bottom.2.bias": [8]}
    shapes |= {"top.0.weight": [16, 5], "top.0.bias": [16], "logit.weight": [1, 16], "logit.bias": [1]}
    tensors = {f"dense/head.model.{name}/value": {"shape": shape} for name, shape in shapes.items()}
    about = {"config": old.model_dump(by_alias=True, mode="json"), "schema": schema.to_yaml()}
    monkeypatch.setattr("raytrec.driver.resume.find", lambda place: (place, {"about": about, "tensors": tensors}))

    def check_start(*settings):
        config = load_config(values, ["warm_start={from: /run, dense: matching}", *settings])
        return check_warm_start(config, schema, {})

    (line,) = check_start("model.top_mlp=[16,16]")
    initial = ", ".join(f"head.model.top.{name}" for name in ("0.weight", "2.weight", "2.bias"))
    expected = f"warm_start.dense=matching loads 7 of 10 dense parameters and buffers; newly initialized: {initial}"
    assert line == expected
    (line,) = check_start("model.top_mlp=[9,9,9]")
    assert "loads 5 of 12" in line and line.endswith("head.model.top.4.weight and 2 more")
    tensors["dense/head.model.top.0.weight/value"] = {"shape": [16, 11]}
    assert check_start("model.top_mlp=[16]") == ["warm_start.dense=matching loads all 8 dense parameters and buffers"]
