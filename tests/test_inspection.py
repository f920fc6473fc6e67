"""From columns to a schema that loads and trains."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from raytrec.data.fragments import scan
from raytrec.errors import ConfigError, DataError, SchemaError
from raytrec.inspection import inspect
from raytrec.schema import Schema

ROWS = 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 5, ROWS)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tags = pa.ListArray.from_arrays(offsets, rng.integers(0, 50, offsets[-1]))
    weights = pa.ListArray.from_arrays(offsets, rng.random(offsets[-1]))
    price = rng.normal(size=ROWS)
    table = pa.table(
        {
            "click": rng.integers(0, 2, ROWS).astype(np.int8),
            "price": pa.array(price, mask=rng.random(ROWS) < 0.1),
            "user_id": rng.integers(0, 300, ROWS),
            "slot": rng.integers(0, 7, ROWS),
            "device_hash": rng.choice(rng.integers(-(2**62), 2**62, 90), ROWS),
            "item_id": rng.choice(rng.integers(-(2**62), 2**62, 90), ROWS),
            "city": rng.choice(["Bern", "Basel", "Chur"], ROWS),
            "tags": tags,
            "tags_weights": weights,
            "vector": pa.array([[0.5, 1.0]] * ROWS),
            "premium": rng.random(ROWS) < 0.5,
            "seen_at": rng.integers(1_600_000_000, 1_700_000_000, ROWS),
            "day": [datetime.date(2026, 1, 1)] * ROWS,
            "version": np.ones(ROWS, np.int64),
            "nothing": pa.nulls(ROWS, pa.int64()),
            "amount": np.append(rng.integers(0, 10**6, ROWS - 1), 0) // 2 * 2,
            "row": np.arange(ROWS),
        }
    )
    path = tmp_path_factory.mktemp("inspect") / "train"
    path.mkdir()
    pq.write_table(table, path / "a.parquet", row_group_size=300)
    return path


def test_kinds(folder):
    found = inspect(str(folder))
    kinds = {f.stats.name: f.kind for f in found.findings}
    assert kinds == {
        "click": "label",
        "price": "dense",
        "user_id": "sparse",
        "slot": "sparse",
        "device_hash": "dense",
        "item_id": "sparse",
        "city": "sparse",
        "tags": "sparse",
        "tags_weights": "weights",
        "vector": "left out",
        "premium": "dense",
        "seen_at": "left out",
        "day": "left out",
        "version": "left out",
        "nothing": "left out",
        "amount": "dense",
        "row": "left out",
    }
    tables = found.schema.tables
    assert (tables["user"].rows, tables["user"].out_of_range) == (300, "error")
    assert tables["city"].out_of_range == tables["item"].out_of_range == "hash"
    assert found.schema.sparse["tags"].weights == "tags_weights"
    assert found.schema.sparse["tags"].pooling == "mean"


def test_figures(folder):
    found = inspect(str(folder))
    column = pq.read_table(folder)
    stats = {f.stats.name: f.stats for f in found.findings}
    assert found.rows == ROWS and found.whole
    for name in ("user_id", "item_id", "city", "amount"):
        assert stats[name].distinct == len(set(column[name].to_pylist()))
    assert stats["price"].nulls == column["price"].null_count
    lengths = [len(bag) for bag in column["tags"].to_pylist()]
    assert stats["tags"].bag_text.startswith(f"0 to 4, mean {np.mean(lengths):.3g}, p95 4, empty")


def test_text_loads_fits_the_data_and_shows_its_reasons(folder, tmp_path):
    text = inspect(str(folder), dim=8).schema_yaml()
    schema = Schema.parse(yaml.safe_load(text), "text")
    assert scan(str(folder), schema).rows == ROWS
    assert {t.dim for t in schema.tables.values()} == {8}
    assert "nulls: training refuses them" in text and "large values: scale them" in text
    assert "# left out: seen_at (int64): a time" in text
    assert "bags 0 to 4" in text


def test_of_a_dataset_it_looks_at_train(folder):
    found = inspect(str(folder.parent))
    assert found.uri == str(folder) and found.rows == ROWS


def test_many_distinct_values_are_estimated(tmp_path):
    values = np.random.default_rng(0).permutation(400_000)
    pq.write_table(
        pa.table({"y": values % 2, "user_id": values}), tmp_path / "a.parquet", row_group_size=50_000
    )
    stats = inspect(str(tmp_path)).findings[1].stats
    assert stats.distinct == pytest.approx(400_000, rel=0.02)
    assert stats.distinct_text.startswith("~")
    sample = inspect(str(tmp_path), max_rows=100_000)
    assert sample.rows == 100_000 and not sample.whole and "a sample" in sample.schema_yaml()


def test_columns_whose_names_tables_cannot_have(tmp_path):
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 30, 500) for name in ("type", "values", "geo.city_id")}
    pq.write_table(pa.table({"click": rng.integers(0, 2, 500)} | columns), tmp_path / "a.parquet")
    schema = inspect(str(tmp_path)).schema
    assert set(schema.sparse) == set(columns)
    assert set(schema.tables) == {"type_table", "values_table", "geo_city"}


def test_label_must_be_known(tmp_path):
    pq.write_table(pa.table({"bought": [0, 1] * 5, "user_id": [1, 2] * 5}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match="cannot tell which column is the label") as error:
        inspect(str(tmp_path))
    assert "--label" in str(error.value) and "bought" in str(error.value)
    assert inspect(str(tmp_path), labels=["bought"]).schema.labels == ["bought"]
    with pytest.raises(SchemaError, match="there is no column 'sold'"):
        inspect(str(tmp_path), labels=["sold"])


def test_nothing_to_look_up_and_nothing_there(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        inspect(str(tmp_path / "none"))
    pq.write_table(pa.table({"label": [0, 1], "x": [0.5, 0.1]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match="looked up"):
        inspect(str(tmp_path))


def test_file_is_not_overwritten(folder, tmp_path, capsys):
    found = inspect(str(folder))
    found.show(str(tmp_path / "schema.yaml"))
    assert Schema.load(tmp_path / "schema.yaml") == found.schema
    assert "raytrec train" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="exists"):
        found.show(str(tmp_path / "schema.yaml"))
    found.show(str(tmp_path / "schema.yaml"), overwrite=True)
    found.show()
    assert capsys.readouterr().out.endswith(found.schema_yaml())
