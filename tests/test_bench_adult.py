"""`make bench-adult` in parts: what interruptions leave, logistic regression, the table in the documents."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

REPO = Path(__file__).parents[1]
RUNS = [
    {"set": "income alone", "seed": 0, "income": 0.8},
    {"set": "income alone", "seed": 1, "income": 0.9},
    {"set": "never_married alone", "seed": 0, "never_married": 0.7},
    {"set": "both", "seed": 0, "income": 0.85, "never_married": 0.75},
    {"set": "both", "seed": 1, "income": 0.85, "never_married": 0.77},
]
REGRESSION = {"income": 0.6, "never_married": 0.65}


@pytest.fixture
def adult(monkeypatch):
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    import adult

    return adult


def test_means_and_standard_deviations_over_seeds(adult):
    lines = adult.rows_of({"runs": RUNS, "logistic regression": REGRESSION})
    assert lines == [
        ("each task alone", "0.8500 ± 0.0707", "0.7000"),
        ("both, shared bottom", "0.8500 ± 0.0000", "0.7600 ± 0.0141"),
        ("logistic regression", "0.6000", "0.6500"),
    ]
    assert adult.document(lines).splitlines()[2] == "| each task alone | 0.8500 ± 0.0707 | 0.7000 |"


def test_an_interrupted_measurement_of_the_same_goes_on(adult, tmp_path):
    kept, of = tmp_path / "measured.json", {"config": "a", "seeds": 2}
    assert adult.left_by_an_interruption(kept, of) == of | {"runs": []}
    kept.write_text(json.dumps(of | {"runs": RUNS}))
    assert adult.left_by_an_interruption(kept, of) == of | {"runs": RUNS}
    other = {"config": "b", "seeds": 2}
    assert adult.left_by_an_interruption(kept, other) == other | {"runs": []}


def test_logistic_regression_reads_what_the_model_reads(adult, tmp_path):
    data = adult.prepare_made_up(tmp_path)
    figures = adult.logistic_regression(data)
    assert set(figures) == {"income", "never_married"} and all(0 <= auc <= 1 for auc in figures.values())
    for split in ("train", "test"):  # an input that tells the label
        table = pq.read_table(data / split)
        place = table.schema.get_field_index("age")
        told = table.set_column(place, "age", table["income"].cast("float32"))
        pq.write_table(told, data / split / "part-00000.parquet")
    assert adult.logistic_regression(data)["income"] == 1.0


def test_the_page_has_the_table_of_the_last_measurement(adult):
    from documents import filled

    expected = ""
    if adult.RESULTS.exists():
        expected = adult.document(adult.rows_of(json.loads(adult.RESULTS.read_text())))
    assert filled("docs/benchmarks.md", "adult") == [expected]
