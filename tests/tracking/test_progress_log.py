"""The job log of a run: text lines for users, and machine-readable messages that are parsed again."""

from math import nan

import pytest
from recorded import RUN_METRICS

from raytrec.common.errors import RunError
from raytrec.compat.ray_core import JOB_CONFIG_VARIABLE
from raytrec.config.schema import Schema
from raytrec.config.tasks import TaskSection
from raytrec.driver.console import RunConsole
from raytrec.metrics.selection import MetricDisplay, Selection
from raytrec.tasks.task import resolve_tasks
from raytrec.tracking import progress_log as lines

NAME, FOLDER = "movielens-20261122-101500", "/shared/my [red] :eye: runs/movielens-20261122-101500"


@pytest.fixture
def job_console(monkeypatch, capsys):
    """Return a console in a job without a terminal, and a function that returns its output."""
    monkeypatch.setattr("raytrec.driver.console.PLAIN_LINE_INTERVAL_S", 0)
    monkeypatch.setenv("COLUMNS", "40")  # lines are not cut at the terminal width
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, "{}")
    return RunConsole(NAME), lambda: capsys.readouterr().err


def strip_messages_from(text):
    return "".join(lines.strip_messages(text))


def test_console_messages_are_parsed_as_written(job_console):
    console, out = job_console
    console.folder(FOLDER)
    console.start(total=550, step=0, workers=2, metrics=RUN_METRICS)
    console.train(step=60, logloss=0.61234, ne=1.01, rows_per_s=None, rows=100)
    console.train(step=120, logloss=0.51234, ne=0.9101, rows_per_s=80_000.4)
    console.eval(step=120, auc=0.78, ne=0.9, logloss=0.55, calibration=1.01, rows=100, curves={"roc": {}})
    console.warn("something else")
    console.phase("starting the workers")
    told = [found for line in out().splitlines() if (found := lines.parse(line))]
    assert told == [
        ("folder", {"folder": FOLDER}),
        ("start", {"total": 550, "step": 0, "workers": 2, "metrics": RUN_METRICS}),
        ("train", {"step": 60, "rows_per_s": None, "logloss": 0.61234, "ne": 1.01, "rows": 100}),
        ("train", {"step": 120, "rows_per_s": 80_000.4, "logloss": 0.51234, "ne": 0.9101}),
        ("eval", {"step": 120, "auc": 0.78, "ne": 0.9, "logloss": 0.55, "calibration": 1.01, "rows": 100}),
    ]


@pytest.mark.parametrize(("command", "text"), [("STOP", "saving a checkpoint"), ("RESTART", "asking the workers")])
def test_only_a_stop_announces_a_checkpoint(job_console, command, text):
    """Evaluations and predictions, which may be restarted as well, save no checkpoint."""
    console, out = job_console
    console.event(event="asked", command=command, reason="a reason")
    assert f"a reason: {text}" in out()


@pytest.mark.parametrize(("failed_step", "outcome"), [(None, "checkpoint saved"), (7, "checkpoint not saved")])
def test_stop_reports_failed_save(job_console, failed_step, outcome):
    console, out = job_console
    console.saved(6, "disk full")  # an earlier save does not matter
    console.saved(7, "disk full" if failed_step == 7 else None)
    console.stopped(7)
    assert out().splitlines()[-1] == f"{NAME}  stopped at step 7, {outcome}"


def test_loss_that_prints_like_log_loss_is_omitted():
    def figure(key, label):
        return MetricDisplay(key, label, label, "lower", "{:.4f}", sums=True)

    keys = {"loss": "loss", "logloss": "log loss", "buy.loss": "buy loss", "buy.logloss": "buy log loss"}
    figures = [figure(*each) for each in keys.items()]
    values = {"loss": 0.5, "logloss": 0.50001, "buy.loss": 0.4, "buy.logloss": 0.3}
    assert lines.named(figures, values) == ["log loss 0.5000", "buy loss 0.4000", "buy log loss 0.3000"]
    assert lines.named(figures, {"loss": 0.5, "logloss": nan}) == ["loss 0.5000"]


def test_result_and_error_messages_are_parsed_as_written(job_console, capsys):
    lines.write_message(lines.RESULT, {"eval.auc": 0.5, "eval.ne": nan})
    lines.write_message(lines.ERROR, RunError("bad rows", where="a file").parts)
    told = [lines.parse(line) for line in capsys.readouterr().out.splitlines()]
    assert told == [
        ("result", {"eval.auc": 0.5, "eval.ne": None}),
        ("error", RunError("bad rows", where="a file").parts),
    ]


def test_job_log_lines_are_plain_text(job_console):
    console, out = job_console
    with console:
        console.start(total=550, step=0, metrics=RUN_METRICS)
        console.train(step=60, logloss=0.6, ne=1.0, rows_per_s=80_000.0)
        console.eval(step=60, auc=0.78, ne=0.9, logloss=None, calibration=1.01, rows=100)
        console.train(step=550, logloss=0.5, ne=0.9, rows_per_s=80_000.0)
    text = strip_messages_from(out())
    assert "\x1b" not in text and "\r" not in text and text.isascii() and "{" not in text
    assert "step 60/550 (10%)  80,000 rows/s  NE 1.0000  log loss 0.6000\n" in text
    assert "step 60: AUC 0.7800  NE 0.9000  calibration 1.0100\n" in text
    assert text.rstrip().endswith("step 550/550 (100%)  80,000 rows/s  NE 0.9000  log loss 0.5000  ETA 0:00")


def test_messages_are_written_only_in_a_job(job_console, monkeypatch):
    monkeypatch.delenv(JOB_CONFIG_VARIABLE)
    _, out = job_console
    console = RunConsole(NAME)
    console.start(total=10, metrics=RUN_METRICS)
    console.train(step=5, ne=1.0, rows_per_s=10.0)
    assert strip_messages_from(text := out()) == text != ""
    lines.write_message(lines.RESULT, {"eval.auc": 0.5})
    assert out() == ""


def test_console_omits_undefined_figures(job_console):
    console, out = job_console
    console.start(total=10, step=0)
    console.train(step=5, logloss=nan, ne=nan, rows_per_s=10.0)
    text = out()
    assert "NE" not in text and "nan" not in text
    found = lines.parse(text.splitlines()[-1])
    assert found == ("train", {"step": 5, "rows_per_s": 10.0, "logloss": None, "ne": None})
    console.eval(step=4, auc=None, ne=nan)
    console.eval(step=5, auc=None, ne=0.9, logloss=nan)
    text = strip_messages_from(out())
    assert "step 4: no metric is defined\n" in text and "step 5: NE 0.9000\n" in text


def test_console_shows_custom_metrics_of_several_tasks(job_console):
    console, out = job_console
    hits = {"key": "click.hits", "title": "click: hits", "label": "click: hits", "better": "higher"}
    hits |= {"format": "{:.1%}", "sums": True}
    console.start(total=10, metrics=[hits, {**hits, "key": "like.spread", "label": "like: spread", "sums": False}])
    console.train(step=5, rows_per_s=10.0, **{"click.hits": 0.5, "like.spread": 0.1})
    console.eval(step=5, **{"click.hits": 0.5, "like.spread": 0.1})
    said = strip_messages_from(out())
    assert "10 rows/s  click: hits 50.0%\n" in said
    assert "step 5: click: hits 50.0%  like: spread 10.0%\n" in said


def test_console_shows_total_and_task_losses(job_console):
    console, out = job_console
    task = TaskSection(label="item", name="next", loss="from_model", metrics=["auc"])
    other = TaskSection(label="item", name="score", loss="mse", metrics=["mse"])
    sparse, tables = {"user": {"table": "user"}}, {"user": {"rows": 9, "dim": 4}}
    schema = Schema.parse({"labels": ["item"], "sparse": sparse, "tables": tables}, "here")
    described = Selection(resolve_tasks([task, other], schema)).describe_metrics(training=True)
    console.start(total=10, metrics=described)
    console.train(step=5, rows_per_s=10.0, **{"loss": 2.5, "next.loss": 2.0, "score.loss": 0.5})
    assert "10 rows/s  next: loss 2.0000  score: loss 0.5000  loss 2.5000\n" in strip_messages_from(out())


def test_strip_messages_keeps_all_other_lines():
    log = 'a\n{"raytrec": "train", "step": 3}\n{"other": 1}\nb {"raytrec": 2}\n\n{"raytrec": "eval"}\nend {'
    assert strip_messages_from(log) == 'a\n{"other": 1}\nb {"raytrec": 2}\n\nend {'


@pytest.mark.parametrize(
    "line",
    [
        "", "step 3/4", "warning: rank 1  step 3: x", "name  step 40: saved", "Traceback (most recent)",
        '{"raytrec": "train"}', '{"raytrec": "train", "step": "3"}', '{"raytrec": "exec", "step": 3}',
        '{"raytrec": "folder", "folder": 3}', '{"raytrec": [], "step": 3}', '{"raytrec": "train", "ste',
        '{"raytrec": "error", "what": 3}',
    ],
)  # fmt: skip
def test_parse_ignores_lines_that_are_not_messages(line):
    assert lines.parse(line) is None


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0:00"), (42.4, "0:42"), (3723, "1:02:03")])
def test_remaining_time_is_formatted_as_eta(seconds, text):
    assert lines.remaining(seconds) == f"ETA {text}"
