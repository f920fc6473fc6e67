import os

import pytest

import raytrec
from raytrec.common.errors import ConfigError, RaytrecError, SchemaError
from raytrec.common.reading import UnreadableError, parse_json, parse_yaml
from raytrec.config.base import Mark, build_json_schema
from raytrec.config.data import to_run_name
from raytrec.config.overrides import to_override_texts
from raytrec.config.run_config import RunConfig, list_keys_with, load_config
from raytrec.config.schema import Schema

BASE = {"data": {"train": "d/train"}}


def test_overrides_are_yaml_and_take_precedence():
    overrides = ["train.epochs=3", "model.top_mlp=[64, 32]", "run.name=x", "data.schema=s.yaml"]
    config = load_config(BASE, overrides)
    assert (config.train.epochs, config.model.top_mlp, config.run.name) == (3, [64, 32], "x")
    assert config.data.schema_uri == "s.yaml"
    assert load_config(BASE).data.schema_uri == "d/schema.yaml"


def test_override_replaces_a_whole_section():
    values = BASE | {"model": {"name": "dlrm", "bottom_mlp": [8]}, "train": {"epochs": 2}}
    model = "model={name: deepfm, top_mlp: [64], dropout: 0.2}"
    config = load_config(values, [model, "train.log_every_steps=5"])
    assert (config.model.name, config.model.top_mlp, config.model.dropout) == ("deepfm", [64], 0.2)
    assert (config.train.epochs, config.train.log_every_steps) == (2, 5)
    assert load_config(values, ["train={}", "model.name=dcn"]).train.epochs == 1


def test_overrides_accept_a_mapping_of_dotted_keys():
    wanted = {"train.epochs": 3, "train.max_steps": None, "optim.dense.lr": 1e-5, "model": {"name": "mf"}}
    wanted["data.reserve_columns"] = columns = ["a, 'b'", "no"]
    config = load_config(BASE | {"train": {"epochs": 1, "max_steps": 4}}, wanted)
    assert (config.train.epochs, config.train.max_steps) == (3, None)
    assert (config.optim.dense.lr, config.model.name) == (1e-5, "mf")
    assert config.data.reserve_columns == columns
    assert to_override_texts({"train.epochs": 3}) == to_override_texts(["train.epochs=3"])
    tables = {"item*": {"ranks": [1]}, "item": {"ranks": [0]}}  # later lines override earlier ones
    assert [*load_config(BASE, {"plan.tables": tables}).plan.tables] == ["item*", "item"]
    for command in (raytrec.train, raytrec.check, raytrec.tune):
        with pytest.raises(ConfigError, match=r"did you mean train\.epochs"):
            command(BASE, **{"space": "x"} if command is raytrec.tune else {}, overrides={"train.epocs": 3})
    with pytest.raises(ConfigError, match="a value cannot be represented in YAML"):
        load_config(BASE, {"train.epochs": object()})


def test_union_type_error_is_reported_once():
    def mistakes(*overrides):
        with pytest.raises(ConfigError) as error:
            load_config(BASE, overrides)
        return error.value.what.split("\n")

    assert mistakes("scaling.num_workers=two") == [
        "scaling.num_workers: Input should be a valid integer or a mapping of keys (got 'two')"
    ]
    assert mistakes("scaling.num_workers={min: x}") == [
        "scaling.num_workers.min: Input should be a valid integer (got 'x')",
        "scaling.num_workers.max: missing",
    ]
    assert mistakes("data.train=[3]") == ["data.train.0: Input should be a valid string (got 3)"]
    assert mistakes("data.transforms=[{do: clip, columns: [a], low: .nan}]") == [
        "data.transforms.0.low: Input should be a finite number (got nan)"
    ]


def test_overrides_set_table_plans():
    values = ["plan.tables.user.sharding_type=row_wise", "plan.tables.item*.ranks=[0]"]
    plan = load_config(BASE, [*values, "plan.colocate=[[a, b]]"]).plan
    assert plan.tables["user"].sharding_type == "row_wise" and plan.tables["item*"].ranks == [0]
    assert plan.colocate == [["a", "b"]]


def test_unlike_keys_are_not_suggested():
    with pytest.raises(ConfigError, match=r"run\.folder: unknown key") as raised:
        load_config(BASE, ["run.folder=a"])
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    "override,expected_text",
    [
        ("scaling.wokers=2", "scaling.wokers: unknown key; did you mean scaling.num_workers?"),
        ("model={name: hstu_rank, actions: {a: []}}", "model.actions.a: "),
        ("run.sed=1", "did you mean run.seed?"),
        ("train.batch_size=2", "did you mean data.global_batch_size"),
        ("epochs=2", "there is no section 'epochs'"),
        ("modle={name: mf}", "did you mean 'model'?"),
        ("model={name: mf, mlp: [3]}", "model.mlp: unknown key of model mf"),
        ("scaling.num_workers=0", "scaling.num_workers"),
        ("data.shuffle=rows", "data.shuffle"),
        ("scaling.num_workers=25", "increase data.lanes"),
        ("data.global_batch_size=1", "at least one row"),
        ("train.eval_every_steps=5", "but none of data.valid, data.holdout and data.test is"),
        ("epochs", "not an override"),
        ("tasks.clicked.weight=0.5", "the configuration lists no tasks"),
        ("train.epochs.x=1", "'epochs' is a value"),
        ("plan.tables.user.shading_type=row_wise", "did you mean plan.tables.*.sharding_type"),
        ("plan.tables.user.sharding_type=rowwise", "plan.tables.user.sharding_type"),
        ("plan.tables.user.ranks=[-1]", "plan.tables.user.ranks.0"),
        ("plan.tables.user.dtype=fp8", "plan.tables.user.dtype"),
        ("plan.colocate=[user]", "plan.colocate"),
        ("train={compile: true, activation_checkpointing: true}", "set one of them to false"),
        ("train={compile: graphs, activation_checkpointing: true}", "set one of them to false"),
        ("train.compile=graph", "train.compile"),
        ("optim.dense.lr=.inf", "optim.dense.lr: Input should be a finite number"),
        ("optim.embeddings.lr=.nan", "optim.embeddings.lr"),
        ("optim.embeddings.eps=1e400", "optim.embeddings.eps"),
        ("optim.dense.lr=true", "optim.dense.lr: Input should be a valid number (got True)"),
        ("model=mf", "model: expected a mapping with name set to one of"),
        ("data.holdout=true", "data.holdout: Input should be a valid number or 'auto' (got True)"),
        ("data.transforms=[{do: clip, columns: [a]}]", "data.transforms.0: clip needs low, high or both"),
        ("optim.schedule.decay_steps=3", "optim.schedule: decay_steps is set"),
        ("train.max_grad_norm=.inf", "train.max_grad_norm"),
        ("scaling.hang_timeout_s=1e300", "scaling.hang_timeout_s"),
        ("scaling.num_workers=true", "scaling.num_workers"),
        ("scaling.num_workers={min: 1, max: true}", "scaling.num_workers"),
        ("scaling.num_workers={min: 4, max: 1}", "num_workers.min (4) exceeds scaling.num_workers.max (1)"),
        ("scaling.num_workers='2'", "scaling.num_workers: Input should be a valid integer"),
        ("train.epochs=2.0", "train.epochs"),
        ("train.epochs=yes", "train.epochs"),
        ("checkpoint.keep_best=false", "checkpoint.keep_best"),
        ("plan.tables.user.ranks=[true]", "plan.tables.user.ranks.0"),
        ("plan.memory_gib=.inf", "plan.memory_gib"),
        ("model.top_mlp=[true]", "model.top_mlp.0"),
        ("model.top_mlp=[1000000000000]", "model.top_mlp.0"),
        ("model.dropout=.nan", "model.dropout"),
        ("data.lanes=1000000000", "data.lanes"),
        ("data.transforms=[{do: hash, columns: [a], rows: true}]", "data.transforms.0"),
        ("data.transforms=[{do: [hash], columns: [a]}]", "data.transforms.0"),
        ("model.name=[dlrm]", "with name set to one of"),
        ("model.name=deepfn", "or module:Class; did you mean 'deepfm'? (got"),
        ("data.transforms=[{do: bucketise, columns: [a]}]", "or module:function; did you mean 'bucketize'? (got"),
        (f"run.seed={10**20}", "run.seed"),
        ("run.seed=-1", "run.seed"),
        *(
            (f"run.name={name}", "run.name: expected at most 150")
            for name in ("../../x", "'[/x]'", "a/b", "..", "''", "' a'")
        ),
        ('run.name="a\\nb"', "run.name: expected at most 150"),
    ],
)
def test_invalid_override_has_a_clear_error(override, expected_text):
    with pytest.raises(ConfigError) as error:
        load_config({**BASE, "train": {"epochs": 1}}, [override])
    assert expected_text in str(error.value), str(error.value)


def test_config_error_lists_all_mistakes():
    with pytest.raises(ConfigError) as error:
        load_config({"data": {"trian": "x"}, "modle": {}})
    message = str(error.value)
    assert "data.train: missing" in message and "data.trian" in message and "did you mean model" in message


READERS = [(load_config, ConfigError), (Schema.load, SchemaError)]


@pytest.mark.parametrize("load,error", READERS, ids=["config", "schema"])
@pytest.mark.parametrize(
    "text,message",
    [(None, "file does not exist"), ("a: [", "cannot parse"), ("- a", "not a mapping"), ("text", "not a mapping")],
)
def test_missing_and_broken_files_are_rejected(tmp_path, load, error, text, message):
    if text:
        (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(error, match=message):
        load(tmp_path / "a.yaml")


def test_json_schema_describes_every_key():
    schema = build_json_schema(RunConfig)
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    for section in schema["$defs"].values():
        for name, key in section.get("properties", {}).items():
            assert "description" in key or "$ref" in key or "allOf" in key, name


def test_config_parses_scientific_notation():
    config = load_config(BASE, ["optim.dense.lr=1e-3", "optim.embeddings.lr=1", "run.name=try 2 (lr=0.1)"])
    assert (config.optim.dense.lr, config.optim.embeddings.lr) == (1e-3, 1.0)


BILLION_LAUGHS = "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(8)
)


def test_documents_have_at_most_64_levels():
    assert parse_json("[" * 64 + "]" * 64)
    with pytest.raises(UnreadableError, match="exceeds 64 levels"):
        parse_json("[" * 65 + "]" * 65)


@pytest.mark.parametrize(
    "text,expected_text",
    [
        ("data: {train: a}\nrun: {}\ndata: {train: b}\n", "duplicate key 'data' (line 3); first in line 1"),
        ("data:\n  train: a\n  train: b\n", "duplicate key 'train' (line 3); first in line 2"),
        (BILLION_LAUGHS, "the text expands to more than 200,000 values"),
        ("[" * 3000, "64 levels of nesting (line 1)"),
        ("a: &a [*a]", "anchor a refers to itself (line 1)"),
        ("\x00", "control characters are not allowed"),
        ("a: 2001-99-99", "an invalid value: month must be in 1..12"),
        ("a: !!python/name:os.system x", "could not determine a constructor"),
    ],
)
def test_malicious_yaml_gives_a_one_line_error(tmp_path, text, expected_text):
    (tmp_path / "a.yaml").write_text(text)
    for load, kind in READERS:
        with pytest.raises(kind) as error:
            load(tmp_path / "a.yaml")
        what = error.value.what
        assert expected_text in what and "\n" not in what and len(str(error.value)) < 1000


def test_yaml_merge_keys_and_anchors_are_supported():
    text = "base: &b {rows: 5, dim: 4}\ntables: {user: {<<: *b, dim: 8}, item: *b}"
    found = parse_yaml(text)["tables"]
    assert found == {"user": {"rows": 5, "dim": 8}, "item": {"rows": 5, "dim": 4}}


def test_config_rejects_pipes_and_devices(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    places = {tmp_path / "pipe.yaml": "a pipe", "/dev/zero": "a device", tmp_path / "x\0": "null byte"}
    for place, expected_text in places.items():
        with pytest.raises(RaytrecError, match=expected_text):
            load_config(place)


def test_config_error_length_is_limited():
    with pytest.raises(ConfigError) as error:
        load_config({"data": {"train": "x"} | {f"key{i}" + "x" * 3000: "y" * 10**3 for i in range(100)}})
    assert len(str(error.value).encode()) < 4096 and "more" in error.value.what


def test_config_repr_and_errors_hide_secrets():
    values = {**BASE, "tracking": {"uri": "http://me:sesame@h", "tags": {"api_key": "open"}}}
    shown = repr(load_config(values)) + str(load_config(values))
    assert "sesame" not in shown and "open'" not in shown and "http://me:***@h" in shown
    wrong = {"model": {"options": {"password": "sesame"}}, "tracking": {"tags": {"pwd": ["sesame"]}}}
    with pytest.raises(ConfigError) as error:
        load_config(BASE | wrong)
    assert "sesame" not in str(error.value)


def test_json_schema_names_all_built_in_transforms_and_losses():
    from raytrec.config.transforms import BUILT_IN
    from raytrec.tasks.losses import loss

    sections = build_json_schema(RunConfig)["$defs"]
    named = {"DataSection": ("transforms", BUILT_IN), "TaskSection": ("loss", loss.parts)}
    for section, (key, parts) in named.items():
        assert ", ".join(parts) in sections[section]["properties"][key]["description"]


def test_key_marks_define_what_resume_may_change():
    free, fixed = list_keys_with(Mark.FREE), list_keys_with(Mark.FIXED)
    for key in ("plan.tables", "scaling.num_workers", "checkpoint.every_s", "train.on_nan", "data.schema"):
        assert key.startswith(free) and not key.startswith(fixed)
    for key in ("plan.qcomms.forward_precision", "checkpoint.dir"):
        assert key.startswith(fixed)
    for key in ("data.global_batch_size", "model.name", "optim.dense.lr", "train.epochs", "run.seed"):
        assert not key.startswith(free)
    for section, name in (key.split(".") for key in list_keys_with(Mark.COMMON) if "." in key):
        assert name in RunConfig.model_fields[section].annotation.model_fields


@pytest.mark.parametrize("text", ["a ", "x" * 99 + " y", "映画" * 60, "", " a", "a/b"])
def test_derived_run_names_are_valid(text):
    name = to_run_name(text)
    assert load_config({"run": {"name": name}, "data": {"train": "d"}}).run.name == name
