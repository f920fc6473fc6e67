"""Metrics summed over ranks, compared with their definitions, and resumed on other rank counts."""

import sys
from math import isnan, log
from types import SimpleNamespace

import pytest
import torch
from operators import OperatorCounter
from ranks import run_on_ranks
from small import make_small_schema

from raytrec.common.errors import ConfigError
from raytrec.config.tasks import TaskSection
from raytrec.metrics.builtin import errors
from raytrec.metrics.registry import METRICS, SumMetric, find_metric, metric
from raytrec.metrics.selection import Selection, read_metric_displays
from raytrec.metrics.sums import MetricSums
from raytrec.tasks.outputs import StepOutputs, TaskOutputs
from raytrec.tasks.task import resolve_tasks

BATCHES, ROWS = 13, 40
SCHEMA = make_small_schema(labels=["click", "watched"])
TWO_TASKS = [{"label": "click"}, {"label": "watched", "loss": "mse", "metrics": ["mae", "mse"]}]


def selection(tasks):
    return Selection(resolve_tasks([TaskSection(**task) for task in tasks], SCHEMA))


def parts(task, labels_of):
    """Return logits, labels and weights, float32 [BATCHES × ROWS], with padding rows and ties."""
    torch.manual_seed(len(task))
    logits = (torch.randn(BATCHES * ROWS) * 4).round() / 4
    weights = (torch.arange(BATCHES * ROWS) % 9 != 8).float()
    return logits, labels_of(logits), weights


def click():
    return parts("click", lambda logits: (torch.rand(len(logits)) < (logits - 1).sigmoid()).float())


def watched():
    return parts("watched", lambda logits: logits + torch.randn(len(logits)) * 3)


def batches(of, rank=0, world=1):
    """Yield the outputs of this rank's rows of each batch; the shares of ranks are unequal."""
    data = {"click": (*click(), torch.sigmoid), "watched": (*watched(), lambda logits: logits)}
    ends = [round(ROWS * (r / world) ** 1.5) for r in range(world + 1)]
    for step in range(BATCHES):
        rows = slice(step * ROWS + ends[rank], step * ROWS + ends[rank + 1])
        tasks = {}
        for task in of.tasks:
            logits, labels, weights, predict = data[task]
            tasks[task] = TaskOutputs(logits[rows], predict(logits[rows]), labels[rows], weights[rows])
        yield StepOutputs(tasks, next(iter(tasks.values())).weights, torch.zeros(()))


def sum_metrics(rank, world, tasks, first=0, total=None):
    """Return (sums after 3 steps, metrics of all batches from `first`) of these tasks."""
    of = selection(tasks)
    sums = MetricSums(of, torch.device("cpu"))
    if total:
        sums.resume(total)
    so_far = None
    for step, outputs in enumerate(batches(of, rank, world)):
        if step == 3:
            so_far = sums.total()
        if step >= first:
            sums.add(outputs)
    return so_far, sums.reduce()


def compute_reference(logits, labels, weights):
    """Return log loss, NE, calibration and AUC."""
    from test_over_ranks import ROW_REFERENCES  # ranks do not need scikit-learn

    y, p, w = (x.double().numpy() for x in (labels, logits.double().sigmoid(), weights))
    return {name: ROW_REFERENCES[name](y, p, w) for name in ("logloss", "ne", "calibration", "auc")}


@pytest.mark.slow
def test_metric_sums_equal_torchrecs():
    """The sums equal TorchRec's functions on the pending steps, summed in float64."""
    from torchrec.metrics.calibration import compute_calibration, get_calibration_states
    from torchrec.metrics.ne import compute_logloss, compute_ne, get_ne_states

    ((_, figures),) = run_on_ranks(1, sum_metrics, TWO_TASKS[:1])
    total = torch.zeros(6, dtype=torch.float64)
    steps = [outputs["click"] for outputs in batches(selection(TWO_TASKS[:1]))]
    for held in steps[:3], steps[3:11], steps[11:]:  # saved after 3 steps; at most 8 are pending
        own = [torch.cat([getattr(s, name) for s in held]) for name in ("labels", "predictions", "weights")]
        ne, calibration = get_ne_states(*own, 1e-12), get_calibration_states(*own)
        total += torch.stack([value.double() for value in (*ne.values(), *calibration.values())])
    entropy, rows, positive, negative, predicted, labelled = total
    assert figures["logloss"] == float(compute_logloss(entropy, positive, negative, 1e-12)) * log(2)
    assert figures["ne"] == pytest.approx(float(compute_ne(entropy, rows, positive, negative, 1e-12)), rel=1e-14)
    assert figures["calibration"] == float(compute_calibration(predicted, labelled))


@pytest.mark.parametrize("weight", [1.0, 1e-13, 1e-30])
def test_log_loss_and_ne_do_not_depend_on_the_size_of_weights(weight):
    labels, predictions, weights = torch.tensor([0.0, 1, 1, 1]), torch.full((4,), 0.5), torch.full((4,), weight)
    sums = errors.sum_entropy(SimpleNamespace(labels=labels, predictions=predictions, weights=weights.double()))
    assert errors.LogLoss.figure(sums) == pytest.approx(log(2))
    assert errors.NE.figure(sums) == pytest.approx(log(2) / -(0.25 * log(0.25) + 0.75 * log(0.75)))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 2), (1, 1)])
def test_metric_sums_resume_on_any_number_of_ranks(before, after):
    so_far, whole = run_on_ranks(before, sum_metrics, TWO_TASKS)[0]
    resumed = run_on_ranks(after, sum_metrics, TWO_TASKS, 3, so_far)
    assert resumed[0][1] == pytest.approx(whole, rel=1e-6), "sums within a batch are float32"
    if before == after:
        assert resumed[0][1] == pytest.approx(whole, rel=1e-14)
    forgotten = run_on_ranks(after, sum_metrics, TWO_TASKS, 3)[0][1]
    assert forgotten["rows"] < whole["rows"]


def test_metric_sums_launch_kernels_only_every_few_steps(monkeypatch):
    """The sums stay complete with pending steps, and the number of pending logits is limited."""
    from raytrec.metrics import sums as module

    of = selection(TWO_TASKS)
    sums, given = module.MetricSums(of, torch.device("cpu")), list(batches(of))
    with OperatorCounter() as operators:
        for outputs in given[: module.MAX_PENDING_STEPS - 1]:
            sums.add(outputs)
        assert not operators.calls
        sums.add(given[module.MAX_PENDING_STEPS - 1])
        assert 0 < operators.calls.total() < 12 * module.MAX_PENDING_STEPS
    whole = sums.reduce()
    monkeypatch.setattr(module, "MAX_PENDING_LOGITS", 3 * 2 * ROWS)  # 3 steps of both tasks
    for outputs in given[: module.MAX_PENDING_STEPS]:
        sums.add(outputs)
        assert len(sums._pending) < 3
    assert sums.reduce() == pytest.approx(whole, rel=1e-6) and whole["rows"] > 0


def make_step_outputs(click_weights, watched_weights):
    """Return outputs of two tasks with losses; rows can have weight 0 in both tasks."""
    made = {}
    for name, weights in (("click", click_weights), ("watched", watched_weights)):
        values = torch.tensor([0.25, 0.75])
        made[name] = TaskOutputs(values, values, torch.tensor([0.0, 1.0]), torch.tensor(weights))
    losses = {name: own.weights.sum() for name, own in made.items()}
    return StepOutputs(made, torch.ones(2), torch.zeros(()), losses=losses)


@pytest.mark.parametrize("click_weights", [[0.0, 0.0], [0.0, 2.0]])
def test_metrics_without_counted_rows_are_nan(click_weights):
    of = selection([TWO_TASKS[0] | {"mask": "seen"}, TWO_TASKS[1] | {"nulls": "error"}])
    sums = MetricSums(of, torch.device("cpu"))
    sums.add(make_step_outputs(click_weights, [1.0, 1.0]))
    figures = sums.reduce()
    counted = sum(w > 0 for w in click_weights)
    assert figures["rows"] == 2 and figures["click.counted_rows"] == counted
    assert "watched.counted_rows" not in figures
    for name in ("logloss", "calibration", "loss"):
        assert isnan(figures[f"click.{name}"]) == (not counted), name
    assert figures["watched.loss"] == 1 and figures["loss"] == 1 + sum(click_weights) / 2
    sums.add(make_step_outputs([0.0, 0.0], [0.0, 0.0]))
    assert isnan(sums.reduce()["loss"])


def resume_without_steps(rank, world, total):
    """Return the metrics without any step, and the sums saved directly after a restore."""
    sums = MetricSums(selection(TWO_TASKS), torch.device("cpu"))
    empty = sums.reduce()
    sums.resume(total)
    return empty, sums.total()


def test_metric_sums_before_the_first_step_are_empty():
    total = run_on_ranks(1, sum_metrics, TWO_TASKS)[0][0]
    for empty, same in run_on_ranks(2, resume_without_steps, total):
        assert empty == {"rows": 0} and same == total


def evaluate_tasks(rank, world, tasks):
    from raytrec.worker.evaluate import evaluate

    of = selection(tasks)
    rows = int(sum(float(outputs.rows.sum()) for outputs in batches(of)))
    stream = SimpleNamespace(batches=list, may_skip=False, dataset=SimpleNamespace(rows=rows, uri="here"))
    step = SimpleNamespace(evaluate=lambda _: batches(of, rank, world))
    return evaluate(step, stream, torch.device("cpu"), of)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_tasks_have_separate_metrics(world):
    (figures, curves), *others = run_on_ranks(world, evaluate_tasks, TWO_TASKS)
    assert {name: figures[f"click.{name}"] for name in ("logloss", "ne", "calibration", "auc")} == (
        pytest.approx(compute_reference(*click()), abs=1e-6)
    )
    logits, labels, weights = watched()
    errors = (logits - labels).double()[weights > 0]
    assert figures["watched.mae"] == pytest.approx(float(errors.abs().mean()), rel=1e-6)
    assert figures["watched.mse"] == pytest.approx(float(errors.square().mean()), rel=1e-6)
    assert figures["rows"] == len(errors) and figures["skipped_rows"] == 0
    assert figures["click.positives"] == float(click()[1][weights > 0].sum())
    assert "watched.auc" not in figures
    assert all(other["click.auc"] == figures["click.auc"] and drawn is None for other, drawn in others)
    assert set(curves) == {"click.roc", "click.reliability"}
    assert curves["click.roc"]["metric"] == "click.auc"
    assert sum(curves["click.reliability"]["rows"]) == figures["rows"]


def test_single_task_metrics_have_no_prefix():
    figures, curves = run_on_ranks(1, evaluate_tasks, TWO_TASKS[:1])[0]
    names = {"auc", "ne", "logloss", "calibration", "positives", "rows", "skipped_rows"}
    assert set(figures) == names and set(curves) == {"roc", "reliability"}
    figures, curves = run_on_ranks(2, evaluate_tasks, TWO_TASKS[1:])[0]
    assert set(figures) == {"mae", "mse", "rows", "skipped_rows"} and curves is None


USER_METRICS = """
from raytrec.metrics.registry import SumMetric, metric


@metric("hits_at_half", title="hits at 0.5", label="hits", better="higher", format="{:.1%}")
class HitRate(SumMetric):
    @staticmethod
    def sums(outputs):
        hits = (outputs.predictions > 0.5) == (outputs.labels > 0.5)
        return {"hits": (hits * outputs.weights).sum(), "rows": outputs.weights.sum()}

    @staticmethod
    def figure(sums):
        return sums["hits"] / sums["rows"]


@metric("spread")
class Spread(SumMetric):
    @staticmethod
    def sums(outputs):
        return {"far": ((outputs.predictions - 0.5).abs() * outputs.weights).sum()}

    @staticmethod
    def figure(sums):
        return sums["far"]


class NoName(SumMetric):
    pass


@metric("auc")
class Taken(SumMetric):
    pass
"""


def evaluate_user_metrics(rank, world, folder):
    sys.path.insert(0, folder)
    tasks = [{"label": "click", "metrics": ["metrics_of_mine:HitRate", "ne", "metrics_of_mine:Spread"]}]
    of = selection(tasks)
    return *evaluate_tasks(rank, world, tasks), of.describe_metrics(), compute_metrics_without_rows(of)


def compute_metrics_without_rows(of):
    sums = MetricSums(of, torch.device("cpu"))
    sums.add(make_step_outputs([0.0, 0.0], [0.0, 0.0]))
    return sums.reduce()


@pytest.mark.slow
def test_user_metric_runs_on_two_ranks(tmp_path):
    (tmp_path / "metrics_of_mine.py").write_text(USER_METRICS)
    (figures, curves, described, of_none), (other, *_) = run_on_ranks(2, evaluate_user_metrics, str(tmp_path))
    logits, labels, weights = click()
    real = weights > 0
    hits = ((logits.sigmoid() > 0.5) == (labels > 0.5))[real].double().mean()
    assert figures["hits_at_half"] == other["hits_at_half"] == pytest.approx(float(hits))
    p = logits[real].double().sigmoid()
    assert figures["spread"] == other["spread"] == pytest.approx(float((p - 0.5).abs().sum()))
    assert figures["ne"] == pytest.approx(compute_reference(logits, labels, weights)["ne"], abs=1e-6) and not curves
    assert isnan(of_none["spread"]) and isnan(of_none["hits_at_half"])
    hit_rate, _, spread = read_metric_displays({"metrics": described})
    assert (hit_rate.title, hit_rate.text(0.5), hit_rate.better) == ("hits at 0.5", "50.0%", "higher")
    assert (spread.title, spread.better, spread.sums) == ("spread", None, True)


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("loglos", "there is no metric 'loglos'; did you mean 'logloss'"),
        ("no_such_module:X", "no module named 'no_such_module'"),
        ("metrics_of_mine:Hitrate", "the module has no attribute 'Hitrate'; did you mean 'HitRate'"),
        ("metrics_of_mine:NoName", "not a metric class"),
        ("metrics_of_mine:SumMetric", "not a metric class"),
        ("metrics_of_mine:metric", "not a metric class"),
        ("metrics_of_mine:Taken", "the metric name 'auc' of metrics_of_mine:Taken is already used by raytrec"),
    ],
)
def test_unknown_metric_is_rejected(tmp_path, monkeypatch, reference, text):
    (tmp_path / "metrics_of_mine.py").write_text(USER_METRICS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=text):
        find_metric(reference)


def test_decorated_function_is_rejected():
    with pytest.raises(ConfigError, match="<lambda> is not a metric"):
        metric("hits")(lambda outputs: outputs)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("Hits", {}, "is not a valid metric name"),
        ("rows", {}, "the metric name 'rows' is reserved"),
        ("hits", {"better": "more"}, "better=.more. is invalid"),
        ("hits", {"format": "{0.__class__}"}, "format=.* is invalid"),
        ("hits", {"format": "{:99999999.4f}"}, "format=.* is invalid"),
    ],
)
def test_invalid_metric_definition_is_rejected(name, options, text):
    with pytest.raises(ConfigError, match=text):
        metric(name, **options)(type("Hits", (SumMetric,), {}))
    with pytest.raises(ConfigError, match="a subclass"):
        metric("hits")(int)
    assert metric("hits")(type("Hits", (SumMetric,), {})).title == "hits"


@pytest.mark.parametrize(
    ("tasks", "key", "best"),
    [
        (TWO_TASKS[:1], None, "ne"),
        (TWO_TASKS[:1], "auc", "auc"),
        (TWO_TASKS[:1], "calibration", "calibration"),
        (TWO_TASKS[1:], None, "mae"),
        (TWO_TASKS, None, "click.ne"),
        (TWO_TASKS, "watched.mse", "watched.mse"),
        ([{"label": "click", "metrics": ["calibration", "auc"]}], None, "auc"),
    ],
)
def test_best_metric_defaults_by_task(tasks, key, best):
    assert selection(tasks).best(key).key == best


def test_invalid_best_metric_is_rejected():
    with pytest.raises(ConfigError, match=r"but the tasks have no metric with this name.*did you mean 'click.auc'"):
        selection(TWO_TASKS).best("clik.auc")
    with pytest.raises(ConfigError, match=r"checkpoint\.best_metric is ne"):
        selection(TWO_TASKS).best("ne")
    with pytest.raises(ConfigError, match="the tasks have no metric whose values can be ranked"):
        selection([{"label": "click", "metrics": []}]).best(None)
    with pytest.raises(ConfigError, match="task click has the metric 'ne' twice"):
        selection([{"label": "click", "metrics": ["ne", "auc", "ne"]}])


def test_foreign_metric_descriptions_are_not_executed():
    evil = {"key": "x", "title": "X", "label": "x", "better": None, "sums": 1}
    (figure,) = read_metric_displays({"metrics": [{**evil, "format": "{0.__class__.__mro__}"}, {"key": 3}, "x", None]})
    assert figure.text(0.5) == "0.5" and not figure.sums
    unknown = read_metric_displays({"metrics": [{**evil, "better": "worse"}]})
    assert {figure.key for figure in unknown} == METRICS.parts.keys()
    (figure,) = read_metric_displays({"metrics": {}}, {"metrics": [{**evil, "format": 3}]})
    assert figure.key == "x"
