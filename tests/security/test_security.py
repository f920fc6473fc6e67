"""Test authentication, listening sockets and the redaction of passwords with real processes."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import parquet
import pytest
import yaml
from heads import PYTHON, RAYTREC, descendant_pids, end_ray, find_free_ports, plain_environment
from waiting import wait_for

from raytrec.cluster.access import check_cluster, use_token
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.redaction import hide_yaml
from raytrec.compat.ray_core import GCS_PROBE_METHOD
from raytrec.config.trust import find_foreign_code

SECRET, KEY = "hunter2-correct-horse", "battery-staple-9"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user without a token."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores the variable
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # keep the settings of this process's Ray
    return tmp_path


def test_token_file_is_private_to_its_owner(home):
    with pytest.raises(RunError, match="the token of the Ray cluster is missing"):
        use_token()
    use_token(create=True)
    file = home / ".ray" / "auth_token"
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert file.stat().st_mode & 0o777 == 0o600 and len(file.read_text()) == 64
    file.chmod(0o644)  # as `ray get-auth-token --generate` leaves it
    before = file.read_text()
    use_token()
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_text() == before


def test_disabled_authentication_creates_no_token(home, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    use_token(create=True)
    assert not (home / ".ray").exists() and os.environ["RAY_AUTH_MODE"] == "disabled"


TOKEN = "5" * 64


@pytest.fixture
def token(monkeypatch):
    """Set a token for this process, independent of the home directory."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    own = (("authorization", f"Bearer {TOKEN}"),)
    monkeypatch.setattr("raytrec.cluster.access.get_token_metadata", lambda: own)  # Ray has read its settings
    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)  # keep 127.0.0.1


class Gcs(grpc.GenericRpcHandler):
    """Server that answers the probe of GCS; it requires the token if `asks` is set."""

    def __init__(self, asks):
        self.asks = asks

    def service(self, call):
        def answer(request, context):
            if self.asks and f"Bearer {TOKEN}" not in dict(context.invocation_metadata()).values():
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer) if call.method == GCS_PROBE_METHOD else None


@pytest.mark.parametrize("asks", [True, False])
def test_cluster_without_a_token_is_rejected(token, asks):
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Gcs(asks)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        if asks:
            return check_cluster(f"127.0.0.1:{port}", "here")
        with pytest.raises(RunError, match="started without a token") as error:
            check_cluster(f"127.0.0.1:{port}", "here")
        assert error.value.where == "here"
        assert "RAY_AUTH_MODE to disabled" in str(error.value)
    finally:
        server.stop(None)


def test_redaction_keeps_yaml_without_secrets():
    for text in ("# mine\na: [1, 2]\n", "a: [", ""):
        assert hide_yaml(text) == text


def test_redacted_password_in_a_config_is_rejected(tmp_path):
    from raytrec.driver import run as driver

    folder = parquet.write_dataset(tmp_path / "data")
    values = parquet.config_values(folder, tmp_path / "run", tracking__uri="http://me:***@127.0.0.1:5000")
    with pytest.raises(ConfigError, match=r"redacted in checkpoints and in MLflow: tracking\.uri"):
        driver.train(values)
    assert not (tmp_path / "run").exists()


def make_stranger_environment(head, kind):
    """Return the environment of a user without a token or with a wrong one."""
    env = plain_environment() | {"HOME": str(head.folder / "away")}
    if kind == "without a token":
        return env | {"RAY_AUTH_MODE": "disabled"}
    wrong = head.folder / "wrong"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    return env | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(wrong)}


def run_as(env, *command):
    """Run a command in the environment of a user."""
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def config(head, place, **changes):
    values = parquet.config_values(head.root / "data" / "tiny", place.parent / "run", **changes)
    place.write_text(yaml.safe_dump(values))
    return str(place)


STRANGERS = pytest.mark.parametrize("kind", ["without a token", "with another token"])


@pytest.mark.cluster
@STRANGERS
@pytest.mark.parametrize("way", ["address", "client"])
def test_train_reports_missing_or_wrong_token_soon(head, tmp_path, kind, way):
    began = time.monotonic()
    address = getattr(head, way)
    words = config(head, tmp_path / "a.yaml"), f"scaling.address={address}"
    done = run_as(make_stranger_environment(head, kind), RAYTREC, "train", *words)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    what = "requires a token" if kind == "without a token" else "refuses the token"
    assert f"error: the cluster {what}" in done.stderr, done.stderr
    assert f"scaling.address={address}" in done.stderr and "RAY_AUTH_TOKEN_PATH" in done.stderr
    assert time.monotonic() - began < 60


@pytest.mark.cluster
def test_only_ray_ports_of_the_own_head_are_trusted(head):
    # Its Ray client server is the last to listen.
    wait_for(lambda: not find_foreign_code({"scaling": {"address": head.client}}), "trust in the head's Ray client")
    assert find_foreign_code({"scaling": {"address": head.address}}) == {}
    dashboard = head.url.removeprefix("http://")
    assert find_foreign_code({"scaling": {"address": dashboard}}) == {"scaling.address": dashboard}


GCS_PROGRAM = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info()))
"""


@pytest.mark.cluster
@STRANGERS
def test_cluster_rejects_requests_without_its_token(head, tmp_path, kind):
    env = make_stranger_environment(head, kind)
    done = run_as(env, PYTHON, "-c", GCS_PROGRAM, head.address)
    assert done.returncode and "AuthenticationError" in done.stderr, done.stderr
    done = head.run(PYTHON, "-c", GCS_PROGRAM, head.address, timeout=60)
    assert done.stdout.strip() == "1", done.stderr
    headers = {} if kind == "without a token" else {"Authorization": f"Bearer {'0' * 64}"}
    job = b'{"entrypoint": "id"}'
    for path, body in (("/api/jobs/", job), ("/api/jobs/", None), ("/nodes", None), ("/api/v0/actors", None)):
        request = urllib.request.Request(head.url + path, data=body, headers=headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == (401 if kind == "without a token" else 403)
    done = run_as(env, RAYTREC, "submit", config(head, tmp_path / "a.yaml"), "--address", head.url)
    assert done.returncode == 1 and "token" in done.stderr and "Traceback" not in done.stderr, done.stderr


def run_and_watch(head, *command):
    """Run a command as a user of the cluster and observe all processes until it ends.

    Returns:
        (output, command lines of the command's and the cluster's processes, addresses beyond loopback on
        which these processes listen).
    """
    import psutil

    commands, beyond = set(), set()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=head.env, **pipes) as process, ThreadPoolExecutor() as pool:
        printed = pool.submit(process.stdout.read)
        while process.poll() is None:
            mine = {process.pid, *descendant_pids(process.pid), *descendant_pids(head.pid)}
            for pid in mine:
                with suppress(OSError):  # it has ended
                    commands.add(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
            listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in mine]
            beyond |= {tuple(c.laddr) for c in listening if not c.laddr.ip.endswith("127.0.0.1")}
            time.sleep(0.2)
    assert process.returncode == 0, printed.result()
    return printed.result(), commands, beyond


@pytest.fixture
def mlflow_server(tmp_path):
    """`mlflow server` on loopback, over one sqlite file; its port."""
    (port,) = find_free_ports(1)
    command = [PYTHON, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts")]
    process = subprocess.Popen(command, env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"})
    try:
        wait_for(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), "the server's port", 90)
        yield port
    finally:
        end_ray(process)


def find_files_with_secret(folder, secret):
    """Return the files below a folder that contain a secret."""
    return {
        str(path.relative_to(folder))
        for path in Path(folder).rglob("*")
        if path.is_file() and not path.is_symlink() and secret.encode() in path.read_bytes()
    }


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_passwords_appear_only_in_the_private_config(head, tmp_path, mlflow_server):
    uri = f"http://me:{SECRET}@127.0.0.1:{mlflow_server}"
    tags = {"api_key": KEY, "team": "ads"}
    place = config(head, tmp_path / "a.yaml", tracking__uri=uri, tracking__tags=tags, tracking__report=True)
    printed, commands, beyond = run_and_watch(head, RAYTREC, "train", place, f"scaling.address={head.address}")
    run = tmp_path / "run"
    assert json.loads((run / "result.json").read_text())["mlflow_run_id"], "the record went to the server"
    for secret in (SECRET, KEY):
        assert secret not in printed
        assert not [command for command in commands if secret in command]
        assert find_files_with_secret(run, secret) == {"config.yaml"}
        # MLflow's database and artifacts must not contain the secret.
        assert find_files_with_secret(tmp_path, secret) == {"a.yaml", "run/config.yaml"}
        assert not find_files_with_secret(head.folder, secret), "Ray's logs"
    assert (run / "config.yaml").stat().st_mode & 0o777 == 0o600
    artifacts = [path.read_text() for path in (tmp_path / "artifacts").rglob("config.yaml")]
    assert len(artifacts) == 1 and "http://me:***@127.0.0.1" in artifacts[0]
    assert not beyond, "loopback only"
    assert any("ray::" in command for command in commands), "workers must be among the observed processes"

    again = head.run(RAYTREC, "train", "--warm-start", str(run), f"run.dir={tmp_path}/next")
    assert again.returncode == 1 and "redacted in checkpoints and in MLflow: tracking.uri, tr" in again.stderr


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_passwords_of_a_job_are_redacted(head, tmp_path):
    """The job fails because it cannot open its checkpoint folder."""
    values = parquet.config_values("data/tiny", "runs/secret")
    values["checkpoint"] = {"dir": f"s3://AKIA:{SECRET}@bucket/x?endpoint_override=127.0.0.1:9&scheme=http"}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(values))
    done = head.run(RAYTREC, "submit", str(tmp_path / "a.yaml"), "--address", head.url)
    assert done.returncode == 1, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr and "AKIA:***@bucket" in done.stdout + done.stderr
    request = urllib.request.Request(f"{head.url}/api/jobs/")
    request.add_header("Authorization", f"Bearer {head.token.read_text()}")
    jobs = urllib.request.urlopen(request, timeout=30).read().decode()
    assert "secret" not in jobs.replace("runs/secret", "") and SECRET not in jobs
    kept = {path for path in find_files_with_secret(head.folder, SECRET) if not path.endswith((".yaml", ".zip"))}
    assert not kept
