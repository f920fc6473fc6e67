"""Metrics allowed for a task, metric names, and the display of results."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
from small import SCHEMA

import raytrec
from raytrec.common.errors import ConfigError
from raytrec.config.tasks import TaskSection
from raytrec.driver.console import Result, print_summary
from raytrec.metrics.registry import METRICS, GroupMetric, find_metric
from raytrec.metrics.results import build_slice_tables, format_result
from raytrec.metrics.selection import Selection, read_metric_displays
from raytrec.tasks.losses import Loss
from raytrec.tasks.task import resolve_tasks


def task(*metrics, predicts="probability", **changes):
    (found,) = resolve_tasks([TaskSection(label="y", metrics=[])], SCHEMA)
    loss = type("Given", (Loss,), {"of_rows": None, "predicts": predicts})()
    return replace(found, loss=loss, metrics=metrics, **changes)


def get_selection_error(*metrics, **about):
    with pytest.raises(ConfigError) as refused:
        Selection([task(*metrics, **about)])
    return refused.value


@pytest.mark.parametrize("places", ["0", "-1", "1.5", "", "ten", "01", "9999999999"])
def test_metric_k_must_be_a_positive_integer(places):
    with pytest.raises(ConfigError, match="metric recall is computed from the k highest scores, but k is") as refused:
        find_metric(f"recall@{places}")
    assert "recall@10" in str(refused.value)


def test_metric_names_accept_a_cutoff_k():
    ten = find_metric("ndcg@10")
    assert (ten.k, ten.name, ten.title, ten.label) == (10, "ndcg@10", "NDCG at 10", "NDCG@10")
    assert find_metric("ndcg@10") is ten and find_metric("ndcg@5").k == 5 and issubclass(ten, GroupMetric)
    with pytest.raises(ConfigError, match="metric auc does not support @3"):
        find_metric("auc@3")
    with pytest.raises(ConfigError, match="k is missing"):
        find_metric("recall")
    with pytest.raises(ConfigError, match="did you mean 'recall'"):
        find_metric("recal@3")
    metrics = Selection([task("recall@1", "recall@5", "mrr", group="u")])
    assert [figure.key for figure in metrics.figures] == ["recall@1", "recall@5", "mrr"]
    assert metrics.best("recall@5").better == "higher" and not metrics.figures[0].sums


def test_group_metrics_require_a_group_column():
    assert "metric gauc requires group" in get_selection_error("gauc").what
    assert "metric coverage@3 requires item" in get_selection_error("coverage@3", group="u").what
    assert "group and item" in get_selection_error("coverage@3").what
    Selection([task("gauc", "coverage@3", group="u", item="u")])


@pytest.mark.parametrize(
    ("predicts", "metrics"),
    [
        ("classes", ["auc", "ne", "calibration", "mse", "gauc", "ece"]),
        ("number", ["ne", "logloss", "ece", "accuracy"]),
        ("score", ["logloss", "calibration", "rmse", "mae", "accuracy"]),
    ],
)
def test_selection_rejects_metrics_that_do_not_fit_the_loss(predicts, metrics):
    for name in metrics:
        refused = get_selection_error(name, predicts=predicts, group="u")
        assert f"metric {name} does not support the predictions" in refused.what and name not in refused.expected.split(
            ", "
        )
        Selection([task(name, predicts=None, group="u")])
    suits = {"classes": ["accuracy", "logloss"], "number": ["auc", "rmse", "mrr"], "score": ["auc", "ndcg@3"]}
    Selection([task(*suits[predicts], predicts=predicts, group="u")])


def test_result_table_lists_counts_and_error_bounds():
    metrics = Selection([task("auc", "mrr", group="u")])
    figures = {"auc": 0.75, "auc_bound": 0.00012, "mrr": 0.5, "groups": 1200, "groups_without_positive": 7}
    rows = format_result(metrics.result(figures))
    texts = {row.title: row.text for row in rows.values()}
    assert texts["AUC: maximum error"] == "1.2e-04" and texts["groups"] == "1,200"
    assert texts["groups without a positive row (excluded)"] == "7"
    other = replace(task("mrr", group="u"), name="other")
    several = Selection([task("auc"), other]).result({"other.mrr": 0.5, "other.groups": 3})
    assert {row.title: row.text for row in format_result(several).values()}["other: groups"] == "3"


def test_slices_are_shown_as_tables():
    record = {"slice": "DE", "rows": 1234, "auc": 0.8, "calibration": None}
    found = {"slices": 2000, "largest": [record], "worst": [{**record, "auc_bound": 1e-4}]}
    (title, largest), (_, worst) = build_slice_tables({"eval.slices": {"y": {"country": found}}})
    assert title == "y: largest slices of country (2,000 values)"
    assert largest.columns == ["value", "rows", "AUC", "calibration"]
    assert [cell.text for cell in largest.rows[0]] == ["DE", "1,234", "0.8000", "–"]
    assert "maximum error" in worst.columns
    for strange in (None, {}, [1], {"y": 3}, {"y": {"c": {"largest": [3]}}}, {"y": {"c": {"worst": "x"}}}):
        assert build_slice_tables({"eval.slices": strange}) == []
    assert build_slice_tables({}) == [] and read_metric_displays({})


def test_console_and_report_show_slices(tmp_path, capsys):
    from raytrec.report.report import build

    record = {"slice": "<b>DE</b>", "rows": 1234, "auc": 0.8, "calibration": 1.01}
    found = {"slices": 2000, "largest": [record], "worst": []}
    result = {"name": "run", "eval.slices": {"y": {"country": found}}}
    print_summary(Result(result, tmp_path))
    assert "<b>DE</b>" in (out := capsys.readouterr().out) and "largest slices of country (2,000 values)" in out
    (tmp_path / "result.json").write_text(json.dumps(result))
    page = build(tmp_path)[0].read_text()
    assert "&lt;b&gt;DE&lt;/b&gt;" in page and "largest slices of country (2,000 values)" in page


ROOT = Path(raytrec.__file__).parent
EXEMPT_PATHS = ("metrics", "tasks/losses", "checks/parity/losses.py")  # a loss is also called mse


def find_metric_names(tree):
    """Yield (name, line) for metric names that are a string, the last part of a key, or an argument."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            last = node.value.replace("/", ".").rpartition(".")[2]
            if last in METRICS.parts:
                yield last, node.lineno
        # Pools have a method named map, and managed ids an attribute named map.
        if isinstance(node, ast.arg | ast.keyword) and node.arg in METRICS.parts.keys() - {"map"}:
            yield node.arg, getattr(node, "lineno", 0)
        if isinstance(node, ast.Attribute) and node.attr in METRICS.parts.keys() - {"map"}:
            yield node.attr, node.lineno


@pytest.mark.slow
def test_metric_names_appear_only_in_the_metrics_package():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(EXEMPT_PATHS)
        for name, line in find_metric_names(ast.parse(path.read_text()))
    ]
    assert not found, "metric names belong in raytrec/metrics:\n" + "\n".join(found)


def test_metric_name_search_finds_names():
    text = 'x["eval.auc"]; f("train/ne"); g(logloss=1)\ndef h(auc): "calibration"\n("ne", "none", "aucs")'
    assert [name for name, _ in find_metric_names(ast.parse(text))].count("ne") == 2
    assert {name for name, _ in find_metric_names(ast.parse(text))} == {"auc", "ne", "logloss"}


def test_builtin_metrics_have_a_module_and_a_docstring():
    for part in METRICS.parts.values():
        assert part.__module__.startswith("raytrec.metrics.builtin.") and part.__doc__
