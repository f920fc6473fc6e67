"""Test remote runs without a cluster: metrics, the log of a job, and notebook output."""

import inspect
import json
import subprocess
import sys
from contextlib import nullcontext
from threading import RLock
from types import SimpleNamespace

import pytest

from raytrec import cli
from raytrec.client.job_run import JobApi, JobRun
from raytrec.client.notebook import Page, Pictures, render_curves, render_progress
from raytrec.client.ray_client import ClientRun, Connection
from raytrec.client.run import Run
from raytrec.common.errors import RunError
from raytrec.common.messages import Eval, Start, Train
from raytrec.tracking import progress_log as lines


class FakeRun(Run):
    """Run whose messages are set by the test."""

    folder = "/runs/mine"

    def take(self, *messages, state="running"):
        self._new, self._then = messages, state
        self._poll()
        return self

    def _read(self):
        self.state = self._then
        for message in self._new:
            self.history.add(message)
        self._new = ()


def start(step=0):
    return Start(total=100, step=step, workers=1)


def train(step, **figures):
    return Train(step=step, figures=figures)


def test_restart_replaces_metrics_after_its_step():
    run = FakeRun().take(start())
    assert run.progress()["step"] == 0 and run.progress()["eta_s"] is None
    run.take(*(train(step, logloss=1 / step, ne=None) for step in (10, 20, 30)))
    run.take(Eval(step=30, figures={"auc": 0.7}))
    run.take(start(10), train(20, logloss=9.0, ne=1.0, rows_per_s=5.0))
    metrics = run.metrics()
    trained = {"step": [10, 20], "logloss": [0.1, 9.0], "ne": [None, 1.0], "rows_per_s": [None, 5.0]}
    assert metrics["train"] == trained
    assert metrics["eval"]["auc"] == [0.7]
    assert run.progress()["logloss"] == 9.0
    assert run.history.restarts == [10]


def test_progress_estimates_the_remaining_time(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("raytrec.client.run.time", lambda: now[0])
    run = FakeRun().take(start(), train(10))
    now[0] += 5
    assert run.take(train(20)).progress()["eta_s"] == pytest.approx(40)
    assert run.take(state="finished").progress()["eta_s"] is None


def test_wait_returns_the_result_or_raises():
    run = FakeRun().take(state="finished")
    run.history.result = {"eval.auc": 0.5}
    assert run.wait() == {"eval.auc": 0.5}
    run = FakeRun().take(state="failed")
    run.error = RunError("bad rows", where="a file")
    with pytest.raises(RunError, match="bad rows"):
        run.wait()
    with pytest.raises(RunError, match="the run was stopped"):
        FakeRun().take(state="stopped").wait()
    with pytest.raises(RunError, match="the run has not ended after 0 s"):
        FakeRun().take().wait(timeout=0)


def test_notebook_shows_progress_and_escapes_html():
    run = FakeRun()
    assert "waiting" in render_progress("<mine>", run) and "<mine>" not in render_progress("<mine>", run)
    assert render_curves(run.take(train(1)).history) == b""
    figures = [train(step, logloss=1 / step, ne=0.9, rows_per_s=8e4) for step in (10, 20)]
    run.take(Start(total=40, step=0, workers=1), *figures)
    page = render_progress("mine", run)
    assert "width:50.0%" in page and "80,000 rows/s" in page and "log loss 0.0500" in page
    assert render_curves(run.history).startswith(b"\x89PNG")
    run.take(state="failed").error = RunError("<b>bad</b>")
    assert "&lt;b&gt;bad" in render_progress("mine", run)
    page = Page('<script>parent.document</script>"')._repr_html_()
    assert 'sandbox="allow-scripts"' in page and "<script>" not in page and "same-origin" not in page
    assert "data:image/png;base64,iVBO" in Pictures(roc=b"\x89PNG")._repr_html_()


class FakeJobs(JobApi):
    """Job API of a cluster with one job, whose log and status are set by the test; `later`: states of later jobs."""

    address, later = "http://127.0.0.1:8265", ()

    def __init__(self, log="", status="RUNNING"):
        self.log, self.now, self.started = log, status, []

    def read(self, job, log_offset):
        return self.log[log_offset:], self.now

    def _call_api(self, ask):
        return ask()

    @property
    def _client(self):
        jobs = [
            SimpleNamespace(submission_id=f"mine-{n + 1}", status=SimpleNamespace(value=state), start_time=5000 + n)
            for n, state in enumerate([self.now, *self.later])
        ]
        return SimpleNamespace(list_jobs=lambda: jobs)

    def message(self, job):
        return "no node"

    def start(self, command, runtime_env, name):
        self.started.append(command)
        self.log += lines.message(lines.RESULT, {"eval.auc": 0.75}) + "\n"
        self.now = "SUCCEEDED"
        return f"{name}-1"


def log(*messages):
    return "".join(f"{lines.message(kind, values)}\n" for kind, values in messages)


FOLDER = (lines.FOLDER, {"folder": "/runs/mine"})
START_LOG = log(FOLDER, ("start", {"total": 40, "step": 0, "workers": 2, "metrics": []}))


def test_job_run_follows_the_job_log():
    jobs = FakeJobs("waiting\n")
    run = JobRun(jobs, "mine-1")
    assert run.progress()["state"] == "starting"
    jobs.log += START_LOG + 'mine  step 10/40\n{"raytrec": "train", "step": 10, "ne": 0.9, "rows_p'
    assert run.progress() == {"step": 0, "total": 40, "rows_per_s": None, "state": "running", "eta_s": None}
    jobs.log += 'er_s": 5.0}\n{"raytrec": "start", "step": 0}\n'
    assert (run.folder, run.name, run.progress()["ne"]) == ("/runs/mine", "mine", 0.9)
    jobs.log += log(("eval", {"step": 20, "auc": 0.7}), (lines.RESULT, {"eval.auc": 0.7})) + "the end"
    jobs.now = "SUCCEEDED"
    assert run.wait() == {"eval.auc": 0.7} and run.metrics()["eval"]["auc"] == [0.7]
    assert list(run.logs()) == ["waiting\n", "mine  step 10/40\n", "the end\n"]


@pytest.mark.parametrize(
    ("written", "what", "expected"),
    [
        (log((lines.ERROR, {"what": "bad rows", "expected": "good ones"})), "bad rows", "good ones"),
        ("1\n\n2\n3\nValueError: x\n", "the job failed: 2 | 3 | ValueError: x", None),
        ("", "the job failed: no node", None),
    ],
)
def test_failed_job_raises_its_error(written, what, expected):
    run = JobRun(FakeJobs(START_LOG + written, "FAILED"), "mine-1")
    with pytest.raises(RunError) as error:
        run.wait()
    assert (error.value.what, error.value.expected) == (what, expected)
    run = JobRun(FakeJobs(written, "FAILED"), "mine-1")
    with pytest.raises(RunError, match=what):
        _ = run.folder


def test_job_without_a_run_has_no_folder():
    run = JobRun(FakeJobs(log((lines.RESULT, {"eval.auc": 0.7})), "SUCCEEDED"), "mine-1")
    with pytest.raises(RunError, match="ended without starting a run"):
        _ = run.folder
    assert run.wait() == {"eval.auc": 0.7}


def test_predict_starts_a_job_and_returns_its_result():
    jobs = FakeJobs(START_LOG)
    options = {"columns": ["a", "b"], "workers": None, "allow_code": True, "overrides": {"data.readers": 2}}
    figures = JobRun(jobs, "mine-1").predict("data/valid", "out", **options)
    assert figures == {"eval.auc": 0.75}
    words = "--set data.readers=2 --data data/valid --out out --allow-code --columns a,b"
    assert jobs.started == [f"python -m raytrec predict /runs/mine {words}"]


def test_job_api_recommends_ray_client_for_files():
    run = JobRun(FakeJobs(START_LOG), "mine-1")
    asks = run.tables, run.pictures, run.report, lambda: run.rows("user", [1]), lambda: run.file("plan.json")
    for ask in asks:
        with pytest.raises(RunError, match="cannot read the run folder") as error:
            ask()
        assert "ray://HOST:10001" in error.value.expected and "as a job" in error.value.do


def test_job_api_lists_jobs_as_runs():
    api = FakeJobs()
    assert api.runs() == [{"name": "mine-1", "folder": None, "state": "running", "unix_s": 5.0}]
    assert api.run("mine-1").job == "mine-1"
    with pytest.raises(RunError, match="there is no job 'mine'") as error:
        api.run("mine")
    assert "mine-1" in error.value.expected


@pytest.mark.parametrize("kind", [JobRun, ClientRun])
def test_runs_define_all_operations_that_the_base_class_leaves_open(kind):
    functions = {name: value for name, value in vars(Run).items() if inspect.isfunction(value)}
    missing = {name for name, value in functions.items() if "NotImplementedError" in value.__code__.co_names}
    assert "_ask" in missing and missing <= vars(kind).keys()


def test_calls_over_a_lost_connection_raise_run_errors(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("Client is shutting down.")

    connection = object.__new__(Connection)
    connection.address, connection._lock, connection._context = "ray://head:10001", RLock(), nullcontext()
    for name in ("wait", "get"):
        monkeypatch.setattr(f"ray.{name}", fail)
    remote = SimpleNamespace(remote=fail)
    for call in (connection.is_done, connection.result, lambda _: connection.start(remote)):
        with pytest.raises(RunError, match="lost the connection to the cluster: Client is shutting down"):
            call(None)


def test_client_modules_import_neither_torch_nor_ray():
    code = (
        "import sys, raytrec.client.run, raytrec.client.ray_client, raytrec.client.job_run\n"
        "print([name for name in ('torch', 'torchrec', 'ray', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == [], done.stderr


def test_stop_without_an_id_requires_a_single_running_job(monkeypatch, capsys):
    api = FakeJobs()
    monkeypatch.setattr("raytrec.client.jobs.Jobs", lambda address: api)
    monkeypatch.setattr("raytrec.client.job_run.stop", lambda jobs, job: print(f"stopped {job}"))
    for later, shown in (((), "stopped mine-1"), (("FAILED",), "stopped mine-1"), (("PENDING", "FAILED"), "")):
        api.later = later
        with pytest.raises(SystemExit) as ended:
            cli.main(["stop"])
        output = capsys.readouterr()
        assert output.out.strip() == shown and bool(ended.value.code) == (not shown)
    assert "2 jobs are running: mine-2, mine-1" in output.err and "raytrec stop JOB" in output.err
