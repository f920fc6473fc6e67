"""Request rows: reading of candidates, and errors in invalid rows."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from reading import collate_table, read_canonical_rows
from request_rows import (
    CANDIDATE_COLUMNS,
    LIST_FEATURES,
    REQUEST_SCHEMA_PARTS,
    SCHEMA,
    make_request_table,
    repeat_by_candidate,
)

from raytrec.common.errors import DataError, SchemaError
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.data.fragments import scan
from raytrec.data.pages.decode import ReadErrorPolicy
from raytrec.data.read_plans import ReadPlan, TaskRows
from raytrec.driver.datasets import to_example_schema
from raytrec.worker.nonfinite import dump

TASK = TaskRows("y", "y", mask="shown", sample_weight="w")


def write(path, rows=30, group=10, **columns):
    made = make_request_table(rows, 1)
    for name, values in columns.items():
        place = made.column_names.index(name)
        made = made.set_column(place, name, pa.array(values, made.schema.field(name).type))
    pq.write_table(made, path, row_group_size=group)
    return made


@pytest.mark.parametrize("task", [TaskRows("y", "it"), TaskRows("y", "it", mask="shown")], ids=["plain", "masked"])
@pytest.mark.parametrize("of_row", [0, 29])
def test_data_without_candidates_is_detected_from_footers(tmp_path, task, of_row):
    plan, names = ReadPlan(SCHEMA, tasks=(task,)), CANDIDATE_COLUMNS
    write(tmp_path / "a.parquet", **{name: [[]] * 30 for name in names})
    why = "its label 'y' has no candidate with a value in any row"
    assert dict(scan(str(tmp_path), plan).empty_tasks) == {"it": why}
    kept = make_request_table(30, 1)
    lists = {name: kept[name].to_pylist() for name in names}
    some = {name: [v if row == of_row else [] for row, v in enumerate(values)] for name, values in lists.items()}
    write(tmp_path / "a.parquet", **some)
    assert not scan(str(tmp_path), plan).empty_tasks


@pytest.mark.parametrize("labels", [["y"], ["w"]])
def test_forgotten_candidates_are_suggested(tmp_path, labels):
    write(tmp_path / "a.parquet")
    schema = Schema.parse(REQUEST_SCHEMA_PARTS | {"labels": labels}, "without candidates")
    with pytest.raises(DataError) as error:
        scan(str(tmp_path), ReadPlan(schema))
    column = "y" if labels == ["y"] else "price"
    assert f"add {column} to candidates in schema.yaml" in error.value.do


@pytest.mark.parametrize("change", [{}, {"item": {"table": "item", "column": "hashed"}}])
def test_lists_of_candidates_are_refused_by_their_columns(tmp_path, change):
    """The column `hashed` is written by a transform of the lists in `item`."""
    columns = {"candidates": ["y", "item", "shop"], "dense": ["age"], "scale": {}}
    parts = REQUEST_SCHEMA_PARTS | columns | {"sparse": REQUEST_SCHEMA_PARTS["sparse"] | change}
    hashing = {"do": "hash", "columns": ["item"], "rows": 30, "into": ["hashed"]}
    config = load_config({"data": {"train": str(tmp_path), "transforms": [hashing]}})
    schema = Schema.parse(parts, "requests")
    requests = write(tmp_path / "a.parquet").drop_columns(["shop"])
    pq.write_table(requests, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="'item' contains lists of candidates"):
        to_example_schema(config, schema, str(tmp_path))
    repeated = requests.set_column(requests.column_names.index("item"), "item", pa.array([1] * len(requests)))
    pq.write_table(repeated, tmp_path / "a.parquet")
    assert not to_example_schema(config, schema, str(tmp_path)).candidates
    pq.write_table(requests.append_column("item", requests["item"]), tmp_path / "a.parquet")
    assert not to_example_schema(config, schema, str(tmp_path)).candidates, "the scan reports the repeated name"


def test_batch_keeps_candidates_in_row_order(tmp_path):
    made = write(tmp_path / "a.parquet")
    batch = collate_table(*read_canonical_rows(tmp_path / "a.parquet", ReadPlan(SCHEMA, tasks=(TASK,))), padding=2)
    rows = repeat_by_candidate(made)
    assert batch.requests.tolist() == rows["row"].to_pylist()
    assert batch.labels[:, 0].tolist() == rows["y"].to_pylist()
    assert batch.sparse["item"].values().tolist() == rows["item"].to_pylist()
    price = np.float32((rows["price"].to_numpy() - 1) / 2)
    assert np.allclose(batch.dense_of_candidates[:, 0], price, atol=1e-7)
    assert np.allclose(batch.dense[:30, 0], made["age"]) and not batch.dense[:, 1].any()
    assert np.allclose(batch.task_weights[:, 0], rows["w"].to_numpy() * rows["shown"].to_numpy())
    assert batch.sparse["user"].values().tolist() == made["user"].to_pylist()
    assert batch.weights.tolist() == [1] * 30 + [0] * 2 and batch.global_rows == 30


@pytest.mark.parametrize(
    "name,row,value,text",
    [
        ("price", 17, [1.0], "column 'price' has 1 value, but column 'y' has"),
        ("item", 25, list(range(9)), "column 'item' has 9 values, but column 'y' has"),
        ("shown", 3, [1] * 8, "column 'shown' has 8 values, but column 'y' has"),
        ("y", 12, None, "column 'y' contains a null instead of a list"),
        ("shop", 29, None, "column 'shop' contains a null instead of a list"),
        ("price", 8, [None, 1.0], "column 'price' contains a null"),
        ("y", 8, [2, 0], "label 'y' is 2"),
        ("item", 8, [99, 0], "id 99 of feature 'item' is out of range for table 'item'"),
    ],
)
def test_candidate_errors_name_file_row_and_column(tmp_path, name, row, value, text):
    good = make_request_table(30, 1)
    rows = good.to_pylist()
    rows[row] |= {key: [0, 1] for key in (*CANDIDATE_COLUMNS, "shown")} | {name: value}
    pq.write_table(pa.Table.from_pylist(rows, good.schema), tmp_path / "a.parquet", row_group_size=10)
    plan = ReadPlan(SCHEMA, tasks=(TASK,))
    with pytest.raises(DataError) as error:
        read_canonical_rows(tmp_path / "a.parquet", plan)
    where = error.value.where
    assert text in error.value.what
    assert where.endswith(f"a.parquet, row group {row // 10}, column {name}, row {row % 10}"), where
    kept = collate_table(*read_canonical_rows(tmp_path / "a.parquet", plan, ReadErrorPolicy(skip=True)))
    assert kept.weights.sum() == 29 and row not in kept.requests.tolist()


@pytest.mark.parametrize("name", ["y", "price", "item"])
def test_candidate_column_must_be_a_list(tmp_path, name):
    made = make_request_table(30, 1)
    single = pa.array([1] * 30)
    pq.write_table(made.set_column(made.column_names.index(name), name, single), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=f"candidate column '{name}' has type int64"):
        scan(str(tmp_path), ReadPlan(SCHEMA))


@pytest.mark.parametrize(
    "named,text",
    [
        (["y", "prise"], "no label, dense column or sparse feature 'prise'; did you mean 'price'"),
        (["y", "item", "tags"], "tags has weights, but"),
        (["y", "item", "history"], "history is a sequence, but"),
        (["y", "price"], "at least one sparse feature is required"),
    ],
)
def test_schema_rejects_invalid_candidates(named, text):
    with pytest.raises(SchemaError, match=text):
        Schema.parse(REQUEST_SCHEMA_PARTS | {"candidates": named}, "test")


def test_schema_yaml_includes_candidates():
    assert Schema.parse(yaml.safe_load(SCHEMA.to_yaml()), "test") == SCHEMA
    assert SCHEMA.select_features({"item", "user"}).candidates == ["y", "item"]


def test_batch_dump_stores_candidates_as_lists(tmp_path):
    made = write(tmp_path / "a.parquet", 12)
    batch = collate_table(*read_canonical_rows(tmp_path / "a.parquet", ReadPlan(SCHEMA, tasks=(TASK,))), padding=1)
    kept = pq.read_table(dump(batch, SCHEMA, str(tmp_path), 5, 0))
    assert kept["y"].to_pylist() == made["y"].to_pylist()
    assert kept["item"].to_pylist() == made["item"].to_pylist()
    assert [len(price) for price in kept["price"].to_pylist()] == [len(y) for y in made["y"].to_pylist()]
    assert set(kept.column_names) >= LIST_FEATURES
