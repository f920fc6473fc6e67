"""Tests of `make quality`: configurations, resuming after an interruption, budgets, and the docs table."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import harness
import pyarrow.parquet as pq
import pytest
import quality
import yaml
from quality_baselines import DAY_S, DAYS
from quality_sources import write_sources
from quality_table import document, lines_of

from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema

REPO = Path(__file__).parents[1]


@pytest.fixture
def measurement(monkeypatch, tmp_path):
    """Return (function that measures a row, list of trained seeds). Every run reports one second."""
    row, trained = quality.chosen(quality.read_rows(), "ml100k_dlrm")[0], []
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    (tmp_path / "prepared.json").write_text('{"rows": {"train": 5}}')

    def run(row, settings, seed):
        trained.append(seed)
        if seed == 3:
            raise KeyboardInterrupt
        return {"seed": seed, "seconds": 1.0}

    monkeypatch.setattr(quality, "run", run)
    monkeypatch.setattr(quality, "open_session", lambda config: nullcontext())
    return lambda seeds, budget=100.0, row=row: quality.measure(row, tmp_path, seeds, budget), trained


def test_quality_configs_report_metrics_of_their_rows():
    rows = [row for row in quality.read_rows() if row.model not in quality.BASELINES]
    there = {path.stem for path in quality.JOBS.glob("*.yaml") if not path.stem.endswith(".schema")}
    assert {row.name for row in rows} == there and len(rows) == len(there)
    for row in rows:
        config = load_config(row.config)
        assert config.model.name == row.model
        assert Path(config.data.train) == Path(quality.PREPARED, row.data, "train")
        assert set(row.published.get("figures", {})) <= set(row.metrics)
        assert set(row.metrics.values()) <= evaluation_keys(config), row.name
        if config.data.schema_path:
            Schema.load(REPO / config.data.schema_path)


def evaluation_keys(config):
    """Return the keys of result.json that the evaluations of a configuration write."""
    if config.eval.retrieval:
        return {f"eval.retrieval.{name}@{k}" for name in ("hit_rate", "ndcg") for k in config.eval.retrieval.at}
    several = len(config.tasks) > 1
    named = [(f"{task.name or task.label}." if several else "", task.metrics) for task in config.tasks]
    return {f"eval.{start}{metric}" for start, metrics in named for metric in metrics or ["auc"]}


def test_interrupted_measurement_resumes_at_next_seed(measurement):
    measure, trained = measurement
    with pytest.raises(KeyboardInterrupt):
        measure(5)
    assert trained == [0, 1, 2, 3]
    measure(3)
    assert trained == [0, 1, 2, 3]
    kept = harness.load("quality")
    assert [run["seed"] for run in next(iter(kept.values()))["runs"]] == [0, 1, 2]


def test_changed_row_discards_only_own_runs(measurement):
    measure, trained = measurement
    one, other = quality.chosen(quality.read_rows(), "ml100k_dlrm,ml100k_dcn")
    for row in (one, other, replace(one, recipe="another")):
        measure(1, row=row)
    assert trained == [0, 0, 0]
    kept = harness.load("quality")
    assert set(kept) == {one.name, other.name} and kept[one.name]["recipe"] == "another"


def test_measurement_stops_before_budget_is_exceeded(measurement):
    measure, trained = measurement
    measure(3, budget=2.5)
    assert trained == [0, 1]
    measure(3, budget=3.5)
    assert trained == [0, 1, 2]


def test_rows_are_selected_by_name_model_or_data():
    rows = quality.read_rows()
    assert [row.name for row in quality.chosen(rows, "ml100k_dcn")] == ["ml100k_dcn"]
    assert {row.model for row in quality.chosen(rows, "dcn")} == {"dcn"}
    assert {row.data for row in quality.chosen(rows, "adult")} == {"adult"}
    with pytest.raises(Exception, match="unknown row nothing"):
        quality.chosen(rows, "nothing,dcn")


def test_quality_table_has_mean_and_std():
    published = {"figures": {"a": 0.5}, "source": "an author"}
    row = quality.Row("mf", "toys", {"a": "eval.a", "b": "eval.b"}, "x --source {source}/y", published)
    runs = [{"figures": {"a": 0.4, "b": 1}}, {"figures": {"a": 0.6, "b": 1}}]
    assert lines_of([row], {row.name: {"runs": runs}}) == [
        ("toys", "mf", "a", "0.5000 ± 0.1414", "2", "0.5"),
        ("", "", "b", "1.0000 ± 0.0000", "2", ""),
    ]
    logistic = replace(row, model="logistic regression")
    (line, _) = lines_of([logistic], {"toys_logistic": {"runs": runs[1:]}})
    assert line[3:] == ("0.6000", "1", "0.5")
    other = replace(row, model="ncf")
    text = document([row, other], {row.name: {"runs": runs}, other.name: {"runs": runs}})
    assert "raytrec prepare x --source SOURCE/y" in text and "- `toys`: an author" in text
    third = replace(other, model="sasrec", published={"figures": {"a": 0.6}, "source": "another"})
    text = document([row, other, third], {each.name: {"runs": runs} for each in (row, other, third)})
    assert "- `toys`, mf, ncf: an author" in text and "- `toys`, sasrec: another" in text
    assert lines_of([row], {}) == []


def test_logistic_baseline_learns_leaked_label(monkeypatch, tmp_path):
    """The AUC is 1 if a feature equals the label. The baseline is measured once for any number of seeds."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    write_sources(tmp_path)
    row = quality.chosen(quality.read_rows(), "adult_logistic")[0]
    folder = quality.prepare(row, tmp_path, tmp_path / "out")
    for split in ("train", "test"):
        table = pq.read_table(folder / split)
        place = table.schema.get_field_index("age")
        told = table.set_column(place, "age", table["income"].cast("float32"))
        pq.write_table(told, folder / split / "part-00000.parquet")
    quality.measure(row, folder, 5, 100.0)
    (run,) = harness.load("quality")["adult_logistic"]["runs"]
    assert run["figures"]["income"] == 1.0 and run["figures"]["never married"] < 1
    quality.measure(row, folder, 5, 100.0)
    alone = quality.measure_logistic(folder, {"AUC": "income"}, ["race", "sex"])
    assert alone["figures"]["AUC"] < 1 and alone["parameters"] < run["parameters"]


def test_popularity_baseline_matches_manual_ranking(tmp_path):
    write_sources(tmp_path)
    row = quality.chosen(quality.read_rows(), "ml100k_time_popularity")[0]
    folder = quality.prepare(row, tmp_path, tmp_path / "out")
    items = {item["item_key"]: item["item"] for item in pq.read_table(folder / "items").to_pylist()}
    lines = (tmp_path / "ml-100k/u.data").read_text().splitlines()
    met = [(int(when), items[int(item)]) for _, item, _, when in map(str.split, lines)]

    def figures(split, days):
        places = []
        for held in pq.read_table(folder / split).to_pylist():
            counts = dict.fromkeys(items.values(), 0.0)
            for when, item in met:
                if when < held["time"]:
                    counts[item] += 1e-6 + (when >= held["time"] - days * DAY_S)
            own = counts[held["item"]]
            places.append(sum(n > own for item, n in counts.items() if item not in held["seen"]))
        of_top = [1 / math.log2(place + 2) for place in places if place < 10]
        return len(of_top) / len(places), sum(of_top) / len(places)

    best = max(DAYS, key=lambda days: figures("valid", days)[1])
    found = quality.BASELINES["popularity"](folder, row.metrics, [])["figures"]
    assert list(found.values()) == pytest.approx(figures("test", best))


def test_recipes_prepare_synthetic_sources(tmp_path):
    write_sources(tmp_path)
    rows = {row.data: row for row in quality.read_rows()}
    prepared = {name: quality.prepare(row, tmp_path, tmp_path / "out") for name, row in rows.items()}
    assert set(prepared) == set(yaml.safe_load(quality.ROWS.read_text())["data"])
    assert all((folder / "schema.yaml").is_file() for folder in prepared.values())
    row = quality.read_rows()[0]
    assert quality.prepare(row, tmp_path / "nowhere", tmp_path / "out") is None


def test_quality_page_has_latest_table():
    assert harness.filled(quality.PAGE, "quality") == [document(quality.read_rows(), harness.load("quality"))]
