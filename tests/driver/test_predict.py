"""`raytrec predict`: every row once, with the scores of the run; continued after real kills; refusals."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import numpy as np
import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrec.common.errors import ConfigError, DataError, RunError
from raytrec.driver import predict as predicting
from raytrec.driver import run as driver
from raytrec.driver.predict import predict


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return parquet.dataset(tmp_path_factory.mktemp("predict") / "d")


@pytest.fixture(scope="module")
def run(ray_cluster, folder, tmp_path_factory):
    """A run with two checkpoints."""
    values = parquet.settings(folder, tmp_path_factory.mktemp("predict") / "run", tracking__enabled=False)
    return driver.train(values | {"checkpoint": {"every_steps": 10}})


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """12 files without labels."""
    place = tmp_path_factory.mktemp("large") / "in"
    place.mkdir()
    whole = parquet.table(24_000, 9).drop(["label"])
    for i in range(12):
        pq.write_table(whole.slice(i * 2000, 2000), place / f"part-{i:02}.parquet", row_group_size=300)
    return place


def read(out):
    files = sorted(path for path in Path(out).rglob("*.parquet"))
    return pa.concat_tables([pq.ParquetFile(path).read() for path in files])


def outputs(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(Path(out).rglob("*.parquet"))}


def auc(labels, scores):
    """Of untied scores."""
    ranks = np.argsort(np.argsort(scores)) + 1.0
    positives = labels.sum()
    return (ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (
        positives * (len(labels) - positives)
    )


def test_the_scores_are_those_that_the_run_was_evaluated_with(run, folder, tmp_path):
    made = predict(run.path, folder / "test", tmp_path / "out", columns=["row,tags", "label"])
    assert made.columns == ["row", "tags", "label", "score"]
    found, given = read(tmp_path / "out"), parquet.table(1003, 2)
    assert found.drop(["score"]).equals(given.select(["row", "tags", "label"]))
    assert auc(given["label"].to_numpy(), found["score"].to_numpy()) == pytest.approx(
        run.metrics["eval.auc"], abs=2e-4
    )
    assert found["score"].type == pa.float32() and min(found["score"].to_pylist()) > 0
    figures = made.metrics
    assert (figures["predict.rows"], figures["predict.files"], figures["world_size"]) == (1003, 2, 2)
    assert figures["predict.rows_per_s"] > 0 and figures["predict.skipped_rows"] == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "_predictions.json",
        "part-0.parquet",
        "part-1.parquet",
    ]
    again = predict(run.path, folder / "test", tmp_path / "out", columns=["row", "tags", "label"])
    assert again.metrics["predict.rows_per_s"] is None, "nothing was left to do"
    assert again.metrics["predict.rows"] == 1003


def test_bad_rows_unknown_ids_empty_files_and_more_workers_than_files(run, tmp_path):
    """Rows that cannot be read keep their place, without a score; ids follow the table's rule."""
    table = parquet.table(90, 3)
    users, prices = table["user"].to_numpy().copy(), table["price"].to_numpy().copy()
    users[[4, 80]], prices[[7, 50]] = 1000, np.nan
    table = table.set_column(2, "user", pa.array(users)).set_column(1, "price", pa.array(prices))
    (tmp_path / "in" / "b").mkdir(parents=True)
    pq.write_table(table, tmp_path / "in/b/rows.parquet", row_group_size=40)
    pq.write_table(table.slice(0, 0), tmp_path / "in/none.parquet")
    (tmp_path / "in/broken.parquet").write_bytes(b"PAR1")
    rules = ["data.on_error=skip", "tables.user.out_of_range=hash"]
    made = predict(
        run.path, tmp_path / "in", tmp_path / "out", columns=["row"], workers=3, overrides=rules
    ).metrics
    assert (made["predict.rows"], made["predict.skipped_rows"], made["predict.skipped_files"]) == (90, 2, 1)
    assert (made["changed"], made["predict.changed_ids"], made["world_size"]) == ({"user": 2}, 2, 3)
    found = pq.ParquetFile(tmp_path / "out/b/rows.parquet").read()
    assert found["row"].to_pylist() == list(range(90))
    assert [i for i, score in enumerate(found["score"].to_pylist()) if score is None] == [7, 50]
    none = pq.ParquetFile(tmp_path / "out/none.parquet").read()
    assert none.num_rows == 0 and none.schema.equals(found.schema)
    with pytest.raises(DataError, match="column 'price' has NaN"):
        predict(run.path, tmp_path / "in/b", tmp_path / "other", overrides=rules[1:])


def steps_of(run):
    return sorted(int(path.name[5:]) for path in Path(run.path).glob("checkpoints/step-*"))


def test_what_is_refused(run, folder, tmp_path):
    data, out = folder / "test", tmp_path / "out"
    predict(run.path, data, out, columns=["row"])

    def refused(kind, *says, place=run.path, data=data, out=out, **options):
        with pytest.raises(kind) as error:
            predict(place, data, out, **{"columns": ["row"], **options})
        for text in says:
            assert text in str(error.value)

    refused(RunError, "no run or checkpoint here", place=tmp_path)
    refused(RunError, "no checkpoint of step 7", "one of the steps", checkpoint=7)
    refused(ConfigError, "--checkpoint is 'last'", checkpoint="last")
    refused(DataError, "no column 'rwo' to carry; did you mean 'row'", out=tmp_path / "o", columns=["rwo"])
    refused(ConfigError, "'row' is named twice", columns=["row", "row"])
    refused(ConfigError, "'score' would have the name", columns=["score"])
    refused(ConfigError, "among their input", out=folder / "test" / "scores")
    refused(ConfigError, "among their input", data=data / "part-0.parquet", out=data)
    refused(ConfigError, "other --columns: row", "choose another --out", columns=["row", "price"])
    refused(ConfigError, "holds predictions of", checkpoint=steps_of(run)[0])
    refused(ConfigError, "predictions of other rows", data=folder / "valid")
    refused(ConfigError, "holds other files, such as part-0", out=folder / "train")
    refused(ConfigError, "has no part in an evaluation", overrides=["model.top_mlp=[3]"])
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.csv").write_text("a")
    refused(DataError, "no Parquet files", data=tmp_path / "text")
    newest = steps_of(run)[-1]
    assert (
        predict(run.path, data, out, columns=["row"], checkpoint=str(newest)).metrics["predict.rows"] == 1003
    )


def workers():
    """Process ids of the Ray Train workers of this test's own cluster."""
    import ray

    actors = ray._private.state.actors().values()
    return sorted(
        a["Pid"] for a in actors if a["ActorClassName"] == "RayTrainWorker" and a["State"] == "ALIVE"
    )


def kill_when(written, out, everybody):
    """Kills a worker, or all of them, when so many files have been written; in a thread."""

    def go():
        deadline = time.monotonic() + 120
        while len(list(Path(out).rglob("*.parquet"))) < written and time.monotonic() < deadline:
            time.sleep(0.01)
        found = workers()
        for pid in found if everybody else found[:1]:
            os.kill(pid, signal.SIGKILL)

    thread = Thread(target=go, daemon=True)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def undisturbed(run, large, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    predict(run.path, large, out, columns=["row"])
    assert read(out)["row"].to_pylist() == list(range(24_000))
    return outputs(out)


@pytest.mark.parametrize("everybody", [False, pytest.param(True, marks=pytest.mark.survive)])
def test_killed_workers_leave_no_trace(run, large, undisturbed, tmp_path, everybody, capfd):
    killer = kill_when(3, tmp_path / "out", everybody)
    made = predict(run.path, large, tmp_path / "out", columns=["row"])
    killer.join()
    assert "died" in capfd.readouterr().err
    assert outputs(tmp_path / "out") == undisturbed
    assert made.metrics["predict.rows"] == 24_000


@pytest.mark.survive
def test_a_large_file_is_put_together_from_what_was_there(run, tmp_path, monkeypatch):
    """One file of several spans; all workers are killed when some have been written."""
    monkeypatch.setattr(predicting, "SPAN_ROWS", 512)
    (tmp_path / "in").mkdir()
    pq.write_table(parquet.table(24_000, 9), tmp_path / "in/one.parquet", row_group_size=600)
    predict(run.path, tmp_path / "in", tmp_path / "whole", columns=["row"])
    killer = kill_when(5, tmp_path / "out", True)
    predict(run.path, tmp_path / "in", tmp_path / "out", columns=["row"])
    killer.join()
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")
    assert read(tmp_path / "out")["row"].to_pylist() == list(range(24_000))


@pytest.mark.survive
def test_the_driver_is_killed_twice_at_random(run, large, undisturbed, tmp_path):
    """SIGKILL of the command at any moment after its first file; then the same command again."""
    words = ["predict", run.path, "--data", large, "--out", tmp_path / "out", "--columns", "row", "--json"]
    command = [sys.executable, "-m", "raytrec", *map(str, words)]
    chance, kept = random.Random(4), 0
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 200
        while process.poll() is None and len(list((tmp_path / "out").rglob("part-*.parquet"))) <= kept:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = len(list((tmp_path / "out").glob("part-*.parquet")))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*.parquet")}
    last = subprocess.run(command, capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert outputs(tmp_path / "out") == undisturbed
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert json.loads(last.stdout)["predict.rows"] == 24_000
