"""The export of every model, loaded or served over HTTP, gives the scores of the trained step."""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exports import CUSTOM_MODELS_SOURCE, SmallModelCase, train_for_export
from served import ServedApp, assert_predictions_equal
from test_models import CASES, ModelCase, make_parallel_schema

import raytrec
from raytrec.common.errors import ConfigError
from raytrec.config.models.base import MODELS

SCORE_TOLERANCE = 1e-6
# A model with ordinary layers, then the model of each family that exports the rarest operators. The other models run
# in test-survive.
MARKS = dict.fromkeys(CASES, pytest.mark.survive)
MARKS |= dict.fromkeys(("hstu", "masknet", "dien", "sequence", "two_tower", "esmm", "wide_deep"), pytest.mark.slow)
MARKS |= dict.fromkeys(("dcn",), ())


def assert_close(found, expected):
    assert_predictions_equal(found.to_pydict(), expected)


@pytest.fixture(scope="module")
def http():
    with ServedApp() as http:
        yield http


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def test_exported_models_score_like_training(name, http, tmp_path):
    folder, table, predictions, vectors = train_for_export(ModelCase(name, (1, 1)), tmp_path)
    export = raytrec.export(folder, str(tmp_path / "export"), golden_rows=5)
    model = http.serve(export.path)
    names = [task.column for task in model.manifest.tasks]
    assert names == ["score"] if len(predictions) == 1 else [f"score_{task}" for task in predictions]
    expected = dict(zip(names, (values.numpy() for values in predictions.values()), strict=True))
    assert all(values.std() > 0 for values in expected.values())
    rows = json.loads(json.dumps(table.to_pylist()))
    assert_close(model.predict(table), expected)
    again = raytrec.load(export.path)
    assert all(type(again._programs[name]) is type(program) for name, program in model._programs.items())
    assert again.predict(table) == model.predict(table)
    assert_close(model.predict(table.to_pandas()), expected)
    assert_close(model.predict(rows), expected)
    for _, served in http.scores_of_forms(rows, table):
        assert_predictions_equal(served, expected)
    for tower, values in vectors.items():
        np.testing.assert_allclose(
            model.vectors(table, tower=tower), values, rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE
        )
        _, content, _ = http.ask(f"/vectors?tower={tower}", {"rows": rows})
        served = json.loads(content)["predictions"]["vector"]
        np.testing.assert_allclose(served, values, rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE)
    parts = list(iterate_user_columns(name, model, table))
    assert any(model.split(frozenset(columns)).once for columns in parts), "no part is computed once per user"
    for columns in parts:
        users = [{column: rows[at][column] for column in columns} for at in (3, 5, 7)]
        others = [{k: v for k, v in row.items() if k not in columns} for row in rows]
        candidates = [others, others[:4], others[3:]]
        whole = [model.predict([row | user for row in each]) for user, each in zip(users, candidates, strict=True)]
        assert_close(model.predict(user=users[0], candidates=others), whole[0])
        assert_predictions_equal(http.scores({"user": users[0], "candidates": others}), whole[0])
        split = model.split(frozenset(columns))
        for split.min_candidates in (0, sys.maxsize):  # the user's part is computed once, plain rows repeat the user
            rows_read, users_read, splits = zip(*map(model.read_candidates, users, candidates), strict=True)
            is_split = splits[0] is not None
            together = model.rank(split, users_read, rows_read) if is_split else model.score(rows_read)
            assert_predictions_equal(dict(zip(names, together, strict=True)), pa.concat_tables(whole))


def iterate_user_columns(name, model, table):
    """Yield columns of a user: of the query tower or sequences, then of parts of the features and dense columns."""
    schema, section = model.manifest.data_schema, MODELS.parts[name]
    own = model.manifest.towers["query"] if section.retrieves else list(model.manifest.sequences)
    others = [feature for feature in schema.sparse if feature not in ("user", "topic")]  # not a sequence's target
    for features in (own, list(schema.sparse)[:1], list(schema.sparse)[1:], [*others, *schema.dense[:1]]):
        mine = [c for c in schema.select_features(features).inputs if c in model.columns.names]
        mine = [c for c in mine if c not in schema.select_features(set(schema.sparse) - set(features)).inputs]
        if mine:
            yield mine


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(CUSTOM_MODELS_SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # for the processes of ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [SmallModelCase({"top_mlp": [6]}, dense=False), SmallModelCase({"name": "own_models:Sum"})],
    ids=["no dense", "own"],
)
def test_models_without_dense_columns_and_custom_models_export(own_models, case, tmp_path):
    folder, table, predictions, _ = train_for_export(case, tmp_path)
    model = raytrec.load(raytrec.export(folder, str(tmp_path / "export"), allow_code=True).path)
    assert_close(model.predict(table), {"score": predictions["y"].numpy()})
    names = model.columns.names
    assert {"a", "b"}.isdisjoint(names) and ("friends" in names) == (case.model.get("name") is None)


class UnreadSideFeatures(SmallModelCase):
    """Model whose sequence has side features that the model does not read."""

    def schema(self):
        return make_parallel_schema("times", "prices")


def test_export_requires_no_side_features_that_the_model_does_not_read(tmp_path):
    case = UnreadSideFeatures({"name": "din", "max_length": 3, "attention_mlp": [4], "top_mlp": [6]})
    folder, table, predictions, _ = train_for_export(case, tmp_path)
    table = table.drop_columns(["times", "prices"])
    pq.write_table(table, tmp_path / "rows.parquet")
    result = raytrec.export(folder, str(tmp_path / "export"), data=str(tmp_path / "rows.parquet"))
    model = raytrec.load(result.path)
    assert {"times", "prices"}.isdisjoint(model.columns.names) and "friends" in model.columns.names
    assert_close(model.predict(table), {"score": predictions["y"].numpy()})


def test_export_names_the_line_that_branches_on_values(own_models, tmp_path):
    folder, _, _, _ = train_for_export(SmallModelCase({"name": "own_models:Branches"}), tmp_path)
    with pytest.raises(ConfigError) as caught:
        raytrec.export(folder, str(tmp_path / "export"), allow_code=True)
    assert "torch cannot export the model" in caught.value.what
    assert 'own_models.py, line 15: if pooled["user"].sum() > 0:' in caught.value.where
    assert not list((tmp_path / "export").glob("*"))
