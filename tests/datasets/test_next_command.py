"""`raytrec prepare interactions` prints a train command that fits the prepared dataset."""

import random
import shlex
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from recipes import run_recipe

import raytrec
from raytrec.config.run_config import load_config
from raytrec.driver.datasets import open_data
from raytrec.driver.preflight import check_fit
from raytrec.driver.prepare import resolve

REPO = Path(__file__).parents[2]
USERS, ITEMS = 60, 150
SIDES = ["--user-features", "users.csv", "--item-features", "items.csv"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("source"), random.Random(3)
    rows = [(u, i) for u in range(USERS) for i in rng.sample(range(ITEMS), rng.randint(4, 9))]
    (folder / "x.csv").write_text("user,item\n" + "".join(f"{u},{i}\n" for u, i in rows))
    (folder / "users.csv").write_text("user,city\n" + "".join(f"{u},{u % 3}\n" for u in range(USERS)))
    (folder / "items.csv").write_text("item,brand,price\n" + "".join(f"{i},{i % 7},{i / 4}\n" for i in range(ITEMS)))
    return folder


def get_next_command(*arguments):
    """Run the recipe twice; return the job path and the overrides of the printed command."""
    said = [run_recipe("interactions", "--source", "x.csv", "--out", "data/x", *arguments) for _ in range(2)]
    assert [result.exit_code for result in said] == [0, 0], said[0].exception
    lines = [result.stderr.splitlines()[-1] for result in said]
    assert lines[0] == lines[1]
    also = "jobs/interactions/mf.yaml also fits" in said[0].stderr
    assert also == ("two_tower.yaml" in lines[0])
    assert ("without model.towers" in said[0].stderr) == (also and "model.towers" in lines[0])
    words = shlex.split(lines[0].removeprefix("next: "))
    assert words[:2] == ["raytrec", "train"]
    return words[2].removeprefix("jobs/"), words[3:]


def open_job(job, overrides):
    """Return the configuration, schema and datasets of a run before it starts."""
    config = resolve(load_config(REPO / "jobs" / job, overrides), job)
    schema, datasets = open_data(config)
    check_fit(config, schema, on_this_machine=True)
    return config, schema, datasets


@pytest.mark.parametrize(
    "arguments, job",
    [
        ([], "interactions/two_tower.yaml"),
        (["--max-length", 0], "interactions/two_tower.yaml"),
        (["--negatives", 0], "interactions/two_tower.yaml"),
        (["--negatives", 0, "--test-rows", "user", "--split", "random"], "interactions/two_tower.yaml"),
        (SIDES, "interactions/two_tower.yaml"),
        (["--rows", "user"], "interactions/sasrec.yaml"),
        (["--rows", "user", "--negatives", 0, "--max-length", 5], "interactions/sasrec.yaml"),
        (["--rows", "user", *SIDES], "interactions/sasrec.yaml"),
        (["--train-negatives", 2], "own.yaml"),
        (["--train-negatives", 2, "--negatives", 0], "interactions/two_tower.yaml"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_next_command_fits_the_prepared_dataset(source, tmp_path, monkeypatch, arguments, job):
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    named, overrides = get_next_command(*arguments)
    assert named == job
    config, schema, datasets = open_job(named, overrides)
    assert {"train", "valid", "test"} <= datasets.keys()
    labels = {split: np.unique(pq.read_table(f"data/x/{split}")["label"]) for split in ("train", "test")}
    if config.tasks[0].loss == "bce":
        assert labels["train"].tolist() == [0, 1], "bce requires both labels"
    lists = "right_items" in pq.read_schema(next(Path("data/x/test").glob("*.parquet"))).names
    assert lists == ("--test-rows" in arguments)
    if config.tasks[0].metrics == []:
        assert config.eval.retrieval.right_items == ("right_items" if lists else None)
        assert config.eval.retrieval and labels["test"].tolist() == [1]
    elif config.tasks[0].group:
        assert labels["test"].tolist() == [0, 1]
    if config.model.name == "two_tower":
        alone = [text for text in overrides if not text.startswith("model.towers=")]
        open_job("interactions/mf.yaml", alone)
        assert {*config.model.towers.query, *config.model.towers.item} == {*schema.sparse, *schema.dense}
    else:
        assert set(schema.tables) == {"item"} or named == "own.yaml"


@pytest.mark.slow
def test_recall_with_several_right_items_matches_numpy(ray_cluster, source, tmp_path, monkeypatch):
    """Run the example of docs/retrieval.md and compare its recall with NumPy."""
    (tmp_path / "x.csv").write_bytes((source / "x.csv").read_bytes())
    monkeypatch.chdir(tmp_path)
    arguments = ["--negatives", 0, "--test-rows", "user", "--split", "random", "--dim", 8]
    named, overrides = get_next_command(*arguments)
    quick = ["train.epochs=1", "scaling.num_workers=1", "tracking={enabled: false, report: false}"]
    result = raytrec.train(REPO / "jobs" / named, [*overrides, *quick, f"run.dir={tmp_path / 'run'}"])
    test, items = (pq.read_table(f"data/x/{name}") for name in ("test", "items"))
    columns = {name: test[name].to_pylist() for name in ("right_items", "seen", "item")}
    model = raytrec.load(raytrec.export(result.path, str(tmp_path / "export")).path)
    scores = model.vectors(test, tower="query") @ model.vectors(items, tower="item").T
    recalls = []
    for score, right, seen, first in zip(scores, *columns.values(), strict=True):
        assert first == right[0] and not {*right} & {*seen}
        score[seen] = -np.inf
        recalls.append(len({*right} & {*np.argsort(-score)[:10]}) / len(right))
    metrics = result.metrics
    assert metrics["eval.retrieval.recall@10"] == pytest.approx(np.mean(recalls), abs=1e-6)
    assert metrics["eval.retrieval.rows"] == len(test) < sum(map(len, columns["right_items"]))
    assert metrics["eval.retrieval.unknown_items"] == metrics["eval.retrieval.unknown_seen"] == 0


def test_next_command_omits_empty_splits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "train.txt").write_text("".join(f"{user} {user}\n" for user in range(9)))
    (folder / "test.txt").write_text("".join(f"{user} {(user + 1) % 9}\n" for user in range(9)))
    result = run_recipe("interactions", "--source", "x", "--out", "data/x", "--negatives", 2)
    assert result.exit_code == 0, result.exception
    assert "data.test=data/x/test" in result.stderr and "data.valid=" not in result.stderr
