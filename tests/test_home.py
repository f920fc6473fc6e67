"""Tests with a missing or read-only home directory, as in containers and for service users."""

import json
import os
import subprocess
import sys
from pathlib import Path

import parquet
import pytest
import yaml
from heads import RAYTREC

from raytrec.cluster.access import AUTH_MODE_VARIABLE, TOKEN, TOKEN_PATH_VARIABLE, token_file, use_token
from raytrec.cluster.session import get_interface_variables
from raytrec.common.errors import RunError

# A folder that no process can write to, a file, and (None) a user without a passwd entry.
UNUSABLE_HOMES = ["/proc/none", "/dev/null", None]


@pytest.fixture(params=UNUSABLE_HOMES)
def unusable_home(request, monkeypatch):
    for name in (TOKEN, TOKEN_PATH_VARIABLE, AUTH_MODE_VARIABLE, "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", request.param or "")
    if request.param is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    yield request.param
    for name in (TOKEN, AUTH_MODE_VARIABLE):  # set by use_token
        os.environ.pop(name, None)


def test_local_cluster_stores_token_and_absolute_home_in_environment(unusable_home):
    """Importing ray.train resolves a folder below the home directory, so its path must be absolute."""
    use_token(create=True, is_local_only=True)
    assert os.path.isabs(os.path.expanduser("~")) and Path.home().is_absolute()
    token = os.environ[TOKEN]
    assert len(token) == 64 and os.environ[AUTH_MODE_VARIABLE] == "token"
    use_token(create=True, is_local_only=True)
    assert os.environ[TOKEN] == token


def test_shared_cluster_error_names_token_path_variable(unusable_home, tmp_path, monkeypatch):
    with pytest.raises(RunError, match="cannot create or read the token") as error:
        use_token(create=True)
    assert TOKEN_PATH_VARIABLE in error.value.do and TOKEN not in os.environ
    monkeypatch.setenv(TOKEN_PATH_VARIABLE, str(tmp_path / "token"))
    use_token(create=True)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_relative_token_path_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setenv(AUTH_MODE_VARIABLE, "token")
    monkeypatch.setenv(TOKEN_PATH_VARIABLE, "token")
    use_token(create=True)
    assert os.environ[TOKEN_PATH_VARIABLE] == str(tmp_path / "token") and (tmp_path / "token").is_file()


def test_joining_without_token_raises_run_error(unusable_home):
    with pytest.raises(RunError, match="no token"):
        use_token()


def test_nccl_file_need_not_be_utf_8(tmp_path, monkeypatch):
    (tmp_path / "nccl.conf").write_bytes(b"# \xe9\nNCCL_SOCKET_IFNAME=eth0\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    assert get_interface_variables("lo") == {"GLOO_SOCKET_IFNAME": "lo"}


def test_network_settings_need_no_home(unusable_home):
    assert get_interface_variables("lo")["GLOO_SOCKET_IFNAME"] == "lo"
    assert str(token_file()).endswith(".ray/auth_token")


@pytest.mark.survive
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is read-only")
def test_run_trains_and_evaluates_without_usable_home(tmp_path):
    folder = parquet.write_dataset(tmp_path / "d", train=300, valid=50, test=50)
    values = parquet.config_values(folder, tmp_path / "run", scaling__num_workers=1, tracking__report=True)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    hidden = (TOKEN, TOKEN_PATH_VARIABLE, AUTH_MODE_VARIABLE, "XDG_CONFIG_HOME", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}

    def raytrec(*words):
        command = [RAYTREC, *words, "--json"]
        env = environment | {"HOME": "/proc/none"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return json.loads(done.stdout)

    trained = raytrec("train", str(tmp_path / "run.yaml"))
    assert raytrec("evaluate", str(tmp_path / "run"))["eval.auc"] == pytest.approx(trained["eval.auc"])
