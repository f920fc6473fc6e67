"""Challengers: the share of requests, canary answers, shadow scores, their log and metrics, without Ray."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import ServedApp, assert_predictions_equal
from services import copy_export, rename_dense_column
from test_app import get_valid_rows
from waiting import wait_for

import raytrec
from raytrec.common.errors import ConfigError, DataError, RunError
from raytrec.scoring.manifest import read_manifest
from raytrec.serving import shadow_queue
from raytrec.serving.app import Service
from raytrec.serving.command import promote
from raytrec.serving.loaded_exports import LoadedExports, execute_command
from raytrec.serving.options import Promotion
from raytrec.serving.replica_metrics import ReplicaMetrics, describe_model, write_metrics
from raytrec.serving.replica_state import Challenger, Export, ReplicaCommand, ReplicaState
from raytrec.serving.request_log import RequestLog
from raytrec.skew.compare import skew

KEYS = [f"user-{number}" for number in range(10_000)]


def make_challenger(share, version="films-2", mode="canary", uri="b"):
    return Challenger(uri, version, share, mode)


def select_keys(share, version="films-2"):
    return {key for key in KEYS if make_challenger(share, version).includes(key.encode())}


def test_share_of_keys_is_exact_within_chance_and_grows_monotonically():
    """The first keys are recorded, because Python's hash of strings would differ between processes."""
    tenth, fifth = select_keys(0.1), select_keys(0.2)
    assert abs(len(tenth) - 1000) < 4 * 30 and abs(len(fifth) - 2000) < 4 * 40
    assert tenth < fifth and select_keys(1.0) == set(KEYS) and len(select_keys(1e-6)) < 2
    assert abs(len(tenth & select_keys(0.1, "films-3")) - 100) < 4 * 10, "challengers get the same users"
    assert tenth.intersection(KEYS[:60]) == {f"user-{number}" for number in (2, 21, 33, 36, 46, 54, 55)}


@pytest.fixture(scope="module")
def models(served_export):
    """Return the model of the current export and of the challenger, by role."""
    return {"current": raytrec.load(served_export[0]), "challenger": raytrec.load(to_challenger_uri(served_export))}


def to_challenger_uri(made):
    return made[0].replace("export", "small")


@contextmanager
def serve_challenger(made, mode, share, uri=None, log=None):
    """Serve an export, with another one as the challenger."""
    versions, uri = LoadedExports(made[0]), uri or to_challenger_uri(made)
    assert versions.set_challenger(make_challenger(share, read_manifest(uri).version, mode, uri)) is None
    with ServedApp(Service(versions, "a token")) as http:
        if log:
            http.service.request_log = RequestLog(str(log), 1.0, "writer", http.service.figures)
        yield http
    if log:
        http.service.request_log.close()


def read_metrics(http):
    """Return the metrics of a service as (name, labels except replica) → value."""
    service = http.service
    about = describe_model(service.versions.current.scorer)
    text = write_metrics({"a": service.figures.collect(about, service.batcher.waiting)}).decode()
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "replica")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.slow
def test_canary_answers_its_share_of_keys_with_its_own_scores(served_export, models):
    rows, versions = get_valid_rows(served_export), {role: model.version for role, model in models.items()}
    with serve_challenger(served_export, "canary", 0.3) as http:
        challenger, roles = http.service.versions.challenger.challenger, []
        for key in KEYS[:40]:
            roles.append("challenger" if challenger.includes(key.encode()) else "current")
            status, content, headers = http.ask("/predict", {"rows": rows}, key=key)
            answer = json.loads(content)
            assert (status, answer["version"], headers["X-Model-Version"]) == (200, *[versions[roles[-1]]] * 2)
            assert_predictions_equal(answer["predictions"], models[roles[-1]].predict(rows))
        found = read_metrics(http)
    for role, version in versions.items():
        assert found["raytrec_requests_total", "/predict", "200", version] == roles.count(role) > 0
        assert found["raytrec_rows_total", version] == 2 * roles.count(role)
        assert found["raytrec_seconds_count", "/predict", version] == roles.count(role)


def test_body_decides_if_the_client_sends_no_key(served_export, models):
    _, table = served_export
    with serve_challenger(served_export, "canary", 0.5) as http:
        challenger, answered = http.service.versions.challenger.challenger, set()
        for number in range(len(table)):
            body = json.dumps({"rows": table.slice(number, 1).to_pylist()}).encode()
            expected = models["challenger" if challenger.includes(body) else "current"].version
            for path in ("/predict", "/vectors", "/predict"):
                assert http.ask(path, body)[2]["X-Model-Version"] == expected
            answered.add(expected)
        assert len(answered) == 2
        healths = {json.loads(http.ask("/health", key=key)[1])["version"] for key in KEYS[:20]}
        assert healths == {models["current"].version}


def test_errors_of_a_canary_name_and_count_its_version(served_export, models):
    with serve_challenger(served_export, "canary", 1.0) as http:
        status, _, headers = http.ask("/predict", {"rows": [{}]})
        assert (status, headers["X-Model-Version"]) == (400, models["challenger"].version)
        assert read_metrics(http)["raytrec_requests_total", "/predict", "400", models["challenger"].version] == 1


def count_shadow_requests(http, outcome):
    counts = read_metrics(http)
    return sum(value for name, value in counts.items() if name[:2] == ("raytrec_shadow_requests_total", outcome))


@pytest.mark.slow
def test_shadow_scores_are_compared_and_logged_but_not_answered(served_export, models, tmp_path):
    table, version = served_export[1], models["challenger"].version
    with serve_challenger(served_export, "shadow", 1.0, log=tmp_path / "log") as http:
        for _, predictions in http.scores_of_forms(table.to_pylist(), table):
            assert_predictions_equal(predictions, models["current"].predict(table))
        ids = {http.ask("/predict", {"rows": table.to_pylist()})[2]["X-Request-Id"] for _ in range(2)}
        wait_for(lambda: count_shadow_requests(http, "scored") == 6, "shadow scores", 60)
        found = read_metrics(http)
    assert found["raytrec_requests_total", "/predict", "200", models["current"].version] == 6
    assert found["raytrec_shadow_rows_total", version] == 6 * len(table)
    assert found["raytrec_shadow_seconds_count", version] == 6
    answers, scores = (models[role].predict(table) for role in ("current", "challenger"))
    for name in answers.column_names:
        difference = np.abs(np.array(answers[name].to_pylist()) - np.array(scores[name].to_pylist())).mean()
        mean = found["raytrec_shadow_difference_total", name, version] / (6 * len(table))
        assert mean == pytest.approx(difference, rel=1e-4) and mean > 0
    logs = [pq.read_table(file) for file in (tmp_path / "log").glob("*.parquet")]
    assert sorted(log["_path"].unique().to_pylist() for log in logs) == [["/predict"], ["shadow"]]
    assert all(ids <= set(log["_request"].to_pylist()) for log in logs)
    for uri, other in ((served_export[0], "challenger"), (to_challenger_uri(served_export), "current")):
        compared = skew(str(tmp_path / "log"), uri)
        assert not compared.metrics["differs"] and compared.metrics["requests"] == 6
        assert compared.metrics["other_versions"] == {models[other].version: 6 * len(table)}


def test_rows_that_the_challenger_cannot_read_are_answered_and_counted(served_export, tmp_path, caplog):
    rename = lambda copy: rename_dense_column(copy, "a", "a2")  # noqa: E731
    uri = copy_export(to_challenger_uri(served_export), tmp_path / "copy", rename)
    with serve_challenger(served_export, "shadow", 1.0, uri=uri) as http:
        for _ in range(2):
            assert http.ask("/predict", {"rows": get_valid_rows(served_export)})[0] == 200
        wait_for(lambda: count_shadow_requests(http, "error") == 2, "shadow errors", 60)
        assert count_shadow_requests(http, "scored") == 0
    assert caplog.text.count("shadow scoring of a request") == 1 and "a2" in caplog.text


def test_shadow_waits_for_idle_moments_and_drops_what_exceeds_its_queue(served_export, monkeypatch):
    body = json.dumps({"rows": get_valid_rows(served_export)}).encode()
    monkeypatch.setattr(shadow_queue, "MAX_WAITING_BYTES", 2 * len(body))
    with serve_challenger(served_export, "shadow", 1.0) as http:
        http.service.batcher.waiting = 1
        for _ in range(5):
            assert http.ask("/predict", body)[0] == 200
        time.sleep(0.05)
        assert (count_shadow_requests(http, "dropped"), count_shadow_requests(http, "scored")) == (3, 0)
        http.service.batcher.waiting = 0
        wait_for(lambda: count_shadow_requests(http, "scored") == 2, "waiting requests", 60)
        assert http.ask("/predict", body)[0] == 200
        wait_for(lambda: count_shadow_requests(http, "scored") == 3, "another request", 60)


def test_shadow_scores_only_its_share_of_requests(served_export):
    body = {"rows": get_valid_rows(served_export)}
    with serve_challenger(served_export, "shadow", 0.3) as http:
        challenger = http.service.versions.challenger.challenger
        for key in KEYS[:30]:
            http.ask("/predict", body, key=key)
        expected = sum(challenger.includes(key.encode()) for key in KEYS[:30])
        wait_for(lambda: count_shadow_requests(http, "scored") == expected, "shadow scores", 60)
        time.sleep(0.05)
        assert 0 < count_shadow_requests(http, "scored") == expected < 30


def test_challenger_promotion_answers_without_another_load(served_export):
    versions, uri = LoadedExports(served_export[0]), to_challenger_uri(served_export)
    first, second = versions.version, read_manifest(uri).version
    report, current = ReplicaState(-1, first), Export(served_export[0], first)

    def execute(number, answer, prepare=None, challenger=None):
        nonlocal report
        report = execute_command(versions, ReplicaCommand(number, answer, prepare, challenger), report)
        assert (report.error, report.challenger_error) == (None, None)

    execute(1, current, prepare=uri)
    execute(2, current, challenger=make_challenger(0.1, second, uri=uri))
    scorer = versions.challenger.scorer
    assert (versions.version, versions.challenger.challenger.share) == (first, 0.1)
    execute(3, current, prepare=uri, challenger=make_challenger(0.1, second, uri=uri))
    execute(4, current, challenger=make_challenger(0.2, second, uri=uri))
    assert versions.challenger.scorer is scorer and versions.challenger.challenger.share == 0.2
    execute(5, current, prepare=uri, challenger=make_challenger(0.2, second, uri=uri))
    execute(6, Export(uri, second))
    assert versions.current.scorer is scorer and versions.challenger is None
    execute(7, current)
    assert versions.version == first and len(versions.loaded) == 2


def test_replica_that_cannot_load_the_challenger_answers_with_the_current_version(served_export, caplog, tmp_path):
    versions, uri = LoadedExports(served_export[0]), to_challenger_uri(served_export)
    current = Export(served_export[0], versions.version)
    for broken in (str(tmp_path / "nothing"), uri):
        command = ReplicaCommand(1, current, challenger=make_challenger(0.5, "films-2", uri=broken))
        report = execute_command(versions, command, ReplicaState(-1, current.version))
        assert (report.version, report.error, versions.challenger) == (current.version, None, None)
        assert report.challenger_error in caplog.text
    assert "there is no export" in caplog.text and "changed in place from films-2" in caplog.text


def test_series_of_versions_that_are_no_longer_loaded_are_removed():
    figures = ReplicaMetrics()
    for version in ("films-1", "films-2"):
        figures.requests.labels("/predict", 200, version).inc()
        figures.seconds.labels("/predict", version).observe(1.0)
        figures.rows.labels(version).inc()
        figures.shadow_requests.labels(version, "scored").inc()
        figures.shadow_rows.labels(version).inc()
        figures.shadow_seconds.labels(version).observe(1.0)
        figures.shadow_difference.labels(version, "score").inc()
    figures.keep_versions({"films-2"})
    text = write_metrics({"a": figures.collect({"version": "films-2", "age_s": 1.0}, 0)}).decode()
    assert "films-1" not in text and text.count("_total{") == 7 and text.count("_count{") == 3


@pytest.mark.parametrize(
    "body, words",
    [
        (b"", "Invalid JSON"),
        (b"[]", "should be an object"),
        (b'{"uri": null}', "invalid uri"),
        (b'{"uri": ""}', "invalid uri"),
        (b'{"uri": 3}', "invalid uri"),
        (b'{"url": "a"}', "invalid url"),
        (b'{"uri": "a", "share": 0}', "invalid share"),
        (b'{"uri": "a", "share": 1.1}', "invalid share"),
        (b'{"uri": "a", "share": true}', "invalid share"),
        (b'{"uri": "a", "share": "0.5"}', "invalid share"),
        (b'{"uri": "a", "shadow": 1}', "invalid shadow"),
        (b'{"share": 0.5}', "share and shadow require a uri"),
        (b'{"shadow": true}', "share and shadow require a uri"),
    ],
)
def test_malformed_promotions_are_refused(body, words):
    with pytest.raises(DataError, match=words):
        Promotion.parse(body)


def test_promotions_are_parsed():
    bodies = (b"{}", b'{"uri": "a", "share": null}', b'{"uri": "a", "share": 1}')
    parsed = [(each.uri, each.share, each.shadow) for each in map(Promotion.parse, bodies)]
    assert parsed == [(None, None, False), ("a", None, False), ("a", 1.0, False)]


@pytest.mark.parametrize("challenger", [{"share": 0.5}, {"shadow": True}])
def test_rollback_command_refuses_share_and_shadow(challenger):
    with pytest.raises(ConfigError, match="either a URI or --rollback alone"):
        promote(None, service="http://127.0.0.1:9", name=None, rollback=True, **challenger)


@pytest.mark.parametrize("answer", [b"HTTP/1.0 200 OK\r\n\r\nwelcome", b"HTTP/1.0 200 OK\r\n\r\n{}", b"220 mail\r\n"])
def test_promotion_names_an_address_of_another_server(answer):
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

        def respond():
            connection, _ = listening.accept()
            with connection:
                received = b""
                while not received.endswith(b"}"):  # closing a connection with unread data would reset it
                    received += connection.recv(1 << 16)
                connection.sendall(answer)

        pool.submit(respond)
        with pytest.raises(RunError, match="the response is not that of a service"):
            promote("films-2", service=f"http://127.0.0.1:{listening.getsockname()[1]}", name=None)


def test_requests_during_changes_of_the_challenger_are_all_answered(served_export):
    body, stop = {"rows": get_valid_rows(served_export)}, threading.Event()
    with serve_challenger(served_export, "canary", 0.5) as http, ThreadPoolExecutor(1) as pool:
        versions = http.service.versions
        challenger = versions.challenger.challenger
        asking = pool.submit(lambda: {http.ask("/predict", body)[0] for _ in iter(stop.is_set, True)})
        for number in range(30):
            assert versions.set_challenger(challenger if number % 2 else None) is None
            time.sleep(0.005)
        stop.set()
        assert asking.result() == {200}
