"""Test warm starts, transforms, partitions and unusual columns in complete runs."""

import checkpoints
import parquet
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from any_parquet import write_unusual_dataset
from small import initial_rows

from raytrec.common.errors import ConfigError, RunError, SchemaError
from raytrec.config.schema import Schema
from raytrec.driver import run as driver
from raytrec.inspection.propose import inspect

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
NO_LEARNING = ["optim.embeddings.lr=1e-30", "optim.dense.lr=1e-30"]


@pytest.fixture(scope="module")
def first(tiny_data, tmp_path_factory):
    place = tmp_path_factory.mktemp("first")
    return driver.train(parquet.config_values(tiny_data, place / "run", train__epochs=2))


@pytest.mark.survive
@pytest.mark.parametrize("workers", [1, 2])
def test_warm_start_restores_the_weights(first, tiny_data, tmp_path, workers):
    """Without learning, a warm start has the first run's metrics, even on other data with another plan."""
    new = parquet.write_split(tmp_path / "new", 1500, seed=77)
    changes = [f"data.train={new}", f"run.dir={tmp_path / 'run'}", f"scaling.num_workers={workers}", *NO_LEARNING]
    second = driver.train(None, [*changes, "plan.sharding_types=[row_wise]"], start_from=first.path)
    assert second.metrics["train.rows"] == 2 * 1500
    for name in ("eval.auc", "eval.ne", "eval.logloss", "eval.calibration"):
        assert second.metrics[name] == pytest.approx(first.metrics[name], abs=1e-6)
    assert (second.path / "config.yaml").read_text().count(str(first.path)) == 2, "names the first run"


@pytest.mark.survive
def test_warm_start_accepts_a_new_config_and_can_be_repeated(first, tiny_data, tmp_path):
    settings = parquet.config_values(tiny_data, tmp_path / "second")
    second = driver.train(settings, start_from=first.path / "checkpoints")
    assert second.metrics["eval.logloss"] != pytest.approx(first.metrics["eval.logloss"], abs=1e-6)
    again = driver.train(None, [f"run.dir={tmp_path / 'third'}", *NO_LEARNING], start_from=second.path)
    assert again.metrics["eval.logloss"] == pytest.approx(second.metrics["eval.logloss"], abs=1e-6)


def test_warm_start_rejects_mismatched_model_or_schema(first, tiny_data, tmp_path):
    def fails(kind, says, start_from=first.path, **changes):
        with pytest.raises(kind, match=says):
            settings = parquet.config_values(tiny_data, tmp_path / "run", **changes)
            driver.train(settings, start_from=start_from)

    fails(ConfigError, r"model.top_mlp is \[8\], but the checkpoint has \[16\]", model__top_mlp=[8])
    fails(RunError, "there is no complete checkpoint in this folder", start_from=tmp_path)
    larger = tmp_path / "larger.yaml"
    larger.write_text(parquet.SCHEMA_YAML.replace("rows: 40", "rows: 50"))
    fails(SchemaError, r"table user is 50 × 8 in the schema, but 40 × 8 in", data__schema=str(larger))
    assert not (tmp_path / "run").exists()


@pytest.mark.survive
def test_transformed_partitions_train_like_prepared_data(tiny_data, tmp_path):
    """A run on raw columns, partitioned by day, equals the run on their prepared form."""
    whole = pq.read_table(tiny_data / "train")
    rows = len(whole)
    names = pa.array([f"user {i}" for i in range(40)])
    raw = whole.set_column(whole.column_names.index("user"), "user_name", names.take(whole["user"].combine_chunks()))
    for day, (start, count) in enumerate([(0, 500), (500, rows - 500), (0, 300)]):
        path = tmp_path / f"raw/date=2026-11-0{day + 1}"
        path.mkdir(parents=True)
        pq.write_table(raw.slice(start, count), path / "a.parquet", row_group_size=300)
    (tmp_path / "users.txt").write_text("\n".join(names.to_pylist()))
    plain = parquet.config_values(tiny_data, tmp_path / "a", train__max_steps=10)
    plain["data"] |= {"shuffle": "none", "valid": None, "test": None}
    lookup = {"do": "lookup_vocabulary", "columns": ["user_name"], "into": ["user"]}
    data = {
        "train": str(tmp_path / "raw"),
        "partitions": {"to": "date=2026-11-02"},
        "schema": str(tiny_data / "schema.yaml"),
        "transforms": [lookup | {"vocabulary": str(tmp_path / "users.txt")}],
    }
    driver.train(plain)
    driver.train(plain | {"run": {"dir": str(tmp_path / "b")}, "data": plain["data"] | data})

    weights = [checkpoints.read_tensors(checkpoints.newest_checkpoint(tmp_path / name)) for name in ("a", "b")]
    assert len(weights[0]) > 5 and weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_warm_start_grows_and_resets_tables(first, tiny_data, tmp_path, capfd):
    """Table user grows from 40 to 50 rows and keeps weights and state; tag gets initial values."""
    schema = tmp_path / "schema.yaml"
    schema.write_text(parquet.SCHEMA_YAML.replace("rows: 40", "rows: 50"))
    changes = ["warm_start.tables={'us*': resize, tag: new}", "warm_start.optimizer=true", f"data.schema={schema}"]
    changes += ["scaling.num_workers=3", "data.valid=null", "data.test=null", "train.max_steps=1"]
    second = driver.train(None, [f"run.dir={tmp_path / 'run'}", *changes, *NO_LEARNING], start_from=first.path)
    said = " ".join(capfd.readouterr().err.split())
    assert "table user gets 10 new rows with initial values" in said
    assert "table tag (12 × 8) gets its initial values" in said
    old, new = (checkpoints.read_tensors(checkpoints.newest_checkpoint(run.path)) for run in (first, second))
    initial = Schema.load(schema)
    torch.testing.assert_close(new["tables/user/weight"][:40], old["tables/user/weight"], rtol=0, atol=1e-12)
    torch.testing.assert_close(new["tables/user/weight"][40:], initial_rows(initial, "user", 0, 40, 50))
    torch.testing.assert_close(new["tables/tag/weight"], initial_rows(initial, "tag", 0, 0, 12))
    assert (new["tables/user/sum"][:40] >= old["tables/user/sum"]).all()
    assert (new["tables/user/sum"][40:] == 0).all() and old["tables/user/sum"].min() > 0
    assert second.metrics["train.steps"] == 1 and second.metrics["train.rows"] == 128
    assert not any(name.startswith("eval.") for name in second.metrics)
    assert str(first.path) in (second.path / "config.yaml").read_text(), "must name the first run"
    steps = {name: value for name, value in new.items() if name.endswith("/step")}
    assert steps and all(value == old[name] + 1 for name, value in steps.items())


@pytest.mark.survive
def test_warm_start_shrinks_and_drops_tables(first, tmp_path, capfd):
    """The new data has 30 users and no tags; dense layers of another shape get initial values."""
    data = parquet.write_dataset(tmp_path / "d")
    for path in data.glob("*/*.parquet"):
        table = pq.read_table(path)
        table = table.filter(pc.less(table["user"], 30)).drop_columns("tags")
        pq.write_table(table, path)
    schema = data / "schema.yaml"
    schema.write_text(
        "labels: [label]\ndense: [price]\nsparse: {user: {table: user}}\ntables: {user: {rows: 30, dim: 8}}\n"
    )
    settings = parquet.config_values(data, tmp_path / "run", train__max_steps=1)
    tables = {"user": "resize", "tag": "drop"}

    def train(**warm_start):
        return driver.train(settings | {"warm_start": warm_start}, NO_LEARNING, start_from=first.path)

    with pytest.raises(SchemaError, match=r"warm_start\.dense=matching"):
        train(tables=tables)
    with pytest.raises(SchemaError, match="table tag is missing in the schema, but 12 × 8 in"):
        train(tables={"user": "resize"}, dense="matching")
    second = train(tables=tables, dense="matching")
    said = " ".join(capfd.readouterr().err.split())
    assert "warm_start.dense=matching loads 7 of 8 dense parameters and buffers;" in said
    assert "newly initialized: head.model.top.0.weight" in said
    old, new = (checkpoints.read_tensors(checkpoints.newest_checkpoint(run.path)) for run in (first, second))
    torch.testing.assert_close(new["tables/user/weight"], old["tables/user/weight"][:30], rtol=0, atol=1e-12)
    dense = [n for n in new if n.startswith("dense/") and n.endswith("/value")]
    assert any(n in old and old[n].shape == new[n].shape and torch.equal(old[n], new[n]) for n in dense)
    assert any(old[n].shape != new[n].shape for n in dense)


@pytest.mark.survive
@pytest.mark.parametrize("model", ["dlrm", "sequence"])
def test_schema_proposed_by_inspect_can_be_trained(tmp_path, model):
    """The dataset has unusual columns, and the proposed schema is used unchanged."""
    folder = write_unusual_dataset(tmp_path / "odd")
    found = inspect(str(folder), dim=8)
    (folder / "schema.yaml").write_text(found.schema_yaml(), encoding="utf-8")
    config = parquet.config_values(folder, tmp_path / "run", data__transforms=found.transforms, train__epochs=1)
    config["data"]["valid"] = None
    config["model"] = {"name": model}
    run = driver.train(config)
    assert run.metrics["train.rows"] == 2500 and run.metrics["eval.rows"] == 300
