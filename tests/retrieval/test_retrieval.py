"""Retrieval from a trained run: full rankings, an index of items, vectors of a user's rows."""

import json
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from waiting import wait_for

import raytrec
from raytrec.common.errors import ConfigError, DataError, RunError
from raytrec.driver import run as driver
from raytrec.driver.evaluation import evaluate
from raytrec.prediction.predict import predict
from raytrec.retrieval.build import index
from raytrec.retrieval.index import read_vectors

pytestmark = pytest.mark.slow

USERS, ITEMS, ROWS = 30, 40, 600
SCHEMA = f"""\
labels: [label]
dense: [age, price]
sparse:
  user: {{table: user}}
  history: {{table: item, pooling: mean}}
  item_id: {{table: item, column: item}}
  genres: {{table: genre, pooling: mean}}
tables:
  user: {{rows: {USERS}, dim: 8}}
  item: {{rows: {ITEMS}, dim: 8}}
  genre: {{rows: 5, dim: 8}}
"""


def make_items_table(draw):
    ids = draw.permutation(ITEMS)
    return pa.table(
        {
            "item": ids,
            "price": draw.normal(size=ITEMS).astype(np.float32),
            "genres": [[int(i) % 5, int(i) % 3] for i in ids],
            "title": [f"film {i}" for i in ids],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write data in which users like items with the same id modulo 5 as their own."""
    folder, draw = tmp_path_factory.mktemp("retrieval"), np.random.default_rng(3)
    items = make_items_table(draw)
    place = {item: i for i, item in enumerate(items["item"].to_pylist())}
    for split, rows in (("train", 4 * ROWS), ("test", ROWS)):
        user, item = draw.integers(0, USERS, rows), draw.integers(0, ITEMS, rows)
        item = np.where(draw.random(rows) < 0.5, item // 5 * 5 + user % 5, item)
        about = items.take([place[i] for i in item])
        history = [draw.integers(0, 8, draw.integers(0, 6)) * 5 + u % 5 for u in user]
        table = pa.table(
            {
                "label": (item % 5 == user % 5).astype(np.int8),
                "age": (user / USERS).astype(np.float32),
                "user": user,
                "history": history,
                **{name: about[name] for name in ("item", "price", "genres")},
            }
        )
        (folder / split).mkdir()
        pq.write_table(table, folder / split / "part-0.parquet", row_group_size=150)
    (folder / "items").mkdir()
    for part in range(2):
        path = folder / "items" / f"part-{part}.parquet"
        pq.write_table(items.slice(part * 25, 25), path, row_group_size=9)
    (folder / "schema.yaml").write_text(SCHEMA)
    return folder


def settings(folder, run_dir):
    return {
        "run": {"dir": str(run_dir)},
        "data": {"global_batch_size": 64, "lanes": 6} | {n: str(folder / n) for n in ("train", "test")},
        "model": {
            "name": "two_tower",
            "towers": {"query": ["user", "history", "age"], "item": ["item_id", "genres", "price"]},
            "tower_mlp": [16, 8],
        },
        "eval": {"retrieval": {"items": str(folder / "items"), "seen": ["history"], "at": [3, 10]}},
        "train": {
            "epochs": 2,
            "eval_every_steps": 20,
            "early_stopping": {"metric": "eval.retrieval.ndcg@10", "patience": 9},
        },
        "checkpoint": {"keep_best": 1, "best_metric": "retrieval.mrr"},
        "optim": {"embeddings": {"lr": 0.1}, "dense": {"lr": 0.01}},
        "scaling": {"num_workers": 2, "device": "cpu"},
        "tracking": {"report": False, "enabled": False},
    }


@pytest.fixture(scope="module")
def run(ray_cluster, folder, tmp_path_factory):
    return driver.train(settings(folder, tmp_path_factory.mktemp("retrieval") / "run"))


@pytest.fixture(scope="module")
def items_index(run, folder, tmp_path_factory):
    """Build an index of the run's items, including a faiss index."""
    out = tmp_path_factory.mktemp("index") / "films"
    return index(run.path, folder / "items", out, faiss="HNSW8", workers=1)


def test_retrieval_metrics_match_rankings_by_vectors(run, folder, items_index, tmp_path):
    columns = ["item", "history", "label"]
    predict(run.path, folder / "test", tmp_path / "out", columns=columns, vectors="query", workers=1)
    rows, queries = read_vectors(str(tmp_path / "out"))
    rows, found = rows.to_pylist(), raytrec.load_index(items_index.path)
    place = {item: i for i, item in enumerate(found.items["item"].to_pylist())}
    scores = queries.astype(np.float64) @ found.vectors.T.astype(np.float64)
    ranks = []
    for row, score in zip(rows, scores, strict=True):
        if row["label"]:
            others = set(place) - {*row["history"], row["item"]}
            ranks.append(1 + sum(score[place[i]] >= score[place[row["item"]]] for i in others))
    ranks = np.array(ranks)
    metrics = run.metrics
    assert metrics["eval.retrieval.mrr"] == pytest.approx(np.mean(1 / ranks), abs=1e-6)
    assert metrics["eval.retrieval.hit_rate@3"] == pytest.approx(np.mean(ranks <= 3), abs=1e-6)
    ndcg = np.mean((ranks <= 10) / np.log2(1 + ranks))
    assert metrics["eval.retrieval.ndcg@10"] == pytest.approx(ndcg, abs=1e-6)
    assert (metrics["eval.retrieval.rows"], metrics["eval.retrieval.items"]) == (len(ranks), ITEMS)
    assert metrics["eval.retrieval.unknown_items"] == 0 and metrics["eval.retrieval.hit_rate@10"] > 0.5
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    first = next(line for line in lines if line["kind"] == "eval")
    assert {"retrieval.ndcg@10", "retrieval.rows"} <= first.keys()


@pytest.fixture(scope="module")
def model(run, tmp_path_factory):
    """Export and load the model of the run."""
    return raytrec.load(raytrec.export(run.path, str(tmp_path_factory.mktemp("export") / "films")).path)


def test_search_returns_the_best_items_of_a_user(model, items_index):
    films = raytrec.load_index(items_index.path)
    query = model.vectors({"user": 7, "history": [2, 12, 37], "age": 7 / USERS})
    best = films.search(query, k=5)
    assert list(best.columns) == ["query", "rank", "item", "price", "genres", "title", "score"]
    assert best["rank"].tolist() == [1, 2, 3, 4, 5] and best["score"].is_monotonic_decreasing
    assert (best["item"] % 5 == 2).sum() >= 3 and best["title"][0] == f"film {best['item'][0]}"
    exact = films.search(query, k=5, exact=True)
    assert set(exact["item"]) >= set(best["item"][:3])
    unseen = films.search(query, k=5, leave_out=[exact["item"][:2]], exact=True)
    assert unseen["item"].tolist()[:3] == exact["item"].tolist()[2:]


def test_model_vectors_match_the_index(model, folder, items_index):
    films = raytrec.load_index(items_index.path)
    local = model.vectors(pq.ParquetDataset(folder / "items").read(), tower="item")
    np.testing.assert_allclose(local, films.vectors, atol=1e-6)
    frame = pd.read_parquet(folder / "test").head(3)
    vectors = model.vectors(frame[["user", "history", "age"]])
    assert np.array_equal(vectors, model.vectors(pa.Table.from_pandas(frame)))


def test_index_describes_its_content(run, folder, items_index):
    about = raytrec.load_index(items_index.path).about
    assert about["item"] == "item" and about["faiss"] == "HNSW8" and about["index.items"] == ITEMS
    assert about["index.recall@10"] > 0.9 and about["index.queries"] == ROWS
    again = index(run.path, folder / "items", items_index.path, faiss="HNSW8")
    assert again.metrics["predict.rows_per_s"] is None, "the vectors were computed again"


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda t: pa.concat_tables([t, t.slice(3, 2)]), DataError, "the items contain 2 duplicate keys"),
        (lambda t: t.drop_columns(["genres"]), DataError, "column 'genres' is missing"),
        (lambda t: t.set_column(0, "item", pa.nulls(ITEMS, pa.int64())), DataError, "the items have 40 missing keys"),
    ],
)
def test_invalid_items_are_refused_before_training(folder, tmp_path, change, error, message):
    (tmp_path / "items").mkdir()
    table = pq.ParquetDataset(folder / "items").read()
    pq.write_table(change(table), tmp_path / "items/part-0.parquet")
    values = settings(folder, tmp_path / "run")
    values["eval"]["retrieval"]["items"] = str(tmp_path / "items")
    with pytest.raises(error, match=message):
        driver.train(values)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"model": {"name": "dcn"}}, ConfigError, "does not produce query and item vectors"),
        ({"retrieval": {"seen": ["user"]}}, DataError, "column 'user' of seen items has type int64"),
        ({"retrieval": {"at": [0]}}, ConfigError, "eval.retrieval.at"),
        ({"retrieval": {"item": "title"}}, DataError, "column 'title' \\(eval.retrieval.item\\)"),
        ({"retrieval": {"seen": ["met"]}}, DataError, "column 'met' \\(eval.retrieval.seen\\)"),
        ({"checkpoint": {"best_metric": "retrieval.mrrr"}}, ConfigError, "did you mean 'retrieval.mrr'"),
    ],
)
def test_invalid_retrieval_settings_are_refused(folder, tmp_path, changes, error, message):
    values = settings(folder, tmp_path / "run")
    values["eval"]["retrieval"] |= changes.pop("retrieval", {})
    values |= changes
    with pytest.raises(error, match=message):
        driver.train(values)


def test_invalid_queries_raise_a_clear_error(model, items_index):
    with pytest.raises(ConfigError, match=r"the shape \[9\]"):
        raytrec.load_index(items_index.path).search(np.zeros(9))
    with pytest.raises(DataError, match="column 'age' is missing"):
        model.vectors({"user": 7, "history": []})


def test_index_without_faiss_names_the_missing_package(run, folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match="faiss cannot be imported"):
        index(run.path, folder / "items", tmp_path / "out", faiss="HNSW8")
    assert not (tmp_path / "out").exists()


@pytest.mark.survive
def test_retrieval_metrics_do_not_depend_on_worker_count(run):
    again = evaluate(run.path, workers=3).metrics
    own = {name: value for name, value in run.metrics.items() if name.startswith("eval.retrieval.")}
    assert {name: again[name] for name in own} == pytest.approx(own, abs=1e-6)


@pytest.mark.survive
def test_killed_index_command_continues(run, folder, items_index, tmp_path):
    """Kill the command once it has written vectors of items, then run the same command again."""
    words = [run.path, "--items", folder / "items", "--out", tmp_path / "out", "--faiss", "HNSW8"]
    command = [sys.executable, "-m", "raytrec", "index", *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for(lambda: list((tmp_path / "out").rglob("*.parquet")), "file", 200)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(RunError):
        raytrec.load_index(tmp_path / "out")
    last = subprocess.run(command, capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    again, whole = raytrec.load_index(tmp_path / "out"), raytrec.load_index(items_index.path)
    assert np.array_equal(again.vectors, whole.vectors)
    query = whole.vectors[:3]
    assert again.search(query, k=5).equals(whole.search(query, k=5))
