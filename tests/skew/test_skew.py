"""`raytrec skew`, which compares a log of requests with its export and with training data."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exports import train_for_export
from test_models import ModelCase

import raytrec
from raytrec.common.errors import DataError, RunError
from raytrec.serving.batching import VersionedScores
from raytrec.serving.bodies import Query
from raytrec.serving.replica_metrics import ReplicaMetrics
from raytrec.serving.request_log import RequestLog
from raytrec.skew.compare import LARGE_PSI, skew

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_exports(tmp_path_factory):
    """Return the paths of an export and of another version of the model."""
    root = tmp_path_factory.mktemp("skew")
    folder, *_ = train_for_export(ModelCase("two_tower", (1, 1)), root)
    small = raytrec.export(folder, str(root / "small"), quantize="int8").path
    return raytrec.export(folder, str(root / "export")).path, small


def make_skew_rows(seed, count, users=40):
    """Return rows for the exported model."""
    draw = np.random.default_rng(seed)

    def bags(most, lengths, kind=pa.int64()):
        values = [draw.integers(0, most, n).tolist() for n in draw.integers(0, lengths, count)]
        return pa.array(values, pa.list_(kind))

    tags, words = bags(5, 4), bags(23, 3)
    weights = [pa.array([[1.0] * len(bag.as_py()) for bag in each], pa.list_(pa.float32())) for each in (tags, words)]
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
def loaded_export(two_exports):
    return raytrec.load(two_exports[0])


@pytest.fixture(scope="module")
def training_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    pq.write_table(make_skew_rows(1, 4000), folder / "rows.parquet", row_group_size=500)
    return str(folder)


def write_log(folder, loaded, served, asked=None, error=0.0):
    """Write a request log with 2 rows per request.

    Args:
        served: Scored rows.
        asked: Logged rows; None: the scored rows.
        error: Error that is added to the logged scores.
    """
    log = RequestLog(str(folder), 1.0, "writer", ReplicaMetrics())
    scores = loaded.score([loaded.reader.read(served)])
    for at in range(0, len(served), 2):
        query = Query(loaded, "predict", (asked or served).slice(at, 2))
        values = (each[at : at + 2] + np.float32(error) for each in scores)
        log.offer("/predict", query, VersionedScores(values, loaded.version))
    log.close()
    return str(folder)


def test_skew_finds_nothing_in_a_log_without_skew(two_exports, loaded_export, training_folder, tmp_path):
    log = write_log(tmp_path, loaded_export, make_skew_rows(2, 1200))
    found = skew(log, two_exports[0], data=training_folder).metrics
    assert found["differs"] == found["undecided"] == [] and found["rows"] == 1200 and found["requests"] == 600
    assert found["rescored"]["score_y"]["max"] < 1e-6 and found["data_rows"] == 4000
    assert {each["column"] for each in found["columns"]} > {"a", "b", "user", "scored", "score_y"}
    assert skew(log, two_exports[0]).metrics["columns"] == []


def scale_column_a(rows):
    return rows.set_column(0, "a", pa.compute.multiply(rows["a"], np.float32(100)))


def add_unseen_users(rows):
    return rows.set_column(2, "user", pa.array([[40 + i % 13] for i in range(len(rows))]))


def empty_scored_bags(rows):
    return rows.set_column(8, "scored", pa.array([[]] * len(rows), pa.list_(pa.int64())))


@pytest.mark.parametrize(
    "change, error, first",
    [
        (scale_column_a, 0, "a (values)"),
        pytest.param(add_unseen_users, 0, "user (unseen ids)", marks=pytest.mark.survive),
        pytest.param(empty_scored_bags, 0, "scored (length)", marks=pytest.mark.survive),
        (None, 1e-4, "score_y (scored again)"),
    ],
)
def test_skew_names_the_injected_skew_first(
    two_exports, loaded_export, training_folder, tmp_path, change, error, first
):
    rows = make_skew_rows(2, 1200)
    log = write_log(tmp_path, loaded_export, change(rows) if change else rows, error=error)
    found = skew(log, two_exports[0], data=training_folder).metrics
    assert found["differs"][0] == first
    assert (found["rescored"]["score_y"]["share"] == 1) == bool(error)


def test_skew_shows_the_verdict_first_in_80_columns(
    two_exports, loaded_export, training_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", "80")
    log = write_log(tmp_path, loaded_export, scale_column_a(make_skew_rows(2, 1200)))
    found = skew(log, two_exports[0], data=training_folder)
    found.show()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"differences  {', '.join(found.metrics['differs'])}" and lines[1] == loaded_export.version
    rows = [line for line in lines if line.startswith("│ differs │")]
    assert len(rows) == len(found.metrics["differs"]) > 0
    first = found.measures[0]
    assert all(text in rows[0] for text in (first.column, first.measure, f"{first.psi:.3f}"))
    assert not [line for line in lines[1:] if len(line) > 80 or "…" in line]


def test_skew_names_the_size_that_a_verdict_needs(two_exports, loaded_export, training_folder, tmp_path, capsys):
    found = skew(write_log(tmp_path, loaded_export, make_skew_rows(2, 20)), two_exports[0], data=training_folder)
    needed, names = found.metrics["needed"], found.metrics["undecided"]
    assert not found.metrics["differs"] and "user (ids)" in names and 10 < needed < 1000
    found.show()
    line = f"undecided    {len(names)} of {len(found.measures)} measures: 10 requests and 4,000 training rows"
    assert f"{line}; a verdict needs at least {needed:,} of each" in capsys.readouterr().out
    worst = max(each.chance for each in found.measures) / (1 / 10 + 1 / 4000)
    assert worst * 2 / needed <= LARGE_PSI < worst * 2 / (needed - 1)


def test_skew_finds_equal_lengths_in_a_single_request(two_exports, loaded_export, training_folder, tmp_path):
    """Bins that are empty in both samples do not add to psi."""
    found = skew(write_log(tmp_path, loaded_export, make_skew_rows(2, 2)), two_exports[0], data=training_folder)
    (lengths,) = [each for each in found.measures if (each.column, each.measure) == ("user", "length")]
    assert lengths.psi == 0 and found.metrics["differs"] == []


@pytest.mark.survive
def test_skew_detects_logged_rows_that_were_not_scored(two_exports, loaded_export, tmp_path):
    rows = make_skew_rows(2, 200)
    found = skew(write_log(tmp_path, loaded_export, scale_column_a(rows), rows), two_exports[0]).metrics
    assert found["differs"] == ["score_y (scored again)", "score_near (scored again)"]


def test_skew_rejects_training_data_without_rows(two_exports, loaded_export, tmp_path):
    log = write_log(tmp_path / "log", loaded_export, make_skew_rows(2, 20))
    pq.write_table(make_skew_rows(2, 20).slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="the files have no rows"):
        skew(log, two_exports[0], data=str(tmp_path / "empty.parquet"))


@pytest.mark.survive
def test_skew_lists_other_versions_without_comparison(two_exports, loaded_export, training_folder, tmp_path, capsys):
    other = raytrec.load(two_exports[1])
    write_log(tmp_path, loaded_export, make_skew_rows(2, 100))
    found = skew(str(tmp_path), two_exports[0])
    assert found.metrics["other_versions"] == {}
    write_log(tmp_path / "more", other, scale_column_a(make_skew_rows(3, 60)))
    found = skew(str(tmp_path), two_exports[0], data=training_folder)
    assert found.metrics["other_versions"] == {other.version: 60} and found.metrics["rows"] == 100
    found.show()
    shown = capsys.readouterr().out
    assert f"60 rows of {other.version}" in shown and "differences  none" in shown and "psi" in shown
    with pytest.raises(RunError, match="contains no rows of this export") as caught:
        skew(str(tmp_path / "more"), two_exports[0])
    assert other.version in caught.value.expected


@pytest.mark.survive
def test_skew_samples_the_given_number_of_rows(two_exports, loaded_export, training_folder, tmp_path):
    log = write_log(tmp_path, loaded_export, make_skew_rows(2, 100))
    found = skew(log, two_exports[0], data=training_folder, rows=80).metrics
    assert found["rows"] == found["data_rows"] == 80


@pytest.mark.survive
def test_skew_command_needs_only_the_score_extra(two_exports, loaded_export, training_folder, tmp_path):
    write_log(tmp_path, loaded_export, scale_column_a(make_skew_rows(2, 400)))
    others = "ray torchrec fbgemm_gpu mlflow psutil matplotlib jinja2 starlette prometheus_client"
    code = f"import sys\nsys.modules |= dict.fromkeys('{others}'.split())\nfrom raytrec.cli import main; main()"
    words = ["skew", tmp_path, "--export", two_exports[0], "--data", training_folder, "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["differs"][0] == "a (values)"
