"""Comparison of runs: their differences on the terminal and on the page."""

import json
from dataclasses import replace

import pytest
from drawn_texts import find_text_collisions
from recorded import CONFIG_YAML, write_recorded_run
from test_report import HOSTILE_TEXT, CheckedPage

from raytrec.cli import main
from raytrec.common.errors import RunError
from raytrec.common.messages import Train
from raytrec.report.compare import compare, print_table, write
from raytrec.report.figures.learning import draw_overlay
from raytrec.report.report import build


def record_changed_run(folder, name, config=CONFIG_YAML, **result):
    """Record a run with other results and another configuration."""
    write_recorded_run(folder)
    before = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(before | {"name": name} | result))
    (folder / "config.yaml").write_text(config)
    return folder


@pytest.fixture
def two_runs(tmp_path):
    config = CONFIG_YAML.replace("lr: 0.02", "lr: 0.05").replace("2048", "4096").replace("mlflow", "other")
    figures = {"eval.auc": 0.8052, "train.rows": 2_048_000, "eval.ne": None}
    return [
        record_changed_run(tmp_path / "a", "first"),
        record_changed_run(tmp_path / "b", "second", config, **figures),
    ]


def test_comparison_shows_differences_from_the_first_run(two_runs):
    comparison = compare(two_runs)
    assert comparison.names == ["first", "second"]
    assert comparison.results["eval.auc"] == ["0.8100", "0.8052 (-0.0048)"]
    assert comparison.results["train.rows"] == ["1,024,000", "2,048,000 (+1,024,000)"]
    assert comparison.results["eval.ne"] == ["0.7800", "–"]
    assert comparison.results["world_size"] == ["2", "2 (+0)"]


def test_comparison_shows_only_different_config_keys(two_runs):
    assert compare(two_runs).config == {
        "data.global_batch_size": ["2048", "4096"],
        "optim.embeddings.lr": ["0.02", "0.05"],
    }
    (two_runs[1] / "config.yaml").write_text(CONFIG_YAML + "train: {max_grad_norm: null}\n")
    assert compare(two_runs).config == {"train.max_grad_norm": ["(not set)", "null"]}


def test_comparison_adds_folders_to_equal_run_names(tmp_path):
    runs = [record_changed_run(tmp_path / name, "same") for name in ("a", "b")]
    assert compare(runs).names == [f"same ({run})" for run in runs]


def test_comparison_includes_a_run_without_a_result(two_runs):
    (two_runs[0] / "result.json").unlink()
    comparison = compare(two_runs)
    assert comparison.results["eval.auc"] == ["–", "0.8052"]
    assert comparison.names == ["recorded", "second"]  # from config.yaml


def test_comparison_overlays_the_curves_of_all_runs(two_runs):
    comparison = compare(two_runs)
    made = draw_overlay(comparison.runs, comparison.names)
    final = "in evaluations (diamonds: final evaluation)"
    assert [picture.get_suptitle() for picture in made] == [
        "NE in training", "log loss in training", f"AUC {final}", f"NE {final}", f"log loss {final}"
    ]  # fmt: skip
    assert [find_text_collisions(picture) for picture in made] == [[]] * 5
    _, training, auc, _, _ = (axes for picture in made for axes in picture.axes)
    assert [line.get_label() for line in training.lines] == ["first", "second"]
    for line, run in zip(training.lines, comparison.runs, strict=True):
        assert list(line.get_ydata()) == [m.figure("logloss") for m in run.figures(Train)]
    assert [line.get_ydata()[-1] for line in auc.lines] == pytest.approx([0.796, 0.81, 0.796, 0.81])
    assert training.lines[0].get_color() != training.lines[1].get_color()


def test_legend_of_many_long_run_names_has_no_collisions(two_runs):
    comparison = compare(two_runs)
    names = [f"clicks-and-purchases-20261126-15385{i}" for i in range(6)]
    assert [find_text_collisions(picture) for picture in draw_overlay(comparison.runs * 3, names)] == [[]] * 5


def test_comparison_page_contains_curves_and_differences(two_runs, tmp_path):
    two_runs.append(record_changed_run(tmp_path / "c", HOSTILE_TEXT))
    page = CheckedPage(write(compare(two_runs), tmp_path / "compare.html"))
    assert page.tags.count("svg") == page.tags.count("figure") == 5  # as many side by side as fit
    for text in ("0.8052 (-0.0048)", "optim.embeddings.lr", "0.05", HOSTILE_TEXT[:25], str(two_runs[1])):
        assert text in page.text, text
    assert "sesame" not in (tmp_path / "compare.html").read_text()


def test_comparison_page_without_metrics_has_no_curves(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(CONFIG_YAML)
    page = CheckedPage(write(compare([tmp_path / "a", tmp_path / "b"]), tmp_path / "compare.html"))
    assert "svg" not in page.tags and "no" in page.text


def test_compare_refuses_folders_that_are_not_runs(two_runs, tmp_path):
    with pytest.raises(RunError, match="the run folder does not exist"):
        compare([two_runs[0], tmp_path / "nowhere"])
    with pytest.raises(RunError, match="cannot compare 1 run"):
        compare(two_runs[:1])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="no files of a run"):
        compare([two_runs[0], tmp_path / "empty"])


def test_unreadable_file_of_a_run_is_an_error_for_users(two_runs, tmp_path):
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(CONFIG_YAML)
    for command in (lambda: compare([two_runs[0], tmp_path / "run"]), lambda: build(tmp_path / "run")):
        with pytest.raises(RunError, match="a file of the run cannot be read: the path is a folder") as error:
            command()
        assert error.value.where == str(tmp_path / "run")


def test_compare_command_prints_and_writes_differences(two_runs, tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["compare", *map(str, two_runs), "--out", str(tmp_path / "x.html")])
    shown = capsys.readouterr().out
    assert "0.8052 (-0.0048)" in shown and "optim.embeddings.lr" in shown
    CheckedPage(tmp_path / "x.html")


def test_compare_never_cuts_keys(two_runs, capsys, monkeypatch):
    key = "optim.embeddings.learning_rate_" + "of_the_table_" * 6
    comparison = replace(compare(two_runs), config={key: ["0.1", "0.2"]})
    print_table(comparison)
    assert f"│ {key} │ 0.1   │ 0.2    │" in capsys.readouterr().out, "pipes get the whole line"
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal of 60 columns
    print_table(comparison)
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    assert "…" not in str(lines) and key in "".join(line[1].strip() for line in lines if len(line) > 3)
