"""A resolved configuration resolves to itself, and a stored schema is read back unchanged."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from raytrec.cli import main
from raytrec.common.errors import ConfigError, SchemaError
from raytrec.common.reading import parse_yaml
from raytrec.config.base import build_json_schema
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.driver.prepare import resolve

JOBS = Path(__file__).parents[2] / "jobs"
YAML = sorted(file for file in JOBS.rglob("*.yaml") if file.parent.name != "spaces")
SCHEMAS = [file for file in YAML if file.name.endswith("schema.yaml") or file.parent.name == "schemas"]
CONFIGS = [file for file in YAML if file not in SCHEMAS]
WHOLE = build_json_schema(RunConfig)
PARTS = WHOLE["$defs"]
# Text that could be read as a number, a date, null, a bool or several lines.
TEXTS = st.sampled_from(["a", "1e3", "12e4567", "no", "null", "2026-01-01", "1_0", "a: b", "- é", "a\nb", ""])


def get_ref_name(part):
    return part["$ref"].rpartition("/")[2]


MODELS = [get_ref_name(part) for part in WHOLE["properties"]["model"]["oneOf"]]
TRANSFORMS = [get_ref_name(part) for part in PARTS["DataSection"]["properties"]["transforms"]["items"]["oneOf"]]
USER_CODE = {"PythonSection": {"name": "mine:Net"}, "Python": {"do": "mine:f"}}
SECTIONS = {key: get_ref_name(part) for key, part in WHOLE["properties"].items() if "$ref" in part and key != "data"}


def draw_numbers(part, strategy, **limits):
    low = part.get("minimum", part.get("exclusiveMinimum", part.get("ge", part.get("gt", 0))))
    high = part.get("maximum", part.get("exclusiveMaximum", part.get("le", part.get("lt", 1000))))
    return strategy(low, min(high, 1000), **limits)


def draw_values(part):
    """Return a strategy for values of a part of the JSON Schema."""
    if "$ref" in part:
        return draw_values(PARTS[get_ref_name(part)])
    for key in ("anyOf", "oneOf"):
        if key in part:
            return st.one_of([draw_values(each) for each in part[key]])
    if "const" in part or "enum" in part:
        return st.sampled_from(part.get("enum") or [part["const"]])
    match part.get("type"):
        case "integer":
            return draw_numbers(part, st.integers)
        case "number":
            return draw_numbers(part, st.floats)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array" if "prefixItems" in part:
            return st.tuples(*map(draw_values, part["prefixItems"])).map(list)
        case "array":
            return st.lists(draw_values(part["items"]), min_size=part.get("minItems", 0), max_size=2)
        case "string" if "pattern" in part:
            return st.from_regex(part["pattern"].replace(r"\w", "[a-z_]"), fullmatch=True)
        case "string":
            return TEXTS
        case "object" if "properties" in part:
            inner = {key: draw_values(each) for key, each in part["properties"].items()}
            needed = part.get("required", [])
            optional = {key: each for key, each in inner.items() if key not in needed}
            some = st.lists(st.sampled_from([*optional] or [""]), max_size=3, unique=True)
            return some.flatmap(
                lambda keys: st.fixed_dictionaries({k: inner[k] for k in [*needed, *keys] if k in inner})
            )
        case "object":
            keys = draw_values(part["propertyNames"]) if "propertyNames" in part else TEXTS
            each = part.get("additionalProperties")
            return st.dictionaries(keys, draw_values(each) if isinstance(each, dict) else TEXTS, max_size=2)
    return st.one_of(TEXTS, st.floats(-9, 9), st.lists(TEXTS, max_size=2), st.none())


def make_run_values(name, value):
    """Return the configuration values of a run with one part of this kind."""
    run = {"data": {"train": "d", "valid": "v"}, "train": {"eval_every_steps": 9}}
    if name in MODELS:
        return run | {"model": value}
    if name in TRANSFORMS:
        return run | {"data": run["data"] | {"transforms": [value]}}
    if name == "TaskSection":
        return run | {"tasks": [value]}
    return run | next({key: value} for key, each in SECTIONS.items() if each == name)


def check_resolves_to_itself(config):
    text = config.to_yaml()
    again = load_config(parse_yaml(text))
    assert again == config and again.to_yaml() == text
    assert load_config(config) == config
    assert load_config(json.loads(json.dumps(config.model_dump(by_alias=True, mode="json")))) == config


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_printed_job_config_resolves_to_itself(file, tmp_path, capsys):
    def printed(*arguments):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["config", *map(str, arguments)])
        return capsys.readouterr().out

    resolved = tmp_path / "x.yaml"
    resolved.write_text(printed(file, *["data.train=d/train"][: file.stem == "own"]))
    assert printed(resolved) == resolved.read_text()
    run = resolve(load_config(resolved), "x")
    assert resolve(load_config(parse_yaml(run.to_yaml())), "other") == run


@pytest.mark.parametrize("name", [*MODELS, *TRANSFORMS, *SECTIONS.values(), "TaskSection"])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_any_accepted_section_resolves_to_itself(name, data):
    try:
        value = data.draw(draw_values(PARTS[name])) | USER_CODE.get(name, {})
        config = load_config(make_run_values(name, value))
    except ConfigError:
        assume(False)
    check_resolves_to_itself(config)


@pytest.mark.parametrize("since", ["2026-01-01", "{0: a}", "!!binary aGk="])
def test_config_rejects_options_that_are_not_json_values(since):
    for key in ("model={name: 'mine:Net', %s}", "tasks=[{%s}]", "data.transforms=[{do: 'mine:f', %s}]"):
        with pytest.raises(ConfigError, match=r"options\.since.*[Jj]SON value|options\.since.0: .*string"):
            load_config({"data": {"train": "d"}}, [key % f"options: {{since: {since}}}"])


SCHEMA = Schema.model_json_schema()
PARTS |= SCHEMA["$defs"]


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.stem)
def test_job_schema_round_trips_through_yaml(file):
    schema = Schema.load(file)
    assert Schema.parse_stored(schema.to_yaml(), "test") == schema


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_accepted_schema_round_trips_through_yaml(data):
    names = st.lists(TEXTS, unique=True, max_size=2)
    labels, dense, sparse = data.draw(names), data.draw(names), data.draw(names)
    table = data.draw(TEXTS)
    values = {
        "labels": [f"{label}y" for label in labels] + ["y"],
        "dense": [f"{name} d" for name in dense],
        "scale": {f"{name} d": data.draw(draw_values(PARTS["Scale"])) for name in dense[:1]},
        "sparse": {name: data.draw(draw_values(PARTS["Sparse"])) | {"table": table} for name in [*sparse, "user"]},
        "tables": {table: data.draw(draw_values(PARTS["Table"])) | {"dim": 8}},
        "statistics": {name: data.draw(draw_values(PARTS["Statistics"])) for name in sparse[:1]},
        "candidates": data.draw(st.sampled_from([[], ["y", "user"]])),
    }
    try:
        schema = Schema.parse(values, "test")
    except SchemaError:
        assume(False)
    text = schema.to_yaml()
    assert Schema.parse_stored(text, "test") == schema == Schema.parse(schema.model_dump(), "test")
    assert Schema.parse_stored(text, "test").to_yaml() == text
