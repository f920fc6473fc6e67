"""A metric's name stands in its own file, and among the defaults of losses; nowhere else in the code."""

import ast
from pathlib import Path

import raytrec
from raytrec.metrics.registry import METRICS

ROOT = Path(raytrec.__file__).parent
THEIRS = ("metrics", "tasks/losses", "checks/parity/losses.py")  # a loss is called mse, too


def names_in(tree):
    """(name, line) where a metric's name is a whole string, the last part of a key, or an argument."""
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
        if isinstance(node, ast.arg | ast.keyword) and node.arg in METRICS.parts:
            yield node.arg, getattr(node, "lineno", 0)
        if isinstance(node, ast.Attribute) and node.attr in METRICS.parts:
            yield node.attr, node.lineno


def test_no_name_of_a_metric_elsewhere():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(THEIRS)
        for name, line in names_in(ast.parse(path.read_text()))
    ]
    assert not found, "names of metrics belong into raytrec/metrics:\n" + "\n".join(found)


def test_that_names_are_found():
    text = 'x["eval.auc"]; f("train/ne"); g(logloss=1)\ndef h(auc): "calibration"\n("ne", "none", "aucs")'
    assert [name for name, _ in names_in(ast.parse(text))].count("ne") == 2
    assert {name for name, _ in names_in(ast.parse(text))} == {"auc", "ne", "logloss"}


def test_metrics_are_found_in_the_files_of_builtin():
    for part in METRICS.parts.values():
        assert part.__module__.startswith("raytrec.metrics.builtin.") and part.__doc__
