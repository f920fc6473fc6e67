"""Proposed table sizes: hash collisions, and rows for unseen ids."""

import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from any_parquet import read_with_schema_text, write
from inspected import inspect_columns
from reading import collate_table, read_canonical_rows

from raytrec.data.batch import Collator
from raytrec.data.read_plans import ReadPlan
from raytrec.inspection.propose import inspect
from raytrec.scoring.request_rows import RowReader, to_table

ROWS = 4000


def compute_collision_share(folder, schema, values, feature="word", among=None):
    """Return the fraction of values whose table row is shared with a more frequent value.

    Rows are read in file order, as in a run.

    Args:
        among: Values to compare; None compares all values.
    """
    batch = collate_table(*read_canonical_rows(folder, ReadPlan(schema)))
    rows = batch.sparse[feature].values().tolist()
    pairs, counts = sorted(set(zip(rows, values, strict=True))), Counter(values)
    lost = 0
    for _, of_row in itertools.groupby(pairs, key=lambda pair: pair[0]):
        together = [counts[value] for _, value in of_row if among is None or value in among]
        lost += sum(together) - max(together, default=0)
    return lost / len(values)


def draw_words(kind, distinct, seed):
    """Return ROWS words: Zipf-distributed for kind zipf, equally frequent for kind even."""
    made = np.random.default_rng(seed)
    words = [f"{kind} {made.integers(1e9)} {i}" for i in range(distinct)]
    places = made.zipf(1.3, ROWS) % distinct if kind == "zipf" else made.permutation(ROWS) % distinct
    return [words[place] for place in places]


@pytest.mark.parametrize("kind,distinct", [("even", 7), ("even", 16), ("zipf", 60), ("even", 400)])
@pytest.mark.parametrize("seed", range(3))
def test_small_text_columns_have_no_collisions(tmp_path, kind, distinct, seed):
    values = draw_words(kind, distinct, seed)
    found = inspect_columns(tmp_path, {"word": values})
    assert compute_collision_share(tmp_path, found.schema, values) == 0
    assert found.schema.tables["word"].rows <= 65_536
    assert "frequent values do not share a row" in found.schema_yaml()


def test_table_size_is_not_raised_without_collisions(tmp_path):
    assert inspect_columns(tmp_path, {"word": ["yes", "no", "maybe"] * 30}).schema.tables["word"].rows == 100


def test_frequent_text_values_have_no_collisions(tmp_path):
    frequent = [f"frequent {i}" for i in range(300)]
    values = frequent * 100 + [f"rare {i}" for i in range(1500)]
    found = inspect_columns(tmp_path, {"word": values})
    assert found.schema.tables["word"].rows <= 1.1 * 10 * 1800
    lost = compute_collision_share(tmp_path, found.schema, values)
    assert 0 < lost <= 1500 / len(values)
    assert compute_collision_share(tmp_path, found.schema, values, among=set(frequent)) == 0
    assert f"{100 * lost:.2g} % of the lookups share a row with a more frequent value" in found.schema_yaml()


@pytest.mark.parametrize("low", [-(2**62), 0, 10**7])
def test_hashed_integers_have_no_collisions(tmp_path, low):
    made = np.random.default_rng(low % 97)
    ids = made.choice(np.unique(made.integers(low, 2**62, 200)), ROWS)
    schema = inspect_columns(tmp_path, {"word_id": ids}).schema
    assert schema.tables["word"].out_of_range == "hash"
    assert compute_collision_share(tmp_path, schema, ids.tolist(), "word_id") == 0


def test_features_in_a_shared_table_have_no_collisions(tmp_path):
    made = np.random.default_rng(8)
    words = [f"{i} {i * i}" for i in range(300)]
    home, work = (made.choice(part, ROWS) for part in (words[:200], words[20:200]))
    schema = inspect_columns(tmp_path, {"home": home, "work": work}).schema
    assert schema.sparse["home"].table == schema.sparse["work"].table
    batch = collate_table(*read_canonical_rows(tmp_path, ReadPlan(schema)))
    rows = np.concatenate([batch.sparse[name].values().numpy() for name in ("home", "work")])
    assert len(set(rows.tolist())) == len({*home, *work})


def test_binary_columns_have_no_collisions(tmp_path):
    values = [f"{i % 300}".encode() for i in range(ROWS)]
    for kind in (pa.binary(), pa.large_binary()):
        schema = inspect_columns(tmp_path, {"word": pa.array(values, kind)}).schema
        assert compute_collision_share(tmp_path, schema, values) == 0


def test_tables_reserve_a_row_for_unseen_integers(tmp_path):
    made = np.random.default_rng(4)
    columns = {
        "age": made.integers(17, 91, ROWS),
        "year": made.integers(1990, 2025, ROWS),
        "user_id": np.append(made.integers(0, 300, ROWS - 1), 299),
        "shop": np.append(made.integers(0, 500, ROWS - 1), 499),
        "tags": pa.array([bag.tolist() for bag in np.split(made.integers(0, 40, ROWS * 2), ROWS)]),
    }
    found = inspect_columns(tmp_path, columns)
    tables = {name: found.schema.tables[spec.table] for name, spec in found.schema.sparse.items()}
    assert {name: (table.rows, table.out_of_range) for name, table in tables.items()} == {
        "age": (91, "clamp"),
        "year": (2025, "clamp"),
        "user_id": (301, "clamp"),
        "shop": (501, "clamp"),
        "tags": (41, "clamp"),
    }
    text, settings = found.schema_yaml(), "dim: 16, out_of_range: clamp"
    assert f"user: {{rows: 301, {settings}}}  # larger ids use the last row, which is not trained" in text
    assert f"age: {{rows: 91, {settings}}}  # larger values are clamped to 90" in text


def test_ids_of_a_sampled_dataset_are_hashed(tmp_path):
    columns = {"label": np.arange(ROWS) % 2, "user_id": np.arange(ROWS) // 4}
    write(tmp_path / "a.parquet", columns, row_group_size=100)
    assert inspect(str(tmp_path), max_rows=1000).schema.tables["user"].out_of_range == "hash"


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()])
def test_whole_floats_get_the_same_roles_as_integers(tmp_path, kind):
    made = np.random.default_rng(9)
    nulls = made.random(ROWS) < 0.2
    columns = {
        "shop": made.integers(0, 300, ROWS),
        "zip": made.choice(made.integers(8000, 9000, 50), ROWS),
        "flag": made.integers(0, 2, ROWS),
        "clicks": made.integers(-50, 50, ROWS),
        "amount": made.integers(0, 10**6, ROWS),
        "item_id": made.choice(made.integers(10**7, 2**24, 300), ROWS),
    }
    label = {"label": np.arange(ROWS) % 2}
    for name, of in (("a", pa.int64()), ("b", kind)):
        arrays = {key: pa.array(values, of, mask=nulls) for key, values in columns.items()}
        write(tmp_path / name / "a.parquet", label | arrays)
    plain, floats = (inspect(str(tmp_path / name)) for name in "ab")
    assert set(plain.schema.sparse) == {"shop", "zip", "flag", "item_id"}
    assert floats.schema == plain.schema and not floats.transforms
    rows = [collate_table(*read_canonical_rows(tmp_path / name, ReadPlan(plain.schema))).sparse for name in "ab"]
    assert rows[0].values().tolist() == rows[1].values().tolist()
    assert rows[0].lengths().tolist() == rows[1].lengths().tolist()


def test_inexact_floats_are_not_read_as_ids(tmp_path):
    made = np.random.default_rng(9)
    columns = {
        "half": made.integers(0, 30, ROWS) / 2,
        "hole": np.append(made.integers(0, 30, ROWS - 1), np.inf),
        "key_id": made.choice(made.integers(2**60, 2**62, 50), ROWS).astype(float),
        "user_id": made.integers(0, 300, ROWS),
    }
    found = inspect_columns(tmp_path, columns)
    assert found.schema.dense == ["half", "hole"]
    assert {"do": "cast", "columns": ["key_id"], "to": "int64"} in found.transforms
    read_with_schema_text(found.schema_yaml(), tmp_path)


def test_float_and_integer_columns_of_the_same_ids_share_a_table(tmp_path):
    made = np.random.default_rng(2)
    item = made.integers(0, 900, 300)[made.integers(0, 300, ROWS)] * 1000
    columns = {"item_id": item, "last_item_id": pa.array(item[::-1], pa.float64(), mask=item > 800_000)}
    sparse = inspect_columns(tmp_path, columns).schema.sparse
    assert sparse["item_id"].table == sparse["last_item_id"].table == "item"


def test_requests_with_unseen_values_are_read(tmp_path):
    made = np.random.default_rng(4)
    nulls = made.random(ROWS) < 0.1
    columns = {
        "age": pa.array(made.integers(17, 91, ROWS), pa.float64(), mask=nulls),
        "user_id": np.append(made.integers(0, 300, ROWS - 1), 299),
        "city": made.choice(["Bern", "Chur"], ROWS),
    }
    schema = inspect_columns(tmp_path, columns).schema
    reader = RowReader(schema, (), [], pa.table(columns).schema)
    asked = [
        {"age": 91, "user_id": 10**9, "city": "Genf"},
        {"age": -1, "user_id": -1, "city": "Chur"},
        {"age": None, "user_id": 299, "city": None},
    ]
    sparse = Collator(reader.form, None)([reader.read(to_table(asked, reader.columns))], 3, 3).sparse
    assert [ids.tolist() for ids in sparse["age"].to_dense()] == [[90], [0], []]
    assert [ids.tolist() for ids in sparse["user_id"].to_dense()] == [[300], [0], [299]]


@pytest.mark.parametrize("seed", range(3))
def test_frequent_folder_values_have_no_collisions(tmp_path, seed):
    made = np.random.default_rng(seed)
    for value in made.integers(100_000, 99_999_999, 200):
        (tmp_path / f"zip_id={value}").mkdir()
        table = pa.table({"label": made.integers(0, 2, 4), "age": made.random(4)})
        pq.write_table(table, tmp_path / f"zip_id={value}/a.parquet")
    found = inspect(str(tmp_path))
    assert "frequent values do not share a row" in found.schema_yaml()
    batch = collate_table(*read_canonical_rows(tmp_path, ReadPlan(found.schema)))
    assert len(set(batch.sparse["zip_id"].values().tolist())) == 200


def test_constant_label_in_folder_names_can_be_named(tmp_path):
    (tmp_path / "click=1").mkdir()
    pq.write_table(pa.table({"user_id": [1, 2], "age": [0.5, 1.5]}), tmp_path / "click=1/a.parquet")
    assert inspect(str(tmp_path), labels=["click"]).schema.labels == ["click"]


def test_folder_keys_do_not_share_the_table_of_a_column(tmp_path):
    made = np.random.default_rng(0)
    zips = made.integers(100_000, 99_999_999, 60)
    for value in zips:
        (tmp_path / f"zip_id={value}").mkdir()
        table = pa.table({"label": made.integers(0, 2, 8), "last_zip_id": made.choice(zips, 8)})
        pq.write_table(table, tmp_path / f"zip_id={value}/a.parquet")
    schema = inspect(str(tmp_path)).schema
    assert schema.sparse["zip_id"].table != schema.sparse["last_zip_id"].table


def test_comments_of_a_schema_contain_no_secrets(tmp_path):
    pq.write_table(pa.table({"label": [0, 1], "user_id": [1, 2], "z": [1, 2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"label": [0, 1], "user_id": [1, 2]}), tmp_path / "b.parquet")
    text = inspect(f"file://{tmp_path}?secret_key=TOPSECRET").schema_yaml()
    assert "missing in file://" in text and "TOPSECRET" not in text
