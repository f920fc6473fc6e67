"""What can be asked of a run folder, and what cannot; how a run stands. No Ray."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from raytrec.client import answers
from raytrec.client import queries as peek
from raytrec.client.by_job import error_in
from raytrec.client.points import Points
from raytrec.common.errors import ConfigError, RunError
from raytrec.driver.driver_state import driver_of, record_driver

CONFIG = "run: {name: mine, dir: somewhere}\ndata: {train: data/train}\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """RAYTREC_ROOT with a run called mine."""
    monkeypatch.setenv("RAYTREC_ROOT", str(tmp_path))
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (tmp_path / "secret").write_text("secret")
    return tmp_path


def test_a_run_by_its_name_and_its_folder(root):
    folder = root / "runs" / "mine"
    assert peek.run_folder("mine") == peek.run_folder(str(folder)) == peek.run_folder("runs/mine") == folder
    assert [run["name"] for run in peek.runs()] == ["mine"]


@pytest.mark.parametrize(
    "run", ["", ".", "..", "../mine", "/etc", "/", "mine/..", "mine/../..", "secret", "runs"]
)
def test_what_is_no_run(root, run):
    with pytest.raises(RunError, match="there is no run"):
        peek.run_folder(run)


@pytest.mark.parametrize("text", ["", "[]", "run: 1", "run: {name: ../x}\ndata: {train: a}", "a: b", "{"])
def test_what_is_no_config_of_a_run(root, text):
    (root / "runs" / "mine" / "config.yaml").write_text(text)
    with pytest.raises(RunError, match="there is no run"):
        peek.run_folder("mine")


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "driver.lock", "checkpoints", "", "."])
def test_other_files(root, name):
    with pytest.raises(RunError, match="not a file to look at"):
        peek.file("mine", name)


def test_links_out_of_the_folder(root):
    folder = root / "runs" / "mine"
    (folder / "report.html").symlink_to(root / "secret")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "roc.png").symlink_to(root / "secret")
    for ask in (lambda: peek.file("mine", "report.html"), lambda: peek.pictures("mine")):
        with pytest.raises(RunError, match="link"):
            ask()
    with pytest.raises(RunError, match=r"no result.json \(yet\)"):
        peek.file("mine", "result.json")


def test_a_job_without_a_root(monkeypatch, tmp_path):
    monkeypatch.delenv("RAYTREC_ROOT", raising=False)
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "x"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    with pytest.raises(ConfigError, match="relative path"):
        peek.runs()


def test_news_since(root):
    metrics = root / "runs" / "mine" / "metrics.jsonl"
    first, second = {"kind": "train", "step": 1}, {"kind": "train", "step": 2}
    metrics.write_text(json.dumps(first) + "\n" + json.dumps(second)[:9])
    news = peek.news("mine", {})
    assert news["metrics"] == [first] and news["events"] == [] and news["log"] == ""
    with metrics.open("a") as file:
        file.write(json.dumps(second)[9:] + "\nno json\n")
    news = peek.news("mine", news["since"])
    assert news["metrics"] == [second]
    assert peek.news("mine", news["since"])["metrics"] == []


def test_how_a_run_ended(root):
    folder = root / "runs" / "mine"
    assert peek.news("mine", {})["state"] == "interrupted"
    with record_driver(folder):
        assert peek.news("mine", {})["state"] == "running"
        print("a line", file=sys.stderr)
    assert peek.news("mine", {})["state"] == "finished"
    assert peek.news("mine", {})["log"] == "a line\n"
    with pytest.raises(RunError), record_driver(folder):
        raise RunError("bad rows", where="a file", do="look")
    news = peek.news("mine", {})
    assert news["state"] == "failed"
    assert news["error"] == {"what": "bad rows", "where": "a file", "expected": None, "do": "look"}
    for asked in (KeyboardInterrupt, SystemExit):
        with pytest.raises(asked), record_driver(folder):
            raise asked
        assert peek.news("mine", {})["state"] == "stopped"
    (folder / "result.json").write_text('{"eval.auc": 0.5}')
    news = peek.news("mine", {})
    assert news["state"] == "finished" and news["result"] == {"eval.auc": 0.5}


DRIVES = """
import sys, time
from pathlib import Path
from raytrec.driver.driver_state import record_driver
with record_driver(Path(sys.argv[1])):
    print("drives", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def driver(root):
    """A process that drives the run."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVES, str(root / "runs" / "mine")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "drives\n"
    yield process
    process.kill()
    process.wait()


def test_a_driver_that_was_killed(driver):
    assert peek.news("mine", {})["state"] == "running"
    driver.kill()
    os.waitid(os.P_PID, driver.pid, os.WEXITED | os.WNOWAIT)
    assert peek.news("mine", {})["state"] == "interrupted"  # also while it is a zombie
    driver.wait()
    assert peek.news("mine", {})["state"] == "interrupted"
    with pytest.raises(RunError, match="not running: it is interrupted"):
        peek.stop("mine")


def test_a_process_with_the_same_number(root, driver):
    note = root / "runs" / "mine" / "driver.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"started": 1}))
    assert peek.news("mine", {})["state"] == "interrupted"


def test_stop_asks_the_driver(root, driver):
    peek.stop("mine")
    assert driver.wait(20) == -signal.SIGTERM


def test_the_note_names_the_job(root, monkeypatch):
    from raytrec.compat.ray_core import JOB_CONFIG as IN_JOB

    monkeypatch.setenv(IN_JOB, json.dumps({"metadata": {"job_submission_id": "mine-1"}}))
    with record_driver(root / "runs" / "mine"):
        note = driver_of(root / "runs" / "mine")
    assert note["job"] == "mine-1" and note["pid"] == os.getpid()


def test_answers_come_back_as_they_were():
    value = {"a": [1, None, "ä\n"], "png": b"\x00\xff", "rows": np.arange(6, dtype=np.float32).reshape(2, 3)}
    found = answers.decode(answers.encode(value))
    assert found["a"] == value["a"] and found["png"] == value["png"]
    assert found["rows"].dtype == np.float32
    np.testing.assert_array_equal(found["rows"], value["rows"])


def ask(root, *question):
    command = [sys.executable, "-m", "raytrec.client.answers", json.dumps(question)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def test_a_question_in_a_process_of_its_own(root):
    assert answers.answer_in("noise\n" + ask(root, "runs") + "more\n")[0]["name"] == "mine"
    with pytest.raises(RunError, match="did you mean 'mine'"):
        answers.answer_in(ask(root, "news", "mino", {}))
    with pytest.raises(RunError, match="no answer"):
        answers.answer_in("Traceback\nValueError: x\n")


@pytest.mark.parametrize(
    ("log", "what", "where"),
    [
        ("a line\nerror: bad rows\n  where:    a file\n  do:       look\nmore\n", "bad rows", "a file"),
        ("error: first\nerror: two\nlines\n  where:    x: y\n", "two\nlines", "x: y"),
        ("some terror: no\n", "the job failed", "job-1"),
        ("", "the job failed", "job-1"),
    ],
)
def test_the_error_in_a_log(log, what, where):
    error = error_in(log, "job-1")
    assert (error.what, error.where) == (what, where)


def news(state="running", metrics=(), events=(), **more):
    return {"state": state, "metrics": metrics, "events": events, "since": {}, **more}


def test_points_of_a_run_that_went_back():
    points = Points()
    points.take(news(events=[{"event": "start", "total": 100}]))
    assert points.progress()["step"] == 0 and points.progress()["eta_s"] is None
    points.take(
        news(metrics=[{"kind": "train", "step": s, "logloss": 1 / s, "ne": None} for s in (10, 20, 30)])
    )
    points.take(news(metrics=[{"kind": "eval", "step": 30, "auc": 0.7}]))
    again = {"kind": "train", "step": 20, "logloss": 9.0, "ne": 1.0, "rows_per_s": 5.0}
    points.take(news(events=[{"event": "start", "total": 100, "step": 10}], metrics=[again]))
    curves = points.curves()
    assert curves["train"] == {
        "step": [10, 20],
        "logloss": [0.1, 9.0],
        "ne": [None, 1.0],
        "rows_per_s": [None, 5.0],
    }
    assert curves["eval"]["auc"] == [0.7]
    assert points.progress()["logloss"] == 9.0
    assert points.history().restarts() == [10]


def test_the_time_that_is_left(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("raytrec.client.points.time", lambda: now[0])
    points = Points()
    points.take(news(events=[{"event": "start", "total": 100}], metrics=[{"kind": "train", "step": 10}]))
    now[0] += 5
    points.take(news(metrics=[{"kind": "train", "step": 20}]))
    assert points.progress()["eta_s"] == pytest.approx(40)
    points.take(news(state="finished"))
    assert points.progress()["eta_s"] is None


def test_what_a_notebook_shows():
    from raytrec.client.live import curves_png, progress_html
    from raytrec.client.run import Frame, Pictures

    points = Points()
    assert "waiting" in progress_html("<mine>", points) and "<mine>" not in progress_html("<mine>", points)
    train = [{"kind": "train", "step": s, "logloss": 1 / s, "ne": 0.9, "rows_per_s": 8e4} for s in (10, 20)]
    points.take(news(events=[{"event": "start", "total": 40}], metrics=train))
    page = progress_html("mine", points)
    assert "width:50.0%" in page and "80,000 rows/s" in page and "log loss 0.0500" in page
    assert curves_png(points).startswith(b"\x89PNG")
    points.take(news(state="failed", error={"what": "<b>bad</b>"}))
    assert "&lt;b&gt;bad" in progress_html("mine", points)
    frame = Frame('<script>parent.document</script>"')._repr_html_()
    assert 'sandbox="allow-scripts"' in frame and "<script>" not in frame and "same-origin" not in frame
    assert "data:image/png;base64,iVBO" in Pictures(roc=b"\x89PNG")._repr_html_()


def test_titles():
    from raytrec.client.items import Items

    items = Items(None, "item", {1: "Star Wars (1977)", 2: "Star Trek (1979)", 3: "Alien (1979)"})
    assert items.row("Alien (1979)") == items.row("alien") == items.row(3) == 3
    with pytest.raises(RunError, match="2 titles have 'Star' in them"):
        items.row("Star")
    with pytest.raises(RunError, match="Alien"):
        items.row("Alein (1979)")


def test_no_torch_and_no_ray_until_a_cluster_is_reached():
    code = (
        "import sys, raytrec.client.cluster, raytrec.client.queries, raytrec.client.run\n"
        "import raytrec.client.by_client, raytrec.client.by_job, raytrec.client.drive\n"
        "assert not {'torch', 'torchrec', 'ray', 'mlflow'} & set(sys.modules)"
    )
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert time.monotonic() - began < 30
