"""Configurations from elsewhere are data: code that they name is refused, unless the user allows it."""

import pytest
import yaml

from raytrec.config import load_config
from raytrec.errors import ConfigError
from raytrec.trust import code_in

VALUES = {
    "data": {
        "train": "d/train",
        "transforms": [
            {"do": "log", "columns": ["price"]},
            {"do": "evil.module:function", "reads": ["a"], "writes": ["a"]},
        ],
    },
    "model": {"name": "evil.module:Model"},
    "scaling": {"address": "203.0.113.7:6379"},
}


def test_code_is_found_wherever_it_is_named():
    assert code_in(VALUES) == {
        "model.name": "evil.module:Model",
        "data.transforms[1].do": "evil.module:function",
        "scaling.address": "203.0.113.7:6379",
    }
    assert code_in({"model": 3, "data": {"transforms": 5}, "scaling": None}) == {}


@pytest.mark.parametrize(
    "address", [None, "auto", "local", "127.0.0.1:6379", "ray://localhost:10001", "[::1]:3"]
)
def test_a_cluster_on_this_machine_is_no_elsewhere(address):
    assert code_in({"scaling": {"address": address}}) == {}


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "127.0.0.1.evil.example:1", "head:6379"])
def test_a_cluster_elsewhere_runs_code(address):
    assert code_in({"scaling": {"address": address}})


@pytest.fixture
def uri(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(VALUES))
    return (tmp_path / "run.yaml").as_uri()


def test_a_config_behind_a_uri_may_not_name_code(uri, tmp_path):
    with pytest.raises(ConfigError) as error:
        load_config(uri)
    message = str(error.value)
    for text in ("model.name: evil.module:Model", "evil.module:function", "203.0.113.7", "--allow-code", uri):
        assert text in message
    assert load_config(uri, allow_code=True).model.name == "evil.module:Model"
    assert load_config(tmp_path / "run.yaml").model.name == "evil.module:Model"  # a file of one's own


def test_overrides_are_the_users_word(uri):
    mine = ["data.transforms=[{do: 'mine:function'}]", "model.name=mine:Model", "scaling.address=auto"]
    assert load_config(uri, mine).model.name == "mine:Model"
    with pytest.raises(ConfigError, match="transforms") as error:
        load_config(uri, mine[1:])
    assert "model.name" not in str(error.value)


def test_a_uri_is_read_through_filesystems(tmp_path):
    (tmp_path / "run.yaml").write_text("data: {train: d/train}")
    assert load_config((tmp_path / "run.yaml").as_uri()).data.train == "d/train"
    with pytest.raises(ConfigError, match="no such config file"):
        load_config((tmp_path / "none.yaml").as_uri())
