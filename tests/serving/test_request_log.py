"""The request log, which is written in the background and delays no request."""

import json
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from served import ARROW, TOKEN, ServedApp, to_arrow_stream
from test_app import get_valid_rows, make_ranking_body
from waiting import wait_for

import raytrec
from raytrec.serving import request_log
from raytrec.serving.app import Service
from raytrec.serving.loaded_exports import LoadedExports
from raytrec.serving.replica_metrics import ReplicaMetrics
from raytrec.serving.request_log import RequestLog


class LoggingService:
    """HTTP service that writes a request log."""

    def __init__(self, export, folder, sample=1.0):
        self.http = ServedApp(Service(LoadedExports(export), TOKEN))
        service, self.folder = self.http.service, folder
        self.figures = figures = service.figures
        self.log = RequestLog(str(folder), sample, "writer", figures)
        service.request_log = self.log

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.close()
        self.log.close()

    def counts(self):
        return self.figures.logged._value.get(), self.figures.not_logged._value.get()


def list_log_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_log_contains_rows_and_scores_of_every_request_format(served_export, tmp_path):
    export, table = served_export
    model = raytrec.load(export)
    with LoggingService(export, tmp_path / "log") as service:
        bodies = [
            service.http.ask("/predict", {"rows": table.to_pylist()}),
            service.http.ask("/predict", {"columns": table.to_pydict()}),
            service.http.ask("/predict", to_arrow_stream(table), kind=ARROW),
            service.http.ask("/predict", make_ranking_body(model, table)),
        ]
        assert service.http.ask("/predict", {"rows": []})[0] == 400
    ids = [headers["X-Request-Id"] for _, _, headers in bodies]
    assert len(set(ids)) == 4 and service.counts() == (4 * len(table), 0)
    (file,) = list_log_files(tmp_path / "log")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700
    logged = pq.read_table(file)
    assert logged.select(model.reader.columns.names).schema.equals(model.reader.columns)
    assert set(logged["_version"].to_pylist()) == {model.manifest.version}
    assert set(logged["_path"].to_pylist()) == {"/predict"}
    assert logged.schema.field("_time").type == pa.timestamp("us", "UTC")
    assert TOKEN.encode() not in file.read_bytes()
    for id, (_, content, _) in zip(ids, bodies, strict=True):
        rows = logged.filter(pa.compute.equal(logged["_request"], id))
        assert rows["score_y"].to_pylist() == pytest.approx(json.loads(content)["predictions"]["score_y"])
        again = model.predict(rows)["score_y"]
        np.testing.assert_allclose(rows["score_y"], again, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_log_samples_requests_and_rotates_files(served_export, tmp_path, monkeypatch):
    monkeypatch.setattr(request_log, "FILE_INTERVAL_S", 3600)
    monkeypatch.setattr(request_log, "MAX_FILE_ROWS", 20)
    with LoggingService(served_export[0], tmp_path, sample=0.5) as service:
        for _ in range(60):
            service.http.ask("/predict", {"rows": get_valid_rows(served_export)})
        wait_for(lambda: list_log_files(tmp_path), "a full file", 60)
    rows = [pq.read_metadata(file).num_rows for file in list_log_files(tmp_path)]
    assert 20 < sum(rows) < 100 and len(rows) > 1 and set(rows[:-1]) == {20}
    monkeypatch.setattr(request_log, "FILE_INTERVAL_S", 0.05)
    with LoggingService(served_export[0], tmp_path / "timed") as service:
        service.http.ask("/predict", {"rows": get_valid_rows(served_export)})
        wait_for(lambda: list(tmp_path.glob("timed/*.parquet")), "a file after the interval", 60)
        assert service.counts() == (2, 0)


@pytest.mark.survive
def test_each_version_is_logged_to_its_own_file(served_export, tmp_path):
    with LoggingService(served_export[0], tmp_path) as service:
        versions = service.http.service.versions
        service.http.ask("/predict", {"rows": get_valid_rows(served_export)})
        versions.commit(versions.prepare(served_export[0].replace("export", "small")))
        service.http.ask("/predict", {"rows": get_valid_rows(served_export)})
    found = [pq.read_table(file)["_version"].unique().to_pylist() for file in list_log_files(tmp_path)]
    assert sorted(map(len, found)) == [1, 1] and found[0] != found[1]


def test_unwritable_log_fails_no_request(served_export, tmp_path, caplog):
    (tmp_path / "log").write_text("a file in the place of the folder")
    with LoggingService(served_export[0], tmp_path / "log") as service:
        assert service.http.ask("/predict", {"rows": get_valid_rows(served_export)})[0] == 200
    assert service.counts() == (0, 2) and "cannot be written" in caplog.text


def test_full_log_queue_drops_requests(served_export, tmp_path, monkeypatch):
    stuck, go_on = threading.Event(), threading.Event()
    convert = request_log.to_logged_rows

    def slowly(logged):
        stuck.set()
        assert go_on.wait(60)
        return convert(logged)

    monkeypatch.setattr(request_log, "to_logged_rows", slowly)
    monkeypatch.setattr(request_log, "MAX_WAITING_ROWS", 6)
    with LoggingService(served_export[0], tmp_path) as service:
        for _ in range(10):
            status, _, headers = service.http.ask("/predict", {"rows": get_valid_rows(served_export)})
            assert status == 200
        assert stuck.is_set() and "X-Request-Id" not in headers
        go_on.set()
    assert service.counts() == (6, 14)


def test_unconvertible_request_does_not_stop_the_log(tmp_path):
    figures = ReplicaMetrics()
    log = RequestLog(str(tmp_path), 1.0, "writer", figures)
    log.offer("/predict", None, [np.zeros(3)])
    log.close()
    assert not log._thread.is_alive()
    assert (figures.logged._value.get(), figures.not_logged._value.get()) == (0, 3)
