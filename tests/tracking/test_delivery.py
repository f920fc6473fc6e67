"""Delivery of a run folder to a real sqlite store, and to servers that refuse."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Barrier, Thread
from time import perf_counter, sleep, time
from uuid import uuid4

import pytest
import tracked
from tracked import add_compared_line, mlflow_client

from raytrec.common.errors import ConfigError
from raytrec.common.messages import METRICS
from raytrec.compat.mlflow_ import is_transient, is_unreachable
from raytrec.tracking.delivery import Delivery
from raytrec.tracking.mlflow_records import RecordReader, collect_run_tags
from raytrec.tracking.store import KEY, PARENT_NAME_TAG, Store


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory):
    """Return a folder for one store that all tests share, because creating its tables takes seconds."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def make_delivery(store_folder, request, tmp_path):
    """Return a function that creates a delivery of the run folder and the list of its messages."""

    def make(**values):
        said = []
        values = {"tracking": {"uri": f"sqlite:///{store_folder}/new/mlflow.db"}, **values}
        values["tracking"]["experiment"] = request.node.name
        return Delivery(tmp_path, tracked.write_tracked_config(tmp_path, values), said.append), said

    return make


def read_steps(delivery, name="loss"):
    return [step for step, _, _ in tracked.metric_history(delivery.uri, delivery.run_id, name)]


@pytest.mark.slow
def test_delivery_writes_the_whole_run_folder_to_the_store(make_delivery, tmp_path):
    plan = {"tables": {"item*": {"sharding_type": "row_wise"}, "user": {"ranks": [0]}}}
    delivery, said = make_delivery(plan=plan, warm_start={"from": "http://me:secret@host:5000/run"})
    assert not (tmp_path / "mlflow.json").exists()
    assert delivery.deliver() and delivery.run_id
    (tmp_path / "tags.json").write_text(json.dumps({"cluster.nodes": "3", "team": "search", "api_key": "abc"}))
    for step in range(50):
        add_compared_line(tmp_path, {"loss": 1 / (step + 1), "auc": None, "ne": float("nan")}, step, unix_s=1e9 + step)
    add_compared_line(tmp_path, {"table/item*/rows": 3, **{f"many/{i}": i for i in range(2500)}}, 7)
    (tmp_path / "plan.json").write_text("first")
    assert delivery.deliver()
    (tmp_path / "plan.json").write_text("second")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/curves.svg").write_text("drawn")
    assert delivery.finish("FINISHED", 60) is None
    assert said == []

    run = mlflow_client(delivery.uri).get_run(delivery.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["optim.embeddings.name"] == "rowwise_adagrad"
    assert run.data.params["warm_start.from"] == "http://me:***@host:5000/run"
    assert "'item*': {'sharding_type': 'row_wise'" in run.data.params["plan.tables"]
    tags = run.data.tags
    assert (tags["cluster.nodes"], tags["team"], tags["api_key"]) == ("3", "search", "***")
    many = {f"many/{i}": float(i) for i in range(2500)}
    assert run.data.metrics == {"loss": 1 / 50, "table/item_/rows": 3.0, **many}
    wanted = [(step, 1 / (step + 1), (10**9 + step) * 1000) for step in range(50)]
    assert tracked.metric_history(delivery.uri, delivery.run_id, "loss") == wanted
    kept = tmp_path.parent / "mlartifacts" / delivery.run_id / "artifacts"
    found = sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file())
    assert found == ["config.yaml", "pictures/curves.svg", "plan.json"]
    assert (kept / "plan.json").read_text() == "second"


def test_delivery_counts_rejected_records_and_keeps_the_rest(make_delivery, tmp_path):
    delivery, said = make_delivery(run={"seed": 1})
    add_compared_line(tmp_path, {"loss": 1.0}, 1)
    add_compared_line(tmp_path, {"../loss": 1.0}, 1)  # an invalid MLflow metric name
    add_compared_line(tmp_path, {"loss": 2.0}, 2)
    lost = delivery.finish("FAILED", 60)
    assert lost.startswith("MLflow lacks 1 record (") and "../loss" in lost
    assert said == [], "a permanent error was reported as an outage"
    again, _ = make_delivery(run={"seed": 2})  # MLflow does not change an existing param
    assert again.finish("FAILED", 60) is None, "rejected records were written again"
    stored = mlflow_client(delivery.uri).get_run(delivery.run_id)
    assert again.run_id == delivery.run_id
    assert (stored.info.status, stored.data.params["run.seed"]) == ("FAILED", "1")
    assert [value for _, value, _ in tracked.metric_history(delivery.uri, delivery.run_id, "loss")] == [1.0, 2.0]


@pytest.mark.slow
def test_delivery_resumes_a_run_or_recreates_a_deleted_one(make_delivery, tmp_path):
    delivery, _ = make_delivery()
    add_compared_line(tmp_path, {"loss": 1.0}, 1)
    delivery.finish("FAILED", 60)
    before = delivery.run_id
    again, _ = make_delivery()
    again.deliver()
    assert again.run_id == before and mlflow_client(again.uri).get_run(before).info.status == "RUNNING"
    add_compared_line(tmp_path, {"loss": 0.5}, 2)
    again.finish("FINISHED", 60)
    assert read_steps(again) == [1, 2]

    mlflow_client(again.uri).delete_run(before)
    other, _ = make_delivery()
    assert other.finish("FINISHED", 60) is None
    assert other.run_id not in (None, before)
    assert read_steps(other) == [1, 2]


def test_run_is_created_once_if_the_response_is_lost(store_folder):
    config = tracked.write_tracked_config(
        store_folder, {"tracking": {"uri": f"sqlite:///{store_folder}/new/mlflow.db"}}
    )
    store = Store(config, store_folder, "a key")
    store.open()
    made, store.run_id = store.run_id, None
    store.open()
    assert store.run_id == made
    of_a_driver_that_died = Store(config, store_folder, "a key")
    of_a_driver_that_died.open()
    assert of_a_driver_that_died.run_id == made
    assert store._client.get_run(made).data.tags[KEY] == "a key"


class RacingParentStore(Store):
    """Store that creates a parent after all stores have found none; the first call takes longest."""

    gate = Barrier(4, timeout=30)

    def _create(self, name, tag, value):
        if tag != PARENT_NAME_TAG:
            return super()._create(name, tag, value)
        turn = self.gate.wait()
        began_ms = int(time() * 1000) - 100 * turn
        sleep(0.15 * turn)
        self._client.create_run = partial(self._client.create_run, start_time=began_ms)
        return super()._create(name, tag, value)


@pytest.mark.slow
def test_concurrent_runs_share_one_parent(store_folder):
    def open_store(kind, parent):
        tracking = {"uri": f"sqlite:///{store_folder}/new/mlflow.db", "experiment": "sweep", "parent_run": parent}
        store = kind(tracked.write_tracked_config(store_folder, {"tracking": tracking}), store_folder, uuid4().hex)
        store.open()
        return store

    def parents(name):
        runs = stores[0]._client.search_runs([stores[0]._experiment_id])
        return [run.info.run_id for run in runs if run.info.run_name == name]

    def parent_of(store):
        return store._client.get_run(store.run_id).data.tags["mlflow.parentRunId"]

    stores = [open_store(RacingParentStore, "it's a grid") for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(2):  # at the beginning of each run and at its end
            list(threads.map(lambda store: store.join_parent(), stores))
    assert [parent_of(store) for store in stores] == parents("it's a grid") * 4
    later, other = open_store(Store, "it's a grid"), open_store(Store, "another")
    later.join_parent()
    other.join_parent()
    assert parent_of(later) == parent_of(stores[0])
    assert [parent_of(other)] == parents("another") != parents("it's a grid")

    tags = {PARENT_NAME_TAG: "another"}  # from a process that began first and took very long
    first = other._client.create_run(other._experiment_id, start_time=1000, run_name="another", tags=tags)
    other.join_parent()
    assert [parent_of(other)] == parents("another") == [first.info.run_id]


def test_reader_merges_records_up_to_the_call_limit(tmp_path):
    for step in range(6):
        add_compared_line(tmp_path, {f"m{i}": 1.0 for i in range(300)}, step)
    feed = RecordReader(tmp_path)

    def steps():
        return [record.step for record in feed.next_batch().records]

    assert steps() == steps() == [0, 1, 2, 3], "four records reach the limit of 1,000 metrics per call"
    feed.mark_batch_written()
    assert steps() == [4, 5] and (feed.dropped, feed.waiting) == (0, 2)
    feed.mark_batch_written()
    assert feed.next_batch() is None


@pytest.mark.parametrize("wrong", ["folder", "content", "not a file", "port"])
def test_invalid_store_is_refused_quickly_without_secrets(tmp_path, wrong):
    (tmp_path / "file").write_text("no database" * 1000)
    uri = {
        "folder": f"sqlite:///{tmp_path}/file/mlflow.db",
        "content": f"sqlite:///{tmp_path}/file",
        "not a file": f"sqlite:///{tmp_path}",
        "port": "http://me:secret@127.0.0.1:port",
    }[wrong]
    began = perf_counter()
    delivery = Delivery(tmp_path, tracked.write_tracked_config(tmp_path, {"tracking": {"uri": uri}}), print)
    with pytest.raises(ConfigError, match="cannot open the MLflow store") as error:
        delivery.deliver()
    assert "secret" not in str(error.value)
    assert perf_counter() - began < 60, "the error took too long; MLflow alone retries for 100 s"


@pytest.mark.slow
def test_deleted_experiment_error_names_the_restore_command(store_folder, tmp_path):
    said = []
    uri = f"sqlite:///{store_folder}/new/mlflow.db"
    config = tracked.write_tracked_config(tmp_path, {"tracking": {"uri": uri, "experiment": "it's gone"}})
    Delivery(tmp_path, config, print).finish("FINISHED", 60)
    experiment = mlflow_client(uri).get_experiment_by_name("it's gone").experiment_id
    mlflow_client(uri).delete_experiment(experiment)
    (tmp_path / "mlflow.json").unlink()
    with pytest.raises(ConfigError, match="the experiment it's gone has been deleted") as error:
        Delivery(tmp_path, config, print).deliver()
    assert error.value.where == uri and "tracking.uri" not in error.value.do
    assert f"mlflow experiments restore --experiment-id {experiment}" in error.value.do
    later = Delivery(tmp_path, config, said.append)
    later._tried = True  # after an outage, the error does not stop a training run
    assert not later.deliver() and "the experiment it's gone has been deleted" in said[0]
    mlflow_client(uri).restore_experiment(experiment)
    assert Delivery(tmp_path, config, print).deliver()


@pytest.mark.slow
def test_unsupported_store_uri_is_refused_before_mlflow_import():
    code = (
        "import sys\nfrom raytrec.tracking.store import check_tracking_uri\n"
        "for uri in ('sqlite:///a', 'mysql+pymysql://a:b@c/d', 'HTTPS://a', 'http://[a', 'uc', 'mlruns'):\n"
        "    check_tracking_uri(uri)\n"
        "try: check_tracking_uri('foo://me:secret@here')\n"
        "except Exception as error: print(error)\n"
        "print('mlflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "cannot open the MLflow store: MLflow does not support this address" in done.stdout, done.stderr
    assert "  where:    foo://" in done.stdout and "secret" not in done.stdout
    assert done.stdout.endswith("False\n")


def test_delivery_reports_invalid_lines_as_the_reason(make_delivery, tmp_path):
    (tmp_path / METRICS).write_text('{"kind": "train"}\n' * 19)
    delivery, _ = make_delivery()
    lost = delivery.finish("FINISHED", 60)
    assert lost.startswith(f"MLflow lacks 19 records ({METRICS} contains an invalid line: "), lost


def test_delivery_drops_lines_without_a_time(make_delivery, tmp_path):
    (tmp_path / METRICS).write_text('{"kind": "train", "step": 1, "loss": 0.5}\n')
    delivery, _ = make_delivery()
    lost = delivery.finish("FINISHED", 0)
    assert lost == f"MLflow lacks 1 record ({METRICS} contains an invalid line: missing key 'unix_s')"


def test_delivery_does_not_blame_a_past_outage_for_invalid_lines(make_delivery, tmp_path, monkeypatch):
    from requests.exceptions import ConnectionError

    def refuse():
        raise ConnectionError("refused for a while")

    (tmp_path / METRICS).write_text('{"kind": "train"}\n')
    delivery, said = make_delivery()
    with monkeypatch.context() as patch:
        patch.setattr(delivery._store, "open", refuse)
        assert not delivery.deliver() and "refused for a while" in said[0]
    lost = delivery.finish("FINISHED", 60)
    assert lost.startswith(f"MLflow lacks 1 record ({METRICS} contains an invalid line: "), lost


@pytest.fixture
def status_server(request):
    """Serve an HTTP status, the parameter, with Retry-After; return the address and the times of requests."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(perf_counter())
            self.send_response(request.param)
            self.send_header("Retry-After", "3600")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize(
    "status_server, has_token_advice", [(401, True), (403, True), (404, False)], indirect=["status_server"]
)
def test_client_errors_of_the_server_are_refused(status_server, has_token_advice, tmp_path):
    config = tracked.write_tracked_config(tmp_path, {"tracking": {"uri": status_server[0]}})
    with pytest.raises(ConfigError, match="cannot open the MLflow store") as error:
        Delivery(tmp_path, config, print).deliver()
    assert ("MLFLOW_TRACKING_TOKEN" in error.value.do) == has_token_advice


@pytest.mark.slow
@pytest.mark.parametrize("status_server", [503], indirect=True)
def test_delivery_ignores_retry_after_of_a_failing_server(status_server, tmp_path):
    (address, asked), said = status_server, []
    delivery = Delivery(tmp_path, tracked.write_tracked_config(tmp_path, {"tracking": {"uri": address}}), said.append)
    assert not delivery.deliver() and delivery.run_id is None
    add_compared_line(tmp_path, {"loss": 1.0}, 1)
    began = perf_counter()
    lost = delivery.finish("FINISHED", patience_s=2.5)
    assert perf_counter() - began < 40
    assert "lacks 2 records and the end of the run" in lost and "503" in lost  # config.yaml is one of them
    assert len(said) == 1 and "cannot write to MLflow" in said[0]
    assert 4 <= len(asked) <= 10, "expected requests at 0 s, 1 s and 2 s, two each time"


def test_only_server_failures_are_transient():
    """MLflow 3.18 raises its own exceptions for both cases; 3.17 raised RetryError for failures."""
    from mlflow.exceptions import MlflowException, RestException

    failed = "API request to endpoint /api/x failed with error code {} != 200. Response body: ''"
    for error in (
        MlflowException(failed.format(502)),
        MlflowException(failed.format(503)),
        RestException({"error_code": "INTERNAL_ERROR", "message": "no connection to the database"}),
        RestException({"error_code": "TEMPORARILY_UNAVAILABLE"}),
    ):
        assert is_unreachable(error) and is_transient(error), error
    for error in (
        MlflowException(failed.format(404)),
        RestException({"detail": "Not Found"}),
        RestException({"error_code": "PERMISSION_DENIED"}),
        MlflowException("the response body was not in a valid JSON format"),
    ):
        assert not is_unreachable(error), error


def test_run_tags_contain_versions_source_and_git_state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/home/me/bin/raytrec", "train", "tracking.uri=http://me:secret@host"])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    tags = collect_run_tags()
    assert tags["version.torch"] == version("torch") and tags["version.python"].startswith("3.")
    assert tags["mlflow.source.name"] == "raytrec" and "secret" not in str(tags)
    assert "mlflow.source.git.commit" not in tags and "cluster.nodes" not in tags

    def git(*words):
        me = ["-c", "user.name=me", "-c", "user.email=me@host"]
        return subprocess.run(["git", *me, *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    assert "mlflow.source.git.commit" not in collect_run_tags(), "there is no commit yet"
    Path("a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    Path("untracked").write_text("1")
    tags = collect_run_tags()
    assert tags["mlflow.source.git.commit"] == git("rev-parse", "HEAD")
    assert tags["mlflow.source.git.dirty"] == "false"
    Path("a").write_text("2")
    assert collect_run_tags()["mlflow.source.git.dirty"] == "true"
