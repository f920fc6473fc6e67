from pathlib import Path

import pytest
import yaml

from raytrec.config import RunConfig, json_schema, load_config
from raytrec.errors import ConfigError

JOBS = Path(__file__).parents[1] / "jobs"
BASE = {"data": {"train": "d/train"}}


def test_overrides_win_and_are_yaml():
    config = load_config(
        BASE, ["train.epochs=3", "model.top_mlp=[64, 32]", "run.name=x", "data.schema=s.yaml"]
    )
    assert (config.train.epochs, config.model.top_mlp, config.run.name) == (3, [64, 32], "x")
    assert config.data.schema_uri == "s.yaml"
    assert load_config(BASE).data.schema_uri == "d/schema.yaml"


def test_a_plan_on_the_command_line():
    values = ["plan.tables.user.sharding=row_wise", "plan.tables.item*.ranks=[0]", "plan.together=[[a, b]]"]
    plan = load_config(BASE, values).plan
    assert plan.tables["user"].sharding == "row_wise" and plan.tables["item*"].ranks == [0]
    assert plan.together == [["a", "b"]]


def test_resolved_yaml_loads_to_the_same():
    config = load_config(BASE, ["scaling.workers=3", "optim.embeddings.lr=0.5"])
    assert load_config(yaml.safe_load(config.to_yaml())) == config
    assert load_config(config, ["train.epochs=2"]).scaling.workers == 3


@pytest.mark.parametrize(
    "override,says",
    [
        ("scaling.wokers=2", "scaling.wokers: unknown key; did you mean scaling.workers?"),
        ("train.batch_size=2", "did you mean data.global_batch_size"),
        ("trian.epochs=2", "did you mean train"),
        ("scaling.workers=two", "scaling.workers: Input should be a valid integer"),
        ("scaling.workers=0", "scaling.workers"),
        ("data.shuffle=rows", "data.shuffle"),
        ("model.name=drlm", "model.name"),
        ("scaling.workers=25", "raise data.lanes"),
        ("data.global_batch_size=1", "at least one row"),
        ("train.eval_every_steps=5", "neither data.valid nor data.test"),
        ("epochs", "not an override"),
        ("train.epochs.x=1", "'epochs' is a value"),
        ("plan.tables.user.shading=row_wise", "did you mean plan.tables.*.sharding"),
        ("plan.tables.user.sharding=rowwise", "plan.tables.user.sharding"),
        ("plan.tables.user.ranks=[-1]", "plan.tables.user.ranks.0"),
        ("plan.tables.user.dtype=fp8", "plan.tables.user.dtype"),
        ("plan.together=[user]", "plan.together"),
        ("train.micro_batches=0", "train.micro_batches"),
    ],
)
def test_mistakes_are_one_clear_message(override, says):
    with pytest.raises(ConfigError) as error:
        load_config({**BASE, "train": {"epochs": 1}}, [override])
    assert says in str(error.value), str(error.value)


def test_all_mistakes_at_once():
    with pytest.raises(ConfigError) as error:
        load_config({"data": {"trian": "x"}, "modle": {}})
    message = str(error.value)
    assert "data.train: missing" in message and "data.trian" in message and "did you mean model" in message


def test_files(tmp_path):
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("- a")
    with pytest.raises(ConfigError, match="not a mapping"):
        load_config(tmp_path / "a.yaml")


def test_json_schema_describes_every_key():
    schema = json_schema()
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    for section in schema["$defs"].values():
        for name, key in section["properties"].items():
            assert "description" in key or "$ref" in key or "allOf" in key, name


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda p: p.name)
def test_jobs_are_valid(path):
    load_config(path, ["data.train=x/train"])
