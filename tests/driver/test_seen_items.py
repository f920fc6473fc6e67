"""Test that columns of evaluated rows identify items like eval.retrieval.item."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raytrec_datasets import app
from typer.testing import CliRunner

from raytrec.common.errors import DataError
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.driver.datasets import open_data

ITEMS = 50
IN_BATCH = {"loss": "in_batch_softmax", "item": "item", "item_frequency": "item_count", "metrics": []}
TOWERS = {"name": "two_tower", "towers": {"query": ["user", "history"], "item": ["item"]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Interactions whose item keys are permuted ids, with a list of relevant items for each user."""
    folder, rng = tmp_path_factory.mktemp("seen"), random.Random(7)
    lines = [f"{u} {' '.join(map(str, rng.sample(range(ITEMS), 12)))}\n" for u in range(40)]
    (folder / "x.txt").write_text("".join(lines))
    command = ["interactions", "--source", str(folder / "x.txt"), "--out", str(folder / "data")]
    command += ["--negatives", "0", "--test-rows", "user", "--split", "random"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception
    items = pq.read_table(folder / "data/items")
    keys = items["item_key"].to_pylist()
    assert sorted(keys) == items["item"].to_pylist() != keys
    for split in ("train", "valid", "test"):
        table = pq.read_table(folder / "data" / split)
        for column in {"seen", "right_items", "history"} & {*table.column_names}:
            named = [[keys[i] for i in row] for row in table[column].to_pylist()]
            table = table.append_column(f"{column}_keys", pa.array(named))
            text = [[f"film {key}" for key in row] for row in named]
            table = table.append_column(f"{column}_names", pa.array(text, pa.list_(pa.string())))
        pq.write_table(table, next((folder / "data" / split).glob("*.parquet")))
    items = items.append_column("title", pa.array([f"film {key}" for key in keys]))
    pq.write_table(items.take(list(range(ITEMS))[::-1]), next((folder / "data/items").glob("*.parquet")))
    return folder / "data"


def open_retrieval_data(folder, model=TOWERS, **retrieval):
    retrieval |= {"items": str(folder / "items")}
    values = {
        "data": {"train": str(folder / "train"), "test": str(folder / "test"), "global_batch_size": 32}
        | {"reserve_columns": ["user", "item", "item_count"]},
        "tasks": [IN_BATCH],
        "model": model,
        "eval": {"retrieval": retrieval},
    }
    return open_data(RunConfig.model_validate(values))


@pytest.mark.parametrize(
    "item, seen, right",
    [
        ("item", ["seen"], "right_items"),
        ("item", ["history", "seen"], "right_items"),
        ("item_key", ["seen_keys"], "right_items_keys"),
        ("title", ["seen_names", "history_names"], "right_items_names"),
        ("item_key", [], "right_items_keys"),
        ("item", ["seen"], None),
    ],
)
def test_matching_item_columns_are_accepted(folder, item, seen, right):
    open_retrieval_data(folder, item=item, seen=seen, right_items=right)


@pytest.mark.parametrize(
    "item, seen, right, message",
    [
        ("item_key", ["seen"], "right_items_keys", "'seen' refers to items by 'item', not by 'item_key'"),
        ("item_key", ["history"], "right_items_keys", "'history' refers to items by 'item'"),
        ("item", ["seen_keys"], "right_items", "'seen_keys' refers to items by 'item_key', not by 'item'"),
        ("item_key", ["seen_keys"], "right_items", "'right_items' refers to items by 'item', not by"),
        ("item", ["seen"], "right_items_keys", "'right_items_keys' refers to items by 'item_key'"),
        ("title", ["seen"], "right_items_names", "but the item key has type"),
    ],
)
def test_mismatched_item_columns_are_rejected(folder, item, seen, right, message):
    with pytest.raises(DataError, match=message):
        open_retrieval_data(folder, item=item, seen=seen, right_items=right)


def test_item_columns_are_checked_against_schema_histories(folder):
    with pytest.raises(DataError, match="'seen' refers to items by 'item'"):
        open_retrieval_data(folder, {"name": "mf"}, item="item_key", seen=["seen"], right_items="right_items_keys")


def replace_test_rows(folder, tmp_path, table):
    """Make a folder with other test rows."""
    for name in ("train", "items", "schema.yaml"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "test").mkdir()
    pq.write_table(table, tmp_path / "test/part-0.parquet")


def test_seen_column_may_differ_from_the_history(folder, tmp_path):
    """Views are the history and purchases are seen; the two columns share no item."""
    table, rng = pq.read_table(folder / "test"), random.Random(1)
    other = [rng.sample(sorted({*range(ITEMS)} - {*met}), 5) for met in table["history"].to_pylist()]
    replace_test_rows(folder, tmp_path, table.append_column("bought", pa.array(other, pa.list_(pa.int32()))))
    open_retrieval_data(tmp_path, item="item", seen=["bought"], right_items="right_items")


def test_seen_items_of_rows_without_histories_are_checked(folder, tmp_path):
    table, items = pq.read_table(folder / "test"), pq.read_table(folder / "items")
    far = [[1000 + item for item in row] for row in table["seen"].to_pylist()]
    table = table.drop("history").append_column("seen_sku", pa.array(far, pa.list_(pa.int64())))
    replace_test_rows(folder, tmp_path, table)
    schema = Schema.load(folder / "schema.yaml")
    for name in ("items", "schema.yaml"):
        (tmp_path / name).unlink()
    del schema.sparse["history"]
    (tmp_path / "schema.yaml").write_text(schema.to_yaml())
    (tmp_path / "items").mkdir()
    skus = pa.array([1000 + item for item in items["item"].to_pylist()])
    pq.write_table(items.append_column("sku", skus), tmp_path / "items/a.parquet")
    chosen = {"item": "item", "right_items": "right_items"}
    open_retrieval_data(tmp_path, {"name": "mf"}, seen=["seen"], **chosen)
    with pytest.raises(DataError, match="'seen_sku' refers to items by 'sku', not by 'item'"):
        open_retrieval_data(tmp_path, {"name": "mf"}, seen=["seen_sku"], **chosen)
    known = [row[: len(row) // 4] for row in table["seen"].to_pylist()]  # most seen items are no longer offered
    mixed = [a + b for a, b in zip(known, far, strict=True)]
    (tmp_path / "test/part-0.parquet").unlink()
    table = table.append_column("mixed", pa.array(mixed, pa.list_(pa.int64())))
    pq.write_table(table, tmp_path / "test/part-0.parquet")
    open_retrieval_data(tmp_path, {"name": "mf"}, seen=["mixed"], **chosen)


def test_task_column_with_item_lists_is_rejected(folder, tmp_path):
    table = pq.read_table(folder / "test")
    replace_test_rows(folder, tmp_path, table.drop("item").append_column("item", table["right_items"]))
    with pytest.raises(DataError, match=r"eval\.retrieval\.right_items="):
        open_retrieval_data(tmp_path, item="item", seen=["seen"])
