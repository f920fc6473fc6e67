"""Servers named by another user's configuration receive no connection and no credentials."""

import json
import os
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import parquet
import pytest
import yaml
from checkpoints import write_index_only
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from raytrec.common.errors import ConfigError, RunError
from raytrec.common.storage import chooses_server
from raytrec.config.run_config import load_config
from raytrec.config.trust import find_foreign_code, mark_as_own
from raytrec.driver import evaluation
from raytrec.driver import run as driver
from raytrec.driver.evaluation import load_evaluation_config
from raytrec.driver.prepare import load_checkpoint_config, write_config
from raytrec.driver.resume import resume_config

URIS = {
    "gs": "gs://b/x?endpoint_override=127.0.0.1:{port}&scheme=http&retry_limit_seconds=1",
    "s3": "s3://b/x?endpoint_override=127.0.0.1:{port}&scheme=http&region=eu",
    "abfs": "abfs://b@me.dfs.core.windows.net/x?enable_tls=false&credential_kind=anonymous"
    "&blob_storage_authority=127.0.0.1:{port}&dfs_storage_authority=127.0.0.1:{port}",
}


REFUSED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Listener(socketserver.ThreadingTCPServer):
    """A loopback server that refuses all requests and stores the received bytes."""

    daemon_threads = True

    def __init__(self):
        self.received = []
        super().__init__(("127.0.0.1", 0), None)
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request, client_address):
        self.received.append(request.recv(1 << 16))
        request.sendall(REFUSED)


@pytest.fixture
def listener():
    with Listener() as listener:
        yield listener
        listener.shutdown()


@pytest.fixture
def account(tmp_path, monkeypatch):
    """Set up credentials for three clouds and a home directory without trust marks."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    about = {"type": "service_account", "client_email": "me@example.com", "private_key_id": "1"}
    (tmp_path / "gcloud.json").write_text(json.dumps(about | {"private_key": key.decode()}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "gcloud.json"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.fixture(params=URIS)
def uri(request, listener):
    return URIS[request.param].format(port=listener.port)


def values(tmp_path, uri, key):
    config = parquet.config_values(tmp_path / "none", tmp_path / "run")
    section, name = key.split(".")
    return config | {section: config.get(section, {}) | {name: uri}}


def foreign_run(tmp_path, uri, key):
    """Create the folder of an interrupted run of another user."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder, load_config(values(tmp_path, uri, key)))
    (folder / "config.yaml.mark").unlink()
    (folder / "driver.json").write_text("{}")
    return folder


def write_checkpoint(root, config):
    return write_index_only(root, 1, config=config, schema=parquet.SCHEMA_YAML)


def train_own_config(at, run, **how):
    driver.train(parquet.config_values(at / "none", at / run), **how)


def write_config_file(at, uri):
    (at / "a.yaml").write_text(yaml.safe_dump(values(at, uri, "data.train")))
    return (at / "a.yaml").as_uri()


ENTRY_POINTS = {
    "evaluate a checkpoint": lambda at, uri: evaluation.evaluate(
        write_checkpoint(at / "run/checkpoints", values(at, uri, "data.test"))
    ),
    "evaluate a run": lambda at, uri: evaluation.evaluate(foreign_run(at, uri, "checkpoint.dir")),
    "resume": lambda at, uri: driver.train(None, resume=foreign_run(at, uri, "data.train")),
    "resume with own config": lambda at, uri: train_own_config(
        at, "run", resume=foreign_run(at, uri, "checkpoint.dir")
    ),
    "train from a URI": lambda at, uri: driver.train(write_config_file(at, uri)),
    "train a copied run": lambda at, uri: driver.train(foreign_run(at, uri, "data.schema") / "config.yaml"),
    "start from a run": lambda at, uri: train_own_config(at, "new", start_from=foreign_run(at, uri, "checkpoint.dir")),
}


@pytest.mark.parametrize("way", ENTRY_POINTS)
def test_servers_of_foreign_configs_receive_no_request(way, uri, tmp_path, account, listener):
    expected = r"servers to (?:trust|contact)|a server that|names a server"
    with pytest.raises((ConfigError, RunError), match=expected) as error:
        ENTRY_POINTS[way](tmp_path, uri)
    assert uri.partition("?")[0] in str(error.value)
    assert listener.received == []


def test_servers_of_own_configs_receive_requests(uri, tmp_path, account, listener):
    with pytest.raises(Exception, match=r"b/x|127\.0\.0\.1"):
        driver.train(values(tmp_path, uri, "data.train"))
    sent = b"".join(listener.received).lower()
    # Otherwise the tests above check nothing.
    assert sent and (b"authorization: " in sent) == (not uri.startswith("abfs"))


VOCABULARY = {"do": "lookup_vocabulary", "vocabulary": "X"}
URI_KEYS = [
    ("data", {"train": ["d", "X"]}, "data.train[1]"),
    ("data", {"valid": "X"}, "data.valid"),
    ("data", {"schema": "X"}, "data.schema"),
    ("data", {"transforms": [VOCABULARY]}, "data.transforms[0].vocabulary"),
    ("eval", {"retrieval": {"items": "X"}}, "eval.retrieval.items"),
    ("warm_start", {"from": "X"}, "warm_start.from"),
    ("checkpoint", {"dir": "X"}, "checkpoint.dir"),
]


@pytest.mark.parametrize(("section", "names", "key"), URI_KEYS)
def test_trust_check_covers_all_uri_keys(section, names, key):
    uri = "s3://b?endpoint_override=h"
    for text in (uri, "!!binary czM6Ly9iP2VuZHBvaW50X292ZXJyaWRlPWg="):
        assert find_foreign_code(yaml.safe_load(yaml.safe_dump({section: names}).replace("X", text))) == {key: uri}


def test_only_uris_with_a_custom_server_need_trust():
    own = ["runs/a?endpoint_override=x", "file:///home/me/a b?c#d", "s3://bucket/a/b=c"]
    own += ["s3://key:secret@bucket/a?region=eu-north-1", "gs://anonymous@bucket", "abfs://account@box/a"]
    own += ["abfs://box@account.dfs.core.windows.net/a", "abfss://account.blob.core.windows.net/box/a"]
    assert [place for place in own if chooses_server(place)] == []
    other = ["s3://bucket/a?scheme=http", "s3://bucket/a?region=eu&endpoint_override=host", "S3://bucket/a"]
    other += ["s3://bucket?tls_ca_file_path=/x", "s3://bucket?region=eu.example/", "gs://bu%63ket/a"]
    other += ["gs://bucket/a?endpoint%5Foverride=host", "abfs://account@storage.example:443/box/a"]
    other += ["abfs://box@account.dfs.core.windows.net.example/a", "abfs://evil%2Fx@box/a"]
    other += ["abfs://box@account.dfs.core.windows.net/a?blob_storage_authority=host", "file://host/a"]
    other += ["hdfs://namenode:8020/a", "fsspec+http://host/a", "hf://datasets/a"]
    assert [place for place in other if not chooses_server(place)] == []


def test_override_replaces_a_foreign_uri(tmp_path, account):
    theirs, mine = write_config_file(tmp_path, URIS["s3"].format(port=9)), "s3://mine/x?endpoint_override=mine:9000"
    assert load_config(theirs, [f"data.train={mine}"]).data.train == mine


def test_checkpoint_inherits_trust_of_own_run(tmp_path, account):
    uri = URIS["s3"].format(port=9)
    run, config = tmp_path / "run", values(tmp_path, uri, "data.test") | {"model": {"name": "mine:Model"}}
    folder = write_checkpoint(run / "checkpoints", config)
    about = {"config": config, "schema": parquet.SCHEMA_YAML}
    write_config(run, load_config(config))
    assert load_evaluation_config(about, folder, [], allow_code=False)[0].data.test == uri
    assert load_checkpoint_config(run, ["data.train=d"])[0].model.name == "mine:Model"
    about["config"] = config | {"model": {"name": "theirs:Model"}}
    with pytest.raises(ConfigError, match=r"model\.name: theirs:Model"):
        load_evaluation_config(about, folder, [], allow_code=False)
    (run / "config.yaml.mark").unlink()
    with pytest.raises(ConfigError, match=r"data\.test: s3.*model\.name|model\.name.*data\.test: s3"):
        load_checkpoint_config(run, ["data.train=d"])


def test_warm_start_from_a_given_uri_is_trusted(tmp_path, account):
    config = parquet.config_values(tmp_path / "none", tmp_path / "run")
    uri = Path(write_checkpoint(tmp_path, config)).as_uri()
    assert load_checkpoint_config(uri, ["data.train=d"])[0].warm_start.from_ == uri


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_local_listener_without_ray_receives_no_token(scheme, host, tmp_path, account, listener, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    run = foreign_run(tmp_path, f"{scheme}{host}:{listener.port}", "scaling.address")
    parquet.write_dataset(tmp_path / "none")
    for way in (
        lambda: driver.train(None, resume=run),
        lambda: driver.train(run / "config.yaml"),
        lambda: driver.train((run / "config.yaml").as_uri()),
    ):
        with pytest.raises(ConfigError, match=r"scaling\.address"):
            way()
    assert listener.received == []


OTHER_USER_SERVER = """
import os, socket
os.setuid(65534)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
listener.accept()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
def test_local_server_of_another_user_is_not_trusted(account, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    other = subprocess.Popen([sys.executable, "-c", OTHER_USER_SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert find_foreign_code({"tracking": {"uri": f"http://127.0.0.1:{int(other.stdout.readline())}"}})
    finally:
        other.kill()
        other.wait()


def test_local_mlflow_receives_passwords_only_from_its_owner(tmp_path, account, listener, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    here = f"http://127.0.0.1:{listener.port}"
    assert find_foreign_code({"tracking": {"uri": here}}) == {}, "the server belongs to this user"
    for uri in ("http://127.0.0.1:1", "HTTP://evil:5000", " http://evil:5000", b"http://evil:5000"):
        assert "tracking.uri" in find_foreign_code({"tracking": {"uri": uri}})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:pass@mine")
    assert find_foreign_code({"tracking": {"uri": "https://mine"}}) == {}
    assert find_foreign_code({"tracking": {"uri": "http://mine"}}), "http is unencrypted"
    assert listener.received == []


def test_best_config_of_foreign_search_cannot_name_code(tmp_path, account):
    folder = tmp_path / "search"
    (folder / "base").mkdir(parents=True)
    (folder / "search.json").write_text("{}")
    config = parquet.config_values(tmp_path / "none", tmp_path / "run")
    config["model"] = {"name": "theirs_search:Model"}
    for file in (folder / "best.yaml", folder / "base/config.yaml"):
        file.write_text(yaml.safe_dump(config))
        with pytest.raises(ConfigError, match=r"model\.name: theirs_search:Model"):
            driver.train(file)
        assert "theirs_search" not in sys.modules
        assert load_config(file, allow_code=True).model.name == "theirs_search:Model"
        mark_as_own(file)
        assert load_config(file).model.name == "theirs_search:Model"
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(config))
    assert load_config(tmp_path / "best.yaml").model.name == "theirs_search:Model", "the user's own copy"


def test_resume_with_own_config_cannot_change_checkpoint_dir(tmp_path, account):
    run = foreign_run(tmp_path, URIS["s3"].format(port=9), "checkpoint.dir")
    mine = values(tmp_path, "s3://mine/x?endpoint_override=storage.mine:9000", "checkpoint.dir")
    with pytest.raises(ConfigError, match="cannot be changed on resume"):
        resume_config(run, mine, [])
