"""`raytrec predict` writes every row once with the scores of the run and continues after real kills."""

import json
import os
import random
import shutil
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
from rays import alive_worker_pids
from waiting import wait_for

from raytrec.driver import run as driver
from raytrec.prediction.predict import predict

pytestmark = pytest.mark.slow

ROWS, FILES = 12_000, 10
COLUMNS = ["row", "tags", "label"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a dataset whose test/ has 10 files of one span each."""
    folder = parquet.write_dataset(tmp_path_factory.mktemp("predict") / "d")
    shutil.rmtree(folder / "test")
    parquet.write_split(folder / "test" / "large", ROWS, 9, files=FILES)
    return folder


@pytest.fixture(scope="module")
def run(ray_cluster, folder, tmp_path_factory):
    values = parquet.config_values(folder, tmp_path_factory.mktemp("predict") / "run", tracking__enabled=False)
    return driver.train(values)


@pytest.fixture(scope="module")
def undisturbed_predictions(run, folder, tmp_path_factory):
    """Return uninterrupted predictions of test/."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    return predict(run.path, folder / "test", out, columns=["row,tags", "label"])


def read_all_predictions(out):
    files = sorted(path for path in Path(out).rglob("*.parquet"))
    return pa.concat_tables([pq.ParquetFile(path).read() for path in files])


def read_output_bytes(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(Path(out).rglob("*.parquet"))}


def compute_auc(labels, scores):
    """Return the AUC of scores without ties."""
    ranks = np.argsort(np.argsort(scores)) + 1.0
    positives = labels.sum()
    return (ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))


def test_predictions_match_the_evaluation_of_the_run(run, folder, undisturbed_predictions):
    assert undisturbed_predictions.columns == [*COLUMNS, "score"]
    found, given = read_all_predictions(undisturbed_predictions.path), parquet.make_tiny_table(ROWS, 9)
    assert found.drop(["score"]).equals(given.select(COLUMNS))
    assert found["score"].type == pa.float32() and min(found["score"].to_pylist()) > 0
    scores = found["score"].to_numpy()
    assert compute_auc(given["label"].to_numpy(), scores) == pytest.approx(run.metrics["eval.auc"], abs=1e-4)
    figures = undisturbed_predictions.metrics
    assert (figures["predict.rows"], figures["predict.files"], figures["world_size"]) == (ROWS, FILES, 2)
    assert figures["predict.rows_per_s"] > 0 and figures["predict.skipped_rows"] == 0
    assert sorted(path.name for path in Path(undisturbed_predictions.path).iterdir()) == ["_predictions.json", "large"]
    again = predict(run.path, folder / "test", undisturbed_predictions.path, columns=COLUMNS)
    assert again.metrics["predict.rows_per_s"] is None, "all files were already complete"
    assert again.metrics["predict.rows"] == ROWS


def test_predict_handles_bad_rows_and_empty_files(run, tmp_path):
    """Unreadable rows keep their position and have no score. Unknown ids follow the table's rule."""
    table = parquet.make_tiny_table(90, 3).drop(["label"])
    users, prices = table["user"].to_numpy().copy(), table["price"].to_numpy().copy()
    users[[4, 80]], prices[[7, 50]] = 1000, np.nan
    table = table.set_column(1, "user", pa.array(users)).set_column(0, "price", pa.array(prices))
    (tmp_path / "in" / "b").mkdir(parents=True)
    pq.write_table(table, tmp_path / "in/b/rows.parquet", row_group_size=40)
    pq.write_table(table.slice(0, 0), tmp_path / "in/none.parquet")
    (tmp_path / "in/broken.parquet").write_bytes(b"PAR1")
    rules = ["data.on_error=skip", "tables.user.out_of_range=hash"]
    made = predict(run.path, tmp_path / "in", tmp_path / "out", columns=["row"], workers=3, overrides=rules).metrics
    assert (made["predict.rows"], made["predict.skipped_rows"], made["predict.skipped_files"]) == (90, 2, 1)
    assert (made["changed"], made["predict.changed_ids"], made["world_size"]) == ({"user": 2}, 2, 3)
    found = pq.ParquetFile(tmp_path / "out/b/rows.parquet").read()
    assert found["row"].to_pylist() == list(range(90))
    assert [i for i, score in enumerate(found["score"].to_pylist()) if score is None] == [7, 50]
    none = pq.ParquetFile(tmp_path / "out/none.parquet").read()
    assert none.num_rows == 0 and none.schema.equals(found.schema)


def kill_workers_after(written, out, everybody):
    """Start a thread that kills one or all workers once `written` files exist."""

    def go():
        wait_for(lambda: len(list(Path(out).rglob("*.parquet"))) >= written, "file", 120)
        for pid in alive_worker_pids()[: None if everybody else 1]:
            os.kill(pid, signal.SIGKILL)

    thread = Thread(target=go, daemon=True)
    thread.start()
    return thread


@pytest.mark.survive
@pytest.mark.parametrize("everybody", [False, True])
def test_killed_workers_do_not_change_predictions(run, folder, undisturbed_predictions, tmp_path, everybody, capfd):
    killer = kill_workers_after(1, tmp_path / "out", everybody)
    again = predict(run.path, folder / "test", tmp_path / "out", columns=COLUMNS)
    killer.join()
    assert "died" in capfd.readouterr().err
    assert read_output_bytes(tmp_path / "out") == read_output_bytes(undisturbed_predictions.path)
    assert again.metrics["predict.rows"] == ROWS


@pytest.mark.survive
def test_predict_continues_after_two_killed_drivers(run, folder, undisturbed_predictions, tmp_path):
    """Kill the command at a random time after its first file, then run the same command again."""
    words = ["--data", folder / "test", "--out", tmp_path / "out", "--columns", "row,tags", "--columns=label"]
    command = [sys.executable, "-m", "raytrec", "predict", *map(str, [run.path, *words]), "--json"]
    chance, kept = random.Random(4), 0

    def files():
        return list((tmp_path / "out").glob("large/part-*.parquet"))

    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: process.poll() is not None or len(files()) > kept, "next file", 200)  # noqa: B023
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = len(files())
    before = {path: path.stat().st_mtime_ns for path in files()}
    last = subprocess.run(command, capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert read_output_bytes(tmp_path / "out") == read_output_bytes(undisturbed_predictions.path)
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert json.loads(last.stdout)["predict.rows"] == ROWS
