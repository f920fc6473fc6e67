"""Test queries about run folders and the states of a run, without Ray."""

import json
import os
import signal
import subprocess
import sys
import tracemalloc

import pytest

from raytrec.client import queries
from raytrec.common.errors import ConfigError, RunError
from raytrec.compat.ray_core import JOB_CONFIG_VARIABLE
from raytrec.driver.driver_state import read_driver_record, record_driver

CONFIG = "run: {name: mine, dir: somewhere}\ndata: {train: data/train}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folder of a run called mine below RAYTREC_ROOT."""
    monkeypatch.setenv("RAYTREC_ROOT", str(tmp_path))
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (tmp_path / "secret").write_text("secret")
    return folder


def test_run_is_found_by_name_and_by_folder(folder):
    assert [queries.run_folder(run) for run in ("mine", str(folder), "runs/mine")] == [folder] * 3
    assert [run["name"] for run in queries.runs()] == ["mine"]


def test_run_folder_rejects_paths_without_a_run(folder):
    for run in ("", ".", "..", "../mine", "/etc", "/", "mine/..", "mine/../..", "secret", "runs"):
        with pytest.raises(RunError, match="there is no run"):
            queries.run_folder(run)
    for text in ("", "[]", "run: 1", "run: {name: ../x}\ndata: {train: a}", "a: b", "{"):
        (folder / "config.yaml").write_text(text)
        with pytest.raises(RunError, match="there is no run"):
            queries.run_folder("mine")


def test_file_query_rejects_other_paths(folder):
    for name in ("../../secret", "/etc/passwd", "driver.lock", "checkpoints", "", "."):
        with pytest.raises(RunError, match="not a readable file of a run"):
            queries.file("mine", name)


def test_queries_reject_links_out_of_the_run_folder(tmp_path, folder):
    (folder / "report.html").symlink_to(tmp_path / "secret")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "roc.png").symlink_to(tmp_path / "secret")
    for ask in (lambda: queries.file("mine", "report.html"), lambda: queries.pictures("mine")):
        with pytest.raises(RunError, match="link"):
            ask()
    with pytest.raises(RunError, match=r"the run has not written result\.json"):
        queries.file("mine", "result.json")


def test_job_without_root_rejects_relative_paths(monkeypatch, tmp_path):
    monkeypatch.delenv("RAYTREC_ROOT", raising=False)
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "x"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    with pytest.raises(ConfigError, match="relative path"):
        queries.runs()


def test_news_returns_only_new_complete_lines(folder):
    metrics = folder / "metrics.jsonl"
    first, second = '{"kind": "train", "step": 1}\n', '{"kind": "train", "step": 2}\n'
    metrics.write_text(first + second[:9])
    news = queries.news("mine", {})
    assert news["lines"] == {"metrics.jsonl": first, "events.jsonl": "", "run.log": ""}
    with metrics.open("a") as file:
        file.write(second[9:])
    news = queries.news("mine", news["since"])
    assert news["lines"]["metrics.jsonl"] == second
    assert queries.news("mine", news["since"])["lines"]["metrics.jsonl"] == ""


def test_unterminated_line_uses_bounded_memory(folder):
    with open(folder / "metrics.jsonl", "wb") as file:
        file.truncate(1 << 30)  # zeros, without a line break
    tracemalloc.start()
    try:
        queries.news("mine", {"metrics.jsonl": (1 << 30) - (1 << 28)})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * queries.MAX_ANSWER_BYTES


def test_news_reports_how_the_run_ended(folder):
    assert queries.news("mine", {})["state"] == "interrupted"
    with record_driver(folder):
        assert queries.news("mine", {})["state"] == "running"
        print("a line", file=sys.stderr)
    assert queries.news("mine", {})["state"] == "finished"
    assert queries.news("mine", {})["lines"]["run.log"] == "a line\n"
    with pytest.raises(RunError), record_driver(folder):
        raise RunError("bad rows", where="a file", do="look")
    news = queries.news("mine", {})
    assert news["state"] == "failed"
    assert news["error"] == {"what": "bad rows", "where": "a file", "expected": None, "do": "look"}
    for asked in (KeyboardInterrupt, SystemExit):
        with pytest.raises(asked), record_driver(folder):
            raise asked
        assert queries.news("mine", {})["state"] == "stopped"
    (folder / "result.json").write_text('{"eval.auc": 0.5}')
    news = queries.news("mine", {})
    assert news["state"] == "finished" and news["result"] == {"eval.auc": 0.5}


DRIVER_PROGRAM = """
import sys, time
from pathlib import Path
from raytrec.driver.driver_state import record_driver
with record_driver(Path(sys.argv[1])):
    print("drives", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def driver(folder):
    """A process that drives the run."""
    command = [sys.executable, "-c", DRIVER_PROGRAM, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "drives\n"
    yield process
    process.kill()
    process.wait()


def test_run_of_a_killed_driver_is_interrupted(driver):
    assert queries.news("mine", {})["state"] == "running"
    driver.kill()
    os.waitid(os.P_PID, driver.pid, os.WEXITED | os.WNOWAIT)
    assert queries.news("mine", {})["state"] == "interrupted"  # also while it is a zombie
    driver.wait()
    assert queries.news("mine", {})["state"] == "interrupted"
    with pytest.raises(RunError, match="not running: its state is interrupted"):
        queries.stop("mine")


def test_reused_pid_is_not_mistaken_for_the_driver(folder, driver):
    note = folder / "driver.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"started": 1}))
    assert queries.news("mine", {})["state"] == "interrupted"


def test_stop_sends_sigterm_to_the_driver(folder, driver):
    queries.stop("mine")
    assert driver.wait(20) == -signal.SIGTERM


def test_driver_record_names_the_job(folder, monkeypatch):
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, json.dumps({"metadata": {"job_submission_id": "mine-1"}}))
    with record_driver(folder):
        note = read_driver_record(folder)
    assert note["job"] == "mine-1" and note["pid"] == os.getpid()
