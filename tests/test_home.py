"""A home that cannot be written to, or that is not there: containers, service users, read-only mounts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import parquet
import pytest
import yaml

from raytrec.cluster.access import AUTH_MODE_VARIABLE, TOKEN, TOKEN_PATH_VARIABLE, token_file, use_token
from raytrec.cluster.session import get_interface_variables
from raytrec.common.errors import RunError

# Where no user can write, not even root; a home that is a file; a user in no list, who has none.
HOMES = ["/proc/none", "/dev/null", None]


@pytest.fixture(params=HOMES)
def home(request, monkeypatch):
    for name in (TOKEN, TOKEN_PATH_VARIABLE, AUTH_MODE_VARIABLE, "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", request.param or "")
    if request.param is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    yield request.param
    for name in (TOKEN, AUTH_MODE_VARIABLE):  # which use_token has set
        os.environ.pop(name, None)


def test_a_local_cluster_keeps_its_token_in_the_environment(home):
    use_token(create=True, own=True)
    token = os.environ[TOKEN]
    assert len(token) == 64 and os.environ[AUTH_MODE_VARIABLE] == "token"
    use_token(create=True, own=True)
    assert os.environ[TOKEN] == token


def test_a_cluster_for_others_says_where_to_keep_it(home, tmp_path, monkeypatch):
    with pytest.raises(RunError, match="cannot store the token") as error:
        use_token(create=True)
    assert TOKEN_PATH_VARIABLE in error.value.do and TOKEN not in os.environ
    monkeypatch.setenv(TOKEN_PATH_VARIABLE, str(tmp_path / "token"))
    use_token(create=True)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_joining_without_a_token_is_one_error(home):
    with pytest.raises(RunError, match="no token"):
        use_token()


def test_ray_train_can_be_imported(home):
    """Which looks for a folder in the home; so there is the name of one."""
    use_token(create=True, own=True)
    assert os.path.isabs(os.path.expanduser("~")) and Path.home().is_absolute()


def test_nothing_else_needs_a_home(home):
    assert get_interface_variables("lo")["GLOO_SOCKET_IFNAME"] == "lo"
    assert str(token_file()).endswith(".ray/auth_token")


@pytest.mark.survive
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is read-only")
def test_a_run_without_a_home(tmp_path):
    folder = parquet.dataset(tmp_path / "d", train=300, valid=50, test=50)
    values = parquet.settings(folder, tmp_path / "run", scaling__num_workers=1, tracking__report=True)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    hidden = (TOKEN, TOKEN_PATH_VARIABLE, AUTH_MODE_VARIABLE, "XDG_CONFIG_HOME", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}

    def raytrec(*words):
        done = subprocess.run(
            [Path(sys.executable).with_name("raytrec"), *words, "--json"],
            env=environment | {"HOME": "/proc/none"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return json.loads(done.stdout)

    trained = raytrec("train", str(tmp_path / "run.yaml"))
    assert raytrec("evaluate", str(tmp_path / "run"))["eval.auc"] == pytest.approx(trained["eval.auc"])
