"""A stored configuration may have keys that were since renamed or removed; a file of the user may not."""

import parquet
import pytest
import yaml

from raytrec.common.errors import ConfigError, SchemaError
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.config.stored import ANY, REMOVED, RENAMED, with_current_keys
from raytrec.driver.resume import resume_config

NOW = {
    "data": {"train": "/data/train", "valid": "/data/valid", "reserve_columns": ["user", "often"]},
    "tasks": [
        {"label": "label", "loss": "in_batch_softmax", "item": "user", "item_frequency": "often"},
        {"name": "again", "label": "label", "mask": "label"},
    ],
    "model": {"name": "mf"},
    "plan": {"tables": {"user": {"ranks": [0]}}},
    "train": {"eval_every_steps": 5, "early_stopping": {"patience": 2}},
    "eval": {"max_exact_rows": 100},
}


def in_old_keys(values: dict) -> dict:
    """The same configuration as a run stored it before, all removed keys with what they did."""
    values = yaml.safe_load(yaml.safe_dump(values))
    for key, name in RENAMED.items():
        *above, old = key.split(".")
        for section in _sections(values, above):
            if name in section:
                section[old] = section.pop(name)
    for key, value in REMOVED.items():
        *above, old = key.split(".")
        for section in _sections(values, above):
            section[old] = 7 if value is ANY else value
    return values


def _sections(values, above):
    found = [values]
    for part in above:
        if part == "*":
            found = [inner for each in found for inner in (each.values() if isinstance(each, dict) else each)]
        else:
            found = [each[part] for each in found if each.get(part)]
    return found


def test_a_stored_configuration_in_old_keys_is_the_same_configuration():
    old = in_old_keys(yaml.safe_load(load_config(NOW).to_yaml()))
    assert old["data"]["carry"] == ["user", "often"] and old["tasks"][1]["where"] == "label"
    assert old["plan"]["tables"]["user"]["cache_algorithm"] == 7
    assert load_config(old, stored=True) == load_config(NOW)
    with pytest.raises(ConfigError, match="carry: unknown key"):
        load_config(old)


def test_a_run_that_was_begun_with_old_keys_is_resumed(tmp_path):
    values = yaml.safe_load(load_config(parquet.settings(tmp_path / "data", tmp_path)).to_yaml())
    values["data"]["reserve_columns"] = ["row"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(in_old_keys(values)))
    assert resume_config(tmp_path, None, []).data.reserve_columns == ["row"]


def test_a_removed_key_that_made_it_another_run_is_refused():
    for key, value in {"train.loss_reduction": "sum", "train.early_stopping.min_delta": 0.5}.items():
        section, *above, last = key.split(".")
        values = yaml.safe_load(yaml.safe_dump(NOW))
        place = values[section]
        for part in above:
            place = place[part]
        place[last] = value
        with pytest.raises(ConfigError, match=f"{last}: unknown key"):
            load_config(values, stored=True)


def test_a_stored_schema_in_old_keys_is_the_same_schema():
    text = "labels: [y]\nsparse:\n  history: {table: item, pooling: sequence, SIDES: [times]}\n"
    text += "tables:\n  item: {rows: 10, dim: 4, ids: {admit_probability: 1.0, ttl_s: null}}\n"
    old = text.replace("SIDES", "sides")
    schema = Schema.stored(old, "a checkpoint")
    assert schema.sparse["history"].side_features == ["times"] and schema.managed == ["item"]
    assert Schema.stored(schema.to_yaml(), "a checkpoint") == schema
    with pytest.raises(SchemaError, match="sides: unknown key"):
        Schema.parse(yaml.safe_load(old), "a user's file")


def test_values_of_other_shapes_are_left_to_the_configuration():
    for odd in ({"data": None, "tasks": {"where": 1}, "eval": [3]}, {"plan": {"tables": [1, {"x": 2}]}}):
        assert with_current_keys(yaml.safe_load(yaml.safe_dump(odd))) == odd
