"""Tests of the table of `make bench-precision` on made-up runs."""

import harness
import precision


def make_runs(*aucs):
    return {str(seed): {"auc": auc, "ne": 0.8, "rows_per_s": 1234.5} for seed, auc in enumerate(aucs)}


def test_differences_compare_runs_with_equal_seeds():
    runs = {
        "fp32 fp32 fp32": make_runs(0.80, 0.82, 0.84),
        "fp32 fp16 fp16": make_runs(0.801, 0.823),
        "fp16 fp32 fp32": {},
    }
    exact, lower = precision.rows_of(runs)
    assert exact == ["fp32", "fp32", "fp32", "0.82000", "", "1,234"]
    assert lower[:5] == ["fp32", "fp16", "fp16", "0.81200", "+2.0e-03 ± 1.0e-03"]
    lines = precision.document([exact, lower], "title").splitlines()
    assert lines[0] == "title:" and lines[-1].startswith("| fp32 | fp16 | fp16 | 0.81200 |")
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_precision_variants_are_valid_configs():
    from raytrec.config.run_config import load_config

    for (tables, forward, backward), settings in precision.VARIANTS.items():
        plan = load_config({"data": {"train": "d"}}, [*precision.QUIET, *settings]).plan
        assert plan.qcomms.forward_precision == forward and plan.qcomms.backward_precision == backward
        assert (plan.tables["*"].dtype if plan.tables else "fp32") == tables


def test_cached_runs_require_equal_config(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    about = {"config": "a", "settings": []}
    assert precision.kept(about) == {}
    harness.store("precision", about | {"runs": {"fp32 fp32 fp32": make_runs(0.8)}})
    assert precision.kept(about) == {"fp32 fp32 fp32": make_runs(0.8)}
    assert precision.kept(about | {"config": "b"}) == {}
