"""An export of a run with all kinds of columns scores like `raytrec predict` in every row format."""

import datetime
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from served import ServedApp, assert_predictions_equal

import raytrec
from raytrec.common.errors import ConfigError, DataError
from raytrec.scoring.request_rows import to_table

pytestmark = pytest.mark.slow

ROWS = 300
SCHEMA = {
    "labels": ["clicked", "watched", "kind"],
    "dense": ["price", "age_days"],
    "sparse": {
        "user": {"table": "user"},
        "film": {"table": "film", "column": "shown.id"},
        "word": {"table": "word"},
        "channel": {"table": "channel"},
        "tags": {"table": "tag", "pooling": "mean", "weights": "tag_weights"},
        "history": {"table": "film", "pooling": "sequence"},
    },
    "tables": {
        "user": {"rows": 20, "dim": 8, "ids": {"fallback_rows": 3}},
        "film": {"rows": 30, "dim": 8, "out_of_range": "clamp"},
        "word": {"rows": 16, "dim": 8, "out_of_range": "hash"},
        "channel": {"rows": 4, "dim": 8},
        "tag": {"rows": 9, "dim": 8},
    },
}
TRANSFORMS = [
    {"do": "fill_null", "columns": ["price"], "value": 0.5},
    {"do": "lookup_vocabulary", "columns": ["channel"], "vocabulary": "channels.txt", "unknown": 3},
    {"do": "age", "columns": ["seen_at"], "until": "2026-11-01", "unit": "days", "into": ["age_days"]},
]
CONFIG = {
    "data": {"train": "data/train", "test": "data/test", "global_batch_size": 60, "transforms": TRANSFORMS},
    "model": {"name": "din", "max_length": 4, "target": "film", "top_mlp": [12], "attention_mlp": [5]},
    "tasks": [
        {"label": "clicked", "negatives_kept": 0.4},
        {"label": "watched", "loss": "mse"},
        {"label": "kind", "loss": "cross_entropy", "options": {"classes": 3}},
    ],
    "scaling": {"num_workers": 1, "device": "cpu"},
    "train": {"epochs": 3, "ema": 0.9},
    "tracking": {"enabled": False, "report": False},
}
SCORES = ["score_clicked", "score_watched", "score_kind"]


def make_film_rows(seed, users):
    draw = np.random.default_rng(seed)
    begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

    def bags(most, length):
        return [draw.integers(0, most, draw.integers(0, length + 1)).tolist() for _ in range(ROWS)]

    tags, user = bags(9, 3), [f"user {n}" for n in draw.integers(0, users, ROWS)]
    film = draw.integers(0, 33, ROWS)
    return pa.table(
        {
            "clicked": (film % 2).astype(np.int8),
            "watched": pa.array((film % 7).astype(np.float32)),
            "kind": film % 3,
            "price": pa.array([None if i % 9 == 0 else float(i % 5) for i in range(ROWS)], pa.float32()),
            "seen_at": pa.array(
                [begin + datetime.timedelta(hours=int(h)) for h in draw.integers(0, 5000, ROWS)],
                pa.timestamp("s", "UTC"),
            ),
            "user": pa.array(user).dictionary_encode(),
            "shown": [{"id": int(f), "place": i} for i, f in enumerate(film)],
            "word": [f"word {n}" if n else None for n in draw.integers(0, 40, ROWS)],
            "channel": draw.choice(["web", "app", "tv", "other"], ROWS),
            "tags": pa.array(tags, pa.list_(pa.int32())),
            "tag_weights": pa.array([[0.5 + t for t in bag] for bag in tags], pa.list_(pa.float32())),
            "history": pa.array(bags(30, 7), pa.list_(pa.int64())),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    for split, seed, users in (("train", 1, 30), ("test", 2, 45)):
        (folder / "data" / split).mkdir(parents=True)
        pq.write_table(make_film_rows(seed, users), folder / "data" / split / "rows.parquet", row_group_size=100)
    (folder / "channels.txt").write_text("web\napp\ntv\n")
    (folder / "data/schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    return folder


@pytest.fixture(scope="module")
def exported_run(ray_cluster, folder):
    """Return a run, its predictions of the test data and its export."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = raytrec.train(CONFIG | {"run": {"name": "films", "dir": "run"}})
        predictions = raytrec.predict(run.path, "data/test", "scores", columns=[])
        raytrec.export(run.path, "export")
    return run, pq.read_table(predictions.path), folder / "export"


@pytest.fixture
def in_folder(folder, monkeypatch):
    """Make the folder of the data the working directory, as for the run, and restore the vocabulary."""
    monkeypatch.chdir(folder)
    (folder / "channels.txt").write_text("web\napp\ntv\n")
    return folder


@pytest.fixture(scope="module")
def model(exported_run):
    (exported_run[2].parent / "channels.txt").unlink()  # the export has its own copy
    return raytrec.load(exported_run[2])


def to_json_rows(table):
    """Return rows as a service receives them: JSON objects, with struct fields as separate keys."""
    shown = table["shown"].combine_chunks().field("id")
    flat = table.drop_columns(["shown"]).append_column("shown.id", shown)
    return json.loads(json.dumps(flat.to_pylist(), default=datetime.datetime.isoformat))


def assert_equal(found, expected):
    assert_predictions_equal(found.to_pydict(), expected)


def test_every_row_format_scores_like_predict(folder, exported_run, model):
    _, expected, _ = exported_run
    table = pq.read_table(folder / "data/test")
    assert expected.column_names == SCORES == model.predict(table).column_names
    assert all(np.std(expected[name].to_pylist()) > 1e-3 for name in SCORES)
    assert_equal(model.predict(table), expected)
    assert_equal(model.predict(to_json_rows(table)), expected)
    assert_equal(model.predict(table.to_pandas()), expected)
    assert_equal(model.predict(to_json_rows(table.slice(7, 1))[0]), expected.slice(7, 1))
    with pytest.raises(DataError, match="there are no rows"):
        model.predict([])
    assert model.check() <= 1e-6 and len(model.golden) == 64
    assert model.manifest.metrics == {}, "an export without quantization has metrics"


@pytest.mark.survive
def test_request_log_keeps_types_and_compares_every_column(folder, exported_run, model, tmp_path):
    from raytrec.serving.batching import VersionedScores
    from raytrec.serving.bodies import Query
    from raytrec.serving.replica_metrics import ReplicaMetrics
    from raytrec.serving.request_log import RequestLog
    from raytrec.skew.compare import skew

    figures = ReplicaMetrics()
    log = RequestLog(str(tmp_path), 1.0, "writer", figures)
    table = pq.read_table(folder / "data/train")
    scores = model.score([model.reader.read(table)])
    rows = to_json_rows(table)
    for at in range(len(table)):
        each = VersionedScores((values[at : at + 1] for values in scores), model.version)
        part = table.slice(at, 1) if at % 2 else to_table(rows[at : at + 1], model.columns)
        log.offer("/predict", Query(model, "predict", part), each)
    log.close()
    assert [each._value.get() for each in (figures.logged, figures.not_logged)] == [len(table), 0]
    logged = pq.read_table(tmp_path)
    assert logged.select(model.columns.names).schema.equals(model.columns)
    found = skew(str(tmp_path), str(exported_run[2]), data=str(folder / "data/train")).metrics
    assert found["rows"] == len(table) and not found["differs"]
    assert {"score_kind[2]", "score_watched", "price", "film"} <= {each["column"] for each in found["columns"]}
    found = skew(str(tmp_path), str(exported_run[2]), data=str(folder / "data/test")).metrics
    shares = {
        (each["column"], each["measure"]): each["log"]["share"] for each in found["columns"] if "share" in each["log"]
    }
    assert shares["price", "nulls"] == pytest.approx(34 / 300, abs=0.02)
    assert shares["film", "ids out of range"] == pytest.approx(0.09, abs=0.05)
    assert 0 < shares["user", "ids without a row"] < 1


def test_service_scores_like_predict(folder, exported_run, model):
    table = pq.read_table(folder / "data/test")
    rows = to_json_rows(table)
    with ServedApp() as http:
        http.serve(exported_run[2])
        for _, predictions in http.scores_of_forms(rows, table):
            assert_predictions_equal(predictions, exported_run[1])
        user = {name: rows[0][name] for name in ("user", "history", "tags", "tag_weights")}
        others = [{k: v for k, v in row.items() if k not in user} for row in rows]
        ranked = http.scores({"user": user, "candidates": others})
        assert_predictions_equal(ranked, model.predict([row | user for row in rows]))


def test_user_columns_are_given_once_for_all_candidates(folder, model):
    rows = to_json_rows(pq.read_table(folder / "data/test"))[:40]
    for mine in (["user", "history"], ["user"], ["user", "history", "seen_at", "price", "tags", "tag_weights"]):
        user = {name: rows[0][name] for name in mine}
        others = [{k: v for k, v in row.items() if k not in mine} for row in rows]
        assert_equal(model.predict(user=user, candidates=others), model.predict([row | user for row in rows]))
    with pytest.raises(DataError, match="is in both user and candidates"):
        model.predict(user={"user": "a", "history": []}, candidates=rows)
    with pytest.raises(DataError, match="user has none of the model's columns"):
        model.predict(user={"age": 3}, candidates=rows)
    with pytest.raises(ConfigError, match="rows, or user and candidates"):
        model.predict(rows, user=rows[0])


@pytest.mark.parametrize(
    "column, value, message",
    [
        ("tags", [*[3] * 5000, 2**63], f"column 'tags' has the invalid value {2**63}"),
        ("tags", 3, "column 'tags' has the invalid value 3"),
        ("tags", [9], "id 9 of feature 'tags' is out of range for table 'tag'"),
        ("tags", [1, None], "contains a null inside a list"),
        ("tag_weights", [float("nan")], "column 'tag_weights' contains NaN"),
        ("tag_weights", [0.5, 0.5], "has 2 values for 1 id of"),
        ("shown.id", "three", "column 'shown.id' has the invalid value 'three'"),
        ("user", 3, "column 'user' has the invalid value 3"),
        ("seen_at", "yesterday", "column 'seen_at' has the invalid value 'yesterday'"),
        ("history", ..., "column 'history' is missing"),
    ],
)
def test_prediction_error_names_the_invalid_column_and_row(folder, model, column, value, message):
    good = to_json_rows(pq.read_table(folder / "data/test").slice(0, 2))
    bad = good[1] | {"tags": [3], "tag_weights": [1.0], column: value}
    if value is ...:
        del bad[column]
    with pytest.raises(DataError) as caught:
        model.predict([good[0], bad])
    assert message in caught.value.what and f"column {column}, row 1" in caught.value.where


def test_model_without_towers_has_no_vectors(folder, model):
    with pytest.raises(ConfigError, match="does not compute query and item vectors"):
        model.vectors(pq.read_table(folder / "data/test"))


def assert_metrics(export, evaluated, precision):
    """Check that fp32 metrics equal those of an evaluation and quantized metrics differ."""
    keys = {f"eval.{each['key']}" for each in evaluated.metrics["metrics"]}
    found = {key for key in export.metrics if key.startswith("eval.")}
    assert found == keys | {f"{key}.{precision}" for key in keys} and "eval.clicked.auc" in keys
    for key in keys:
        assert export.metrics[key] == pytest.approx(evaluated.metrics[key], rel=1e-6, abs=1e-6), key
    assert export.metrics["eval.watched.mse"] != export.metrics[f"eval.watched.mse.{precision}"]
    text = dict(export.pairs)["eval.clicked.auc"]
    assert text.startswith(f"{export.metrics['eval.clicked.auc']:.5f} fp32, ") and precision in text


@pytest.mark.survive
def test_export_metrics_match_an_evaluation(in_folder, exported_run, tmp_path):
    export = raytrec.export(exported_run[0].path, str(tmp_path / "out"), quantize="int4", data="data/train")
    assert_metrics(export, raytrec.evaluate(exported_run[0].path, "data/train"), "int4")
    again = raytrec.export(exported_run[0].path, str(tmp_path / "out"), quantize="int4", data="data/train")
    assert again.pairs[:-1] == export.pairs[:-1], "the metrics are not read from the manifest"


def test_data_without_labels_has_no_metrics(in_folder, exported_run, tmp_path, capsys):
    rows = pq.read_table(in_folder / "data/test").drop_columns(["kind"])
    pq.write_table(rows, tmp_path / "rows.parquet")
    out, data = str(tmp_path / "out"), str(tmp_path / "rows.parquet")
    export = raytrec.export(exported_run[0].path, out, quantize="int8", data=data)
    assert not [key for key in export.metrics if key.startswith("eval.")]
    assert "tables are not compared" in (said := capsys.readouterr().err) and "kind" in said
    with pytest.raises(ConfigError, match="another"):
        raytrec.export(exported_run[0].path, out, quantize="int8", data="data/valid")


@pytest.mark.parametrize("precision, off", [("fp16", 2e-3), ("int8", 2e-2), ("int4", 0.3)])
def test_quantized_tables_are_smaller_and_nearly_exact(in_folder, exported_run, model, tmp_path, precision, off):
    run, expected, _ = exported_run
    export = raytrec.export(run.path, str(tmp_path / "out"), quantize=precision, golden_rows=8)
    assert_metrics(export, run, precision)
    small = raytrec.load(export.path)
    assert 0 < small.check() + 1e-12 <= 1e-6
    scores = np.array(small.predict(pq.read_table(in_folder / "data/test"))["score_clicked"])
    assert 0 < np.abs(scores - np.array(expected["score_clicked"])).max() < off
    whole = sum((exported_run[2] / name).stat().st_size for t in model.manifest.stacks for name in t.files)
    assert sum((tmp_path / "out" / n).stat().st_size for t in small.manifest.stacks for n in t.files) < whole
