"""Configurations of other users cannot name code unless the user allows it."""

import sys

import pytest
import yaml

from raytrec.common.errors import ConfigError
from raytrec.config.run_config import load_config
from raytrec.config.trust import CONFIG, MARK, find_foreign_code, is_own_file, mark_as_own
from raytrec.driver import run as driver
from raytrec.driver.prepare import resolve, write_config
from raytrec.driver.resume import find_interrupted_run, resume_config

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


def test_foreign_code_is_found_in_all_keys():
    assert find_foreign_code(VALUES) == {
        "model.name": "evil.module:Model",
        "data.transforms[1].do": "evil.module:function",
        "scaling.address": "203.0.113.7:6379",
    }
    assert find_foreign_code({"model": 3, "data": {"transforms": 5}, "scaling": None}) == {}


def test_only_remote_cluster_addresses_need_trust():
    elsewhere = ["ray://10.0.0.1:10001", "127.0.0.1.evil.example:1", "head:6379", "127.0.0.1:1"]
    elsewhere += ["ray://localhost:1", "[::1]:1", "ray://127.0.0.1", "127.0.0.1:x"]
    for address in (None, "auto", "local", *elsewhere):
        assert bool(find_foreign_code({"scaling": {"address": address}})) == (address in elsewhere), address


@pytest.fixture
def uri(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(VALUES))
    return (tmp_path / "run.yaml").as_uri()


def test_config_from_uri_cannot_name_code(uri, tmp_path):
    with pytest.raises(ConfigError) as error:
        load_config(uri)
    message = str(error.value)
    for text in ("model.name: evil.module:Model", "evil.module:function", "203.0.113.7", "--allow-code", uri):
        assert text in message
    assert load_config(uri, allow_code=True).model.name == "evil.module:Model"
    assert load_config(tmp_path / "run.yaml").model.name == "evil.module:Model"  # the user's own file


def test_overrides_are_trusted(uri):
    mine = ["data.transforms=[{do: 'mine:function'}]", "model.name=mine:Model", "scaling.address=auto"]
    assert load_config(uri, mine).model.name == "mine:Model"
    with pytest.raises(ConfigError, match="transforms") as error:
        load_config(uri, mine[1:])
    assert "model.name" not in str(error.value)


def test_missing_config_at_a_uri_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="config file does not exist"):
        load_config((tmp_path / "none.yaml").as_uri())


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path / "home"


@pytest.fixture
def run(tmp_path, home):
    """Create the folder of an interrupted run that is marked as this user's."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder, load_config(VALUES, ["run.name=run", f"run.dir={folder}"]))
    (folder / "driver.json").write_text("{}")
    return folder


def test_trust_key_must_be_private(run, home):
    key = home / ".config/raytrec/key"
    assert key.stat().st_mode & 0o777 == 0o600 and is_own_file(run / CONFIG)
    key.chmod(0o644)
    assert not is_own_file(run / CONFIG), "other users can read the key"
    key.chmod(0o600)
    key.rename(home / "elsewhere")
    assert not is_own_file(run / CONFIG), "the key is missing"
    key.symlink_to(home / "elsewhere")
    assert not is_own_file(run / CONFIG)


def test_own_run_resumes_after_it_is_moved(run, tmp_path):
    assert resume_config(run, None, []).model.name == "evil.module:Model"
    run.rename(tmp_path / "moved")
    assert resume_config(tmp_path / "moved", None, []).scaling.address == "203.0.113.7:6379"
    assert load_config(tmp_path / "moved/config.yaml").model.name == "evil.module:Model"


def _unmark(run, home):
    (run / (CONFIG + MARK)).unlink()


def _edit(run, home):
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("evil", "worse"))


def _change_user(run, home):
    (home / ".config/raytrec/key").unlink()
    mark_as_own(run.parent / "nothing" / CONFIG)  # has no effect
    (run.parent / "other").mkdir()
    (run.parent / "other/config.yaml").write_text("{}")
    mark_as_own(run.parent / "other" / CONFIG)  # creates another key


@pytest.mark.parametrize("strange", [_unmark, _edit, _change_user])
def test_foreign_run_cannot_name_code_or_a_cluster(run, home, strange):
    strange(run, home)
    with pytest.raises(ConfigError) as error:
        resume_config(run, None, ["scaling.num_workers=1"])
    for text in (".module:Model", ".module:function", "203.0.113.7", "--allow-code", str(run)):
        assert text in str(error.value)
    assert resume_config(run, None, [], allow_code=True).scaling.address == "203.0.113.7:6379"
    with pytest.raises(ConfigError, match="names code"):
        load_config(run / "config.yaml")  # `raytrec train`, `check`, `plan` RUN/config.yaml


def test_foreign_run_causes_no_import_and_no_connection(run, home, monkeypatch):
    """`raytrec train --resume` fails before it imports a module, connects or reads a token."""
    _unmark(run, home)
    seen, listening = [], True

    def hook(event, arguments):  # an audit hook cannot be removed
        if listening and event in ("import", "socket.connect", "open"):
            seen.append(f"{event} {arguments[0]}")

    sys.addaudithook(hook)
    with pytest.raises(ConfigError, match="names code"):
        driver.train(None, resume=run)
    listening = False
    assert [each for each in seen if "evil" in each or "auth_token" in each or "connect" in each] == []
    assert any("config.yaml" in each for each in seen), "the audit hook records nothing"


def test_foreign_run_without_code_resumes(run, home):
    values = {"data": {"train": "d/train"}}
    write_config(run, load_config(values, ["run.name=run", f"run.dir={run}"]))
    _unmark(run, home)
    assert resume_config(run, None, []).run.dir == str(run)


def test_foreign_mlflow_uri_receives_no_password(run, home, monkeypatch):
    config = load_config({"data": {"train": "d/train"}}, [f"run.dir={run}", "tracking.uri=http://evil:5000"])
    write_config(run, config)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    assert resume_config(run, None, []).tracking.uri == "http://evil:5000", "the user's own run"
    _unmark(run, home)
    with pytest.raises(ConfigError, match=r"tracking\.uri: http://evil:5000"):
        resume_config(run, None, [])
    assert resume_config(run, None, ["tracking.uri=http://mine"]).tracking.uri == "http://mine"
    mine = {"data": {"train": "d/train"}}
    assert resume_config(run, mine, []).tracking.uri is None, "the user's configuration applies"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:pass@evil:5000")
    assert resume_config(run, None, []).tracking.uri == "http://evil:5000"
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert resume_config(run, None, []).tracking.uri == "http://evil:5000", "no credentials would be sent"


@pytest.mark.parametrize("home_is", ["/dev/null/none", "/proc/none"])
def test_missing_home_leaves_config_unmarked(run, monkeypatch, home_is):
    monkeypatch.setenv("HOME", home_is)
    write_config(run, load_config(VALUES, [f"run.dir={run}"]))
    assert not is_own_file(run / CONFIG)


def test_resume_latest_skips_damaged_runs(tmp_path):
    config = resolve(load_config({"data": {"train": "d/train"}}, [f"run.root={tmp_path}"]), "job.yaml")
    texts = {"20260101-000001": config.to_yaml(), "20260101-000002": "{a: [", "3": "data: 3"}
    for name, text in texts.items():
        folder = tmp_path / "runs" / f"job-{name}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(text)
    assert find_interrupted_run(config, is_user_named=False).name == "job-20260101-000001"
