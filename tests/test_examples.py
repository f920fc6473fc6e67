"""Tests that run the examples in docstrings."""

import doctest
import pkgutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import raytrec

FILM_COUNT = 20
SCHEMA = {
    "labels": ["label"],
    "sparse": {
        "user_id": {"table": "user"},
        "history": {"table": "item", "pooling": "mean"},
        "item_id": {"table": "item"},
    },
    "tables": {"user": {"rows": 40, "dim": 8}, "item": {"rows": FILM_COUNT, "dim": 8}},
}
CONFIG = {
    "data": {"train": "films/train", "valid": "films/valid", "test": "films/test", "global_batch_size": 48},
    "model": {"name": "two_tower", "towers": {"query": ["user_id", "history"], "item": ["item_id"]}, "tower_mlp": [16]},
    "scaling": {"num_workers": 1, "device": "cpu"},
    "train": {"eval_every_steps": 5},
    "tracking": {"enabled": False, "report": False},
}
# Modules whose examples belong to public functions (tested separately) or need a running training run.
SKIPPED_MODULES = {*raytrec._HOMES.values(), "raytrec.tracking.run_folder"} - {"raytrec.common.errors"}


@pytest.fixture(scope="module")
def films_folder(tmp_path_factory):
    """Return the working directory of the public functions' examples, with films data and configurations."""
    folder, draw = tmp_path_factory.mktemp("examples"), np.random.default_rng(0)
    for split, rows in (("train", 480), ("valid", 160), ("test", 160)):
        users, items = draw.integers(0, 40, rows), draw.integers(0, FILM_COUNT, rows)
        history = [draw.integers(0, FILM_COUNT, 3) for _ in range(rows)]
        label = ((users + items) % 2).astype(np.int8)
        table = pa.table({"label": label, "user_id": users, "history": history, "item_id": items})
        (folder / "films" / split).mkdir(parents=True)
        pq.write_table(table, folder / "films" / split / "rows.parquet")
    pq.write_table(pa.table({"item_id": np.arange(FILM_COUNT)}), folder / "items.parquet")
    (folder / "films/schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    (folder / "films.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "space.yaml").write_text(yaml.safe_dump({"optim.dense.lr": {"uniform": [0.001, 0.01]}}))
    return folder


def run_examples(test):
    """Run the examples of one docstring; the assertion message shows the differences."""
    shown = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=shown.append)
    assert test.examples and not runner.failures, "".join(shown)


def doctest_of(name):
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(raytrec, name), name, globs={"raytrec": raytrec})
    return test


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["train", "evaluate", "predict", "index", "export", "load", "load_index"],  # of one run
        pytest.param(["check", "tune"], marks=pytest.mark.survive),
    ],
)
def test_public_function_docstring_examples_run(films_folder, ray_cluster, monkeypatch, names):
    monkeypatch.chdir(films_folder)
    for name in names:
        run_examples(doctest_of(name))


def modules_with_examples():
    for module in pkgutil.walk_packages(raytrec.__path__, "raytrec."):
        source = Path(module.module_finder.find_spec(module.name).origin)
        if module.name not in SKIPPED_MODULES and ">>> " in source.read_text():
            yield module.name


@pytest.mark.parametrize("name", modules_with_examples())
def test_module_docstring_examples_run(name):
    tests = [test for test in doctest.DocTestFinder().find(import_module(name)) if test.examples]
    assert tests
    for test in tests:
        run_examples(test)
