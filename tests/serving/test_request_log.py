"""The log of requests, which no request waits for; and `raytrec skew`, which compares it."""

import json
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client import CollectorRegistry, Counter
from test_app import ARROW, TOKEN, Http, good, made, stream  # noqa: F401

import raytrec
from raytrec.common.errors import RunError
from raytrec.serving import request_log
from raytrec.serving.app import Service
from raytrec.serving.bodies import Asked
from raytrec.serving.request_log import RequestLog
from raytrec.serving.skew import skew
from raytrec.serving.versions import Loaded, Versions


class Logging:
    """A service that logs."""

    def __init__(self, export, folder, sample=1.0, **options):
        self.http = Http(Service(Versions(export), TOKEN))
        service, self.folder = self.http.service, folder
        self.figures = figures = service.figures
        self.log = RequestLog(str(folder), sample, "writer", figures.logged, figures.not_logged, **options)
        service.request_log = self.log

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.close()
        self.log.close()

    def counts(self):
        return self.figures.logged._value.get(), self.figures.not_logged._value.get()


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_form_of_request_is_logged_with_its_rows_and_scores(made, tmp_path):  # noqa: F811
    export, table = made
    model = raytrec.load(export)
    mine = model.reader_of("query").columns.names
    user = {name: table[name][0].as_py() for name in mine}
    candidates = table.drop_columns(mine).to_pylist()
    with Logging(export, tmp_path / "log") as service:
        bodies = [
            service.http.ask("/predict", {"rows": table.to_pylist()}),
            service.http.ask("/predict", {"columns": table.to_pydict()}),
            service.http.ask("/predict", stream(table), kind=ARROW),
            service.http.ask("/predict", {"user": user, "candidates": candidates}),
        ]
        assert service.http.ask("/predict", {"rows": []})[0] == 400
    ids = [headers["X-Request-Id"] for _, _, headers in bodies]
    assert len(set(ids)) == 4 and service.counts() == (4 * len(table), 0)
    (file,) = files(tmp_path / "log")
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


def test_it_is_a_sample_of_requests_and_files_are_closed_by_time_and_rows(made, tmp_path):  # noqa: F811
    with Logging(made[0], tmp_path, sample=0.5, every_s=3600, most_rows=20) as service:
        for _ in range(60):
            service.http.ask("/predict", {"rows": good(made)})
        until = time.monotonic() + 60
        while not files(tmp_path):
            assert time.monotonic() < until
            time.sleep(0.01)
    rows = [pq.read_metadata(file).num_rows for file in files(tmp_path)]
    assert 20 < sum(rows) < 100 and len(rows) > 1 and set(rows[:-1]) == {20}
    with Logging(made[0], tmp_path / "timed", every_s=0.05) as service:
        service.http.ask("/predict", {"rows": good(made)})
        while not list(tmp_path.glob("timed/*.parquet")):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert service.counts() == (2, 0)


@pytest.mark.survive
def test_another_version_is_another_file(made, tmp_path):  # noqa: F811
    with Logging(made[0], tmp_path) as service:
        versions = service.http.service.versions
        service.http.ask("/predict", {"rows": good(made)})
        versions.commit(versions.prepare(made[0].replace("export", "small")))
        service.http.ask("/predict", {"rows": good(made)})
    found = [pq.read_table(file)["_version"].unique().to_pylist() for file in files(tmp_path)]
    assert sorted(map(len, found)) == [1, 1] and found[0] != found[1]


def test_a_store_that_cannot_be_written_costs_no_request(made, tmp_path, caplog):  # noqa: F811
    (tmp_path / "log").write_text("a file in the place of the folder")
    with Logging(made[0], tmp_path / "log") as service:
        assert service.http.ask("/predict", {"rows": good(made)})[0] == 200
    assert service.counts() == (0, 2) and "cannot be written" in caplog.text


def test_what_the_thread_cannot_keep_up_with_is_dropped(made, tmp_path, monkeypatch):  # noqa: F811
    stuck, go_on = threading.Event(), threading.Event()
    convert = request_log.logged_rows

    def slowly(logged):
        stuck.set()
        assert go_on.wait(60)
        return convert(logged)

    monkeypatch.setattr(request_log, "logged_rows", slowly)
    monkeypatch.setattr(request_log, "MOST_WAITING", 6)
    with Logging(made[0], tmp_path) as service:
        for _ in range(10):
            status, _, headers = service.http.ask("/predict", {"rows": good(made)})
            assert status == 200
        assert stuck.is_set() and "X-Request-Id" not in headers
        go_on.set()
    assert service.counts() == (6, 14)


def test_a_request_that_cannot_be_converted_ends_no_log(tmp_path):
    counters = [Counter(name, "-", registry=CollectorRegistry()) for name in ("written", "dropped")]
    log = RequestLog(str(tmp_path), 1.0, "writer", *counters)
    log.offer("/predict", None, None, [np.zeros(3)])
    log.close()
    assert not log._thread.is_alive() and [each._value.get() for each in counters] == [0, 3]


def rows_of(seed, count, users=40):
    """Rows that fit the model of `made`."""
    draw = np.random.default_rng(seed)

    def bags(most, lengths, kind=pa.int64()):
        values = [draw.integers(0, most, n).tolist() for n in draw.integers(0, lengths, count)]
        return pa.array(values, pa.list_(kind))

    tags, words = bags(5, 4), bags(23, 3)
    weights = [
        pa.array([[1.0] * len(bag.as_py()) for bag in each], pa.list_(pa.float32())) for each in (tags, words)
    ]
    return pa.table(
        {
            "a": pa.array(draw.normal(2, 1, count), pa.float32()),
            "b": pa.array(draw.integers(0, 3, count), pa.float32()),
            "user": pa.array(draw.integers(0, users, count)[:, None].tolist()),
            "friends": bags(53, 5),
            "tags": tags,
            "tags_weights": weights[0],
            "words": words,
            "words_weights": weights[1],
            "scored": bags(23, 2),
        }
    )


@pytest.fixture(scope="module")
def loaded(made):  # noqa: F811
    return Loaded(made[0], raytrec.load(made[0]))


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    pq.write_table(rows_of(1, 4000), folder / "rows.parquet", row_group_size=500)
    return str(folder)


def write_log(folder, loaded, served, asked=None, error=0.0):
    """A log of requests of 2 rows each.

    Args:
        served: what was scored. asked: what stands in the log. error: that scores have in it.
    """
    counters = [Counter(name, "-", registry=CollectorRegistry()) for name in ("written", "dropped")]
    log = RequestLog(str(folder), 1.0, "writer", *counters)
    scores = loaded.scorer.score([loaded.scorer.reader.read(served)])
    for at in range(0, len(served), 2):
        rows = Asked(rows=(asked or served).slice(at, 2))
        log.offer("/predict", loaded, rows, [each[at : at + 2] + np.float32(error) for each in scores])
    log.close()
    return str(folder)


def test_a_log_without_skew_shows_none(made, loaded, training, tmp_path):  # noqa: F811
    log = write_log(tmp_path, loaded, rows_of(2, 1200))
    found = skew(log, made[0], data=training).metrics
    assert found["differs"] == [] and found["rows"] == 1200 and found["requests"] == 600
    assert found["rescored"]["score_y"]["max"] < 1e-6 and found["data_rows"] == 4000
    assert {each["column"] for each in found["columns"]} > {"a", "b", "user", "scored", "score_y"}
    assert skew(log, made[0]).metrics["columns"] == []


def scaled(rows):
    return rows.set_column(0, "a", pa.compute.multiply(rows["a"], np.float32(100)))


def with_new_users(rows):
    return rows.set_column(2, "user", pa.array([[40 + i % 13] for i in range(len(rows))]))


def with_empty_bags(rows):
    return rows.set_column(8, "scored", pa.array([[]] * len(rows), pa.list_(pa.int64())))


@pytest.mark.parametrize(
    "change, error, first",
    [
        (scaled, 0, "a (values)"),
        pytest.param(with_new_users, 0, "user (unseen ids)", marks=pytest.mark.survive),
        pytest.param(with_empty_bags, 0, "scored (length)", marks=pytest.mark.survive),
        (None, 1e-4, "score_y (scored again)"),
    ],
)
def test_an_injected_skew_is_named_first(made, loaded, training, tmp_path, change, error, first):  # noqa: F811
    rows = rows_of(2, 1200)
    log = write_log(tmp_path, loaded, change(rows) if change else rows, error=error)
    found = skew(log, made[0], data=training).metrics
    assert found["differs"][0] == first
    assert (found["rescored"]["score_y"]["share"] == 1) == bool(error)


@pytest.fixture
def narrow(capsys, monkeypatch):
    """What has been printed on a terminal of 80 columns, as lines."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda: capsys.readouterr().out.splitlines()


def test_the_verdict_comes_first_in_80_columns(made, loaded, training, tmp_path, narrow):  # noqa: F811
    found = skew(write_log(tmp_path, loaded, scaled(rows_of(2, 1200))), made[0], data=training)
    found.show()
    lines = narrow()
    assert lines[0] == f"differs      {', '.join(found.metrics['differs'])}" and lines[1] == loaded.version
    rows = [line for line in lines if line.startswith("│ differs │")]
    assert len(rows) == len(found.metrics["differs"]) > 0
    first = found.measures[0]
    assert all(text in rows[0] for text in (first.column, first.measure, f"{first.psi:.3f}"))
    assert not [line for line in lines[1:] if len(line) > 80 or "…" in line]


@pytest.mark.survive
def test_rows_that_are_not_those_scored_show_in_the_scores(made, loaded, tmp_path):  # noqa: F811
    rows = rows_of(2, 200)
    found = skew(write_log(tmp_path, loaded, scaled(rows), rows), made[0]).metrics
    assert found["differs"] == ["score_y (scored again)", "score_near (scored again)"]


@pytest.mark.survive
def test_other_versions_are_named_and_not_compared(made, loaded, training, tmp_path, capsys):  # noqa: F811
    small = made[0].replace("export", "small")
    other = Loaded(small, raytrec.load(small))
    write_log(tmp_path, loaded, rows_of(2, 100))
    found = skew(str(tmp_path), made[0])
    assert found.metrics["other_versions"] == {}
    write_log(tmp_path / "more", other, scaled(rows_of(3, 60)))
    found = skew(str(tmp_path), made[0], data=training)
    assert found.metrics["other_versions"] == {other.version: 60} and found.metrics["rows"] == 100
    found.show()
    shown = capsys.readouterr().out
    assert f"60 rows of {other.version}" in shown and "differs      nothing" in shown and "psi" in shown
    with pytest.raises(RunError, match="no rows of this export") as caught:
        skew(str(tmp_path / "more"), made[0])
    assert other.version in caught.value.expected


@pytest.mark.survive
def test_a_sample_is_of_all_files(made, loaded, training, tmp_path):  # noqa: F811
    log = write_log(tmp_path, loaded, rows_of(2, 100))
    found = skew(log, made[0], data=training, rows=80).metrics
    assert found["rows"] == found["data_rows"] == 80


@pytest.mark.survive
def test_the_command_needs_the_packages_of_score_alone(made, loaded, training, tmp_path):  # noqa: F811
    write_log(tmp_path, loaded, scaled(rows_of(2, 400)))
    others = (
        "ray",
        "torchrec",
        "fbgemm_gpu",
        "mlflow",
        "psutil",
        "matplotlib",
        "jinja2",
        "starlette",
        "prometheus_client",
    )
    code = f"import sys\nsys.modules |= dict.fromkeys({others})\nfrom raytrec.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "skew",
        tmp_path,
        "--export",
        made[0],
        "--data",
        training,
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["differs"][0] == "a (values)"
