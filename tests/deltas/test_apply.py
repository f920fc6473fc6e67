"""Models to which deltas have been applied equal exports of the same step."""

import json
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
import test_models
import torch
from deltas import DeltaFolder, ManagedCase, apply_next, train_steps
from test_models import ModelCase

import raytrec
from raytrec.deltas.chain import iterate_exports, read_next
from raytrec.exporting.apply_deltas import apply_deltas

CASES = {"managed": ManagedCase()} | {name: ModelCase(name, (1, 1)) for name in test_models.CASES}
FAST_SUITE = (("managed", "int8"), ("din", "fp32"), ("two_tower", "fp16"), ("dlrm", "int4"))
# Some models in each precision, all others in fp32.
COMBINATIONS = dict.fromkeys(
    [*product([case for case, _ in FAST_SUITE], ("fp32", "fp16", "int8", "int4")), *product(CASES, ["fp32"])]
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return lru_cache(lambda name: train_steps(CASES[name], tmp_path_factory.mktemp(name)))


def assert_equal_models(model, expected):
    for name, table in model.lookups.tables.items():
        assert torch.equal(table.stack._stored, expected.lookups.tables[name].stack._stored), name
    for name, ids in expected.lookups.ids.items():
        for actual, other in zip(model.lookups.ids[name].ids, ids.ids, strict=True):
            assert torch.equal(actual, other)
    assert model.weights.keys() == expected.weights.keys()
    assert all(torch.equal(model.weights[name], value) for name, value in expected.weights.items())


def score_parts(model, table):
    """Return the scores of rows, of a user's candidates, and vectors."""
    rows = json.loads(json.dumps(table.select(model.columns.names).to_pylist()))
    names = model.columns.names[:1]
    user, candidates = {n: rows[0][n] for n in names}, [{n: r[n] for n in r.keys() - set(names)} for r in rows]
    model.split(frozenset(names)).min_candidates = 0  # the user's part is computed once
    scores = [
        *model.predict(table).to_pydict().values(),
        *model.predict(user=user, candidates=candidates).to_pydict().values(),
    ]
    return [np.array(each, np.float32) for each in scores] + [
        model.vectors(rows, tower=each) for each in model.manifest.towers
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, precision",
    [pytest.param(*each, marks=[] if each in FAST_SUITE else [pytest.mark.survive]) for each in COMBINATIONS],
)
def test_applied_deltas_equal_an_export_of_the_step(case, precision, trained, tmp_path):
    steps, precision = trained(case), None if precision == "fp32" else precision
    folder = DeltaFolder.of_schema(tmp_path / "deltas", steps.schema)
    folder.write_steps(steps, 1, 3, column_parts=2)
    folder.add_export(1, steps.export(1, tmp_path / "first", quantize=precision))
    ((uri, position),) = iterate_exports(str(folder.path))
    model, untouched = raytrec.load(uri), raytrec.load(uri)
    first = score_parts(model, steps.table)
    for step in (2, 3):
        position = apply_next(folder.path, model, position)
        expected = raytrec.load(steps.export(step, tmp_path / str(step), quantize=precision))
        assert_equal_models(model, expected)
        scores = score_parts(model, steps.table)
        for actual, values in zip(scores, score_parts(expected, steps.table), strict=True):
            np.testing.assert_allclose(actual, values, rtol=1e-6, atol=1e-6)
        assert not all(np.allclose(actual, old) for actual, old in zip(scores, first, strict=True))
    out = apply_deltas(uri, str(folder.path), str(tmp_path / "out"))
    offline = raytrec.load(out.path, check_tables=True)
    assert_equal_models(offline, expected)
    assert (out.metrics["step"], out.metrics["deltas"], offline.manifest.source.step) == (3, 2, 3)
    for name in expected.manifest.tasks:
        np.testing.assert_allclose(
            offline.golden[name.column].to_pylist(), expected.golden[name.column].to_pylist(), 1e-6
        )
    assert (model.step, model.version) == (3, f"small-3-{folder.checksums[3][:8]}")
    assert all(np.array_equal(a, b) for a, b in zip(score_parts(untouched, steps.table), first, strict=True))
    assert read_next(str(folder.path), position) is None
