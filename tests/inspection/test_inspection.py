"""`inspect` proposes a schema that loads and trains."""

import datetime
import shutil

import numpy as np
import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from any_parquet import read_with_schema_text, write, write_unusual_dataset
from inspected import get_findings, inspect_columns, read_shown_settings
from reading import collate_table, parse_transforms, read_canonical_rows
from typer.testing import CliRunner

from raytrec.cli import app
from raytrec.common.errors import ConfigError, DataError, SchemaError
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.data.fragments import scan
from raytrec.data.read_plans import ReadPlan
from raytrec.inspection import column_scan
from raytrec.inspection.propose import inspect
from raytrec.inspection.result import format_bag_lengths

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


def test_inspect_assigns_roles_to_columns(folder):
    found = inspect(str(folder))
    kinds = {f.stats.name: f.kind for f in found.findings}
    expected = {
        "label": ["click"],
        "dense": ["price", "premium", "amount"],
        "sparse": ["user_id", "slot", "device_hash", "item_id", "city", "tags"],
        "weights": ["tags_weights"],
        "skipped": ["vector", "seen_at", "day", "version", "nothing", "row"],
    }
    assert kinds == {name: kind for kind, names in expected.items() for name in names}
    tables = found.schema.tables
    assert (tables["user"].rows, tables["user"].out_of_range) == (301, "clamp"), "unseen ids have a row"
    assert tables["city"].out_of_range == tables["item"].out_of_range == "hash"
    assert found.schema.sparse["tags"].weights == "tags_weights"
    assert found.schema.sparse["tags"].pooling == "mean"


def test_inspect_statistics_match_the_data(folder):
    found = inspect(str(folder))
    column = pq.read_table(folder)
    stats = {name: finding.stats for name, finding in get_findings(found).items()}
    assert found.rows == ROWS and found.scan.whole
    for name in ("user_id", "item_id", "city", "amount"):
        assert stats[name].distinct == len(set(column[name].to_pylist()))
    assert stats["price"].nulls == column["price"].null_count
    lengths = [len(bag) for bag in column["tags"].to_pylist()]
    assert format_bag_lengths(stats["tags"]).startswith(f"0 to 4, mean {np.mean(lengths):.3g}, p95 4, empty")


def test_schema_yaml_loads_and_explains_its_choices(folder, tmp_path):
    text = inspect(str(folder), dim=8).schema_yaml()
    schema = Schema.parse(yaml.safe_load(text), "text")
    assert scan(str(folder), ReadPlan(schema)).rows == ROWS
    assert {t.dim for t in schema.tables.values()} == {8}
    assert "nulls: replaced by the mean (scale)" in text and schema == inspect(str(folder), dim=8).schema
    assert "# skipped: seen_at (int64): possibly a time" in text
    assert "bags 0 to 4" in text


def test_dense_columns_have_a_scale(tmp_path):
    rng = np.random.default_rng(5)
    columns = {
        "level": rng.normal(1234567890.0, 2.0, ROWS),
        "money": rng.lognormal(3, 3, ROWS) * rng.choice([-1, 1], ROWS),
        "gap": pa.array(rng.random(ROWS), mask=np.arange(ROWS) % 10 == 0),
        "hole": np.where(np.arange(ROWS) % 7 == 0, np.nan, 2.5),
    }
    found = inspect_columns(tmp_path, {"slot": rng.integers(0, 7, ROWS), **columns}, row_group_size=300)
    schema = Schema.parse(yaml.safe_load(found.schema_yaml()), "text")
    assert schema == found.schema and not found.transforms and list(schema.scale) == list(columns)
    level, money, gap, hole = schema.scale.values()
    x = columns["level"]
    assert (level.log, level.nulls) == (False, "error")
    assert level.std == pytest.approx(x.std(), rel=1e-3)
    assert abs(level.mean - x.mean()) < 1e-3 * x.std(), "the mean is not precise relative to the standard deviation"
    logs = np.sign(columns["money"]) * np.log1p(abs(columns["money"]))
    assert money.log and (money.mean, money.std) == pytest.approx((logs.mean(), logs.std()), rel=1e-4)
    assert gap.nulls == hole.nulls == "mean" and (hole.mean, hole.std) == (2.5, 1.0)
    batch = collate_table(*read_canonical_rows(tmp_path, ReadPlan(schema)))
    assert batch.dense[:, 1:3].abs().max() < 6
    torch.testing.assert_close(batch.dense.mean(0), torch.zeros(4), rtol=0, atol=1e-2)
    assert batch.dense[::10, 2].count_nonzero() == 0 == batch.dense[:, 3].count_nonzero()


def test_reserved_columns_are_not_features(folder, tmp_path, capsys):
    part = tmp_path / "train" / "hour=1"
    part.mkdir(parents=True)
    shutil.copy(next(folder.glob("*.parquet")), part)
    whole = inspect(str(folder)).schema
    found = inspect(str(tmp_path), labels=["click", "premium"], reserve_columns=["city", "row", "hour"])
    reserved = {f.stats.name for f in found.findings if f.kind == "reserved"}
    assert reserved == {"city", "row"} and set(whole.sparse) - set(found.schema.sparse) == {"city"}
    schema = Schema.parse(yaml.safe_load(found.schema_yaml()), "text")
    assert schema == found.schema and "#   reserve_columns: [city, row, hour]" in found.schema_yaml()
    settings = read_shown_settings(found, tmp_path / "schema.yaml", capsys)
    assert settings["data.reserve_columns"] == "[city, row, hour]"
    proposed = [f"{key}={settings[key]}" for key in ("tasks", "data.reserve_columns")]
    config = load_config({"data": {"train": "x"}}, proposed)
    assert [task.label for task in config.tasks] == ["click", "premium"]
    columns = config.data.reserve_columns
    assert scan(str(tmp_path / "train"), ReadPlan(schema), declared=columns).form.schema == schema
    with pytest.raises(SchemaError, match="no column 'cty'; did you mean 'city'"):
        inspect(str(folder), reserve_columns=["cty"])
    with pytest.raises(SchemaError, match="'tags' cannot be reserved"):
        inspect(str(folder), reserve_columns=["tags"])


def test_inspect_reads_train_of_a_dataset(folder):
    found = inspect(str(folder.parent))
    assert found.uri == str(folder) and found.rows == ROWS


@pytest.mark.slow
def test_many_distinct_values_are_estimated(tmp_path):
    values = np.random.default_rng(0).permutation(400_000)
    pq.write_table(pa.table({"y": values % 2, "user_id": values}), tmp_path / "a.parquet", row_group_size=50_000)
    stats = inspect(str(tmp_path)).findings[1].stats
    assert stats.distinct == pytest.approx(400_000, rel=0.02)
    assert stats.distinct_text.startswith("~")
    sample = inspect(str(tmp_path), max_rows=100_000)
    assert sample.rows == 100_000 and not sample.scan.whole and "a sample" in sample.schema_yaml()


def test_invalid_table_names_are_replaced(tmp_path):
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 30, 500) for name in ("type", "values", "geo.city_id")}
    schema = inspect_columns(tmp_path, columns).schema
    assert set(schema.sparse) == set(columns)
    assert set(schema.tables) == {"type_table", "values_table", "geo_city"}


def test_inspect_requires_a_known_label(tmp_path):
    pq.write_table(pa.table({"bought": [0, 1] * 5, "user_id": [1, 2] * 5}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match="cannot determine the label column") as error:
        inspect(str(tmp_path))
    assert "--label" in str(error.value) and "bought" in str(error.value)
    assert inspect(str(tmp_path), labels=["bought"]).schema.labels == ["bought"]
    with pytest.raises(SchemaError, match="there is no column 'sold'"):
        inspect(str(tmp_path), labels=["sold"])


def test_inspect_rejects_missing_folders_and_features(tmp_path):
    with pytest.raises(DataError, match="the path does not exist"):
        inspect(str(tmp_path / "none"))
    pq.write_table(pa.table({"label": [0, 1], "x": pa.nulls(2)}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match="no column can be a feature"):
        inspect(str(tmp_path))


def test_dense_only_data_gets_bucket_features(tmp_path):
    rng = np.random.default_rng(7)
    columns = {
        "label": rng.integers(0, 2, ROWS),
        "x": rng.normal(1e9, 2.0, ROWS),
        "x_bucket": pa.array(rng.normal(size=ROWS), mask=np.arange(ROWS) % 10 == 0),
        "a: b": rng.lognormal(3, 3, ROWS) * rng.choice([-1, 1], ROWS),
        "huge": np.where(np.arange(ROWS) % 9, rng.normal(size=ROWS), np.inf),
        "flag": rng.random(ROWS) < 0.5,
        "price": pa.array((rng.integers(-500, 500, ROWS) / 4).tolist()).cast(pa.decimal128(9, 2)),
    }
    found = inspect_columns(tmp_path / "train", columns)
    schema = read_with_schema_text(found.schema_yaml(), tmp_path / "train")
    assert schema.dense == list(columns)[1:] and len(schema.sparse) == len(schema.dense)
    assert "also looked up in buckets, because no column contains ids" in found.schema_yaml()
    table, form = read_canonical_rows(
        tmp_path / "train", ReadPlan(schema, transforms=parse_transforms(found.transforms))
    )
    batch = collate_table(table, form)
    for name in ("x_bucket_2", "x_bucket_bucket", "a_b_bucket"):
        ids = batch.sparse[name].values().numpy()
        assert len(ids) == (1800 if name == "x_bucket_bucket" else ROWS)
        assert schema.tables[name].rows == 10 and set(ids) == set(range(10))
        assert np.bincount(ids).max() < 0.3 * ROWS


def test_column_without_finite_numbers_is_skipped(tmp_path):
    columns = {"label": [0, 1] * 20, "user_id": list(range(10)) * 4, "limit": [np.inf, None] * 20}
    found = inspect_columns(tmp_path, columns)
    assert found.schema.dense == [] and not found.transforms
    assert "no finite number" in found.schema_yaml()


def test_buckets_handle_extreme_values(tmp_path):
    for far in (1e10, 1e30, 1e300):
        found = inspect_columns(tmp_path, {"x": [0.5, far, -far]})
        read_with_schema_text(found.schema_yaml(), tmp_path)
        assert found.schema.scale["x"].log and found.schema.tables["x_bucket"].rows == 10


def test_show_does_not_overwrite_the_schema_file(folder, tmp_path, capsys):
    found = inspect(str(folder))
    found.show(str(tmp_path / "schema.yaml"))
    assert Schema.load(tmp_path / "schema.yaml") == found.schema
    assert "raytrec train" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="exists"):
        found.show(str(tmp_path / "schema.yaml"))
    found.show(str(tmp_path / "schema.yaml"), overwrite=True)
    found.show()
    assert capsys.readouterr().out.endswith(found.schema_yaml())


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory):
    return write_unusual_dataset(tmp_path_factory.mktemp("odd"))


def test_schema_of_odd_columns_is_readable(odd_folder, capsys):
    found = inspect(str(odd_folder))
    text = found.schema_yaml()
    schema = read_with_schema_text(text, odd_folder / "train", odd_folder / "test")
    assert schema == found.schema
    found.show()
    captured = capsys.readouterr()
    assert captured.out == text and "[/red]" in captured.err
    assert inspect(str(odd_folder / "train")).schema == schema, "inspecting train/ also reads test/"


def test_inspect_assigns_roles_to_odd_columns(odd_folder):
    found = inspect(str(odd_folder))
    why = {f.stats.name: f.why for f in found.findings if f.kind == "skipped"}
    assert {name for name in why if "only nulls" in why[name]} == {"nothing"}
    assert why["deep"] == "type list<element: list<element: int64>> is not supported"
    assert "{do: date_part, columns: [when], part: hour, into: [when_hour]}, and when_hour" in why["when"]
    assert "since_1970: ms" in why["since"] and "part: weekday" in why["day"] and "do: age" in why["took"]
    assert set(why) == {"nothing", "deep", "when", "since", "day", "took", "halves"}
    schema = found.schema
    assert schema.labels == ["label"]
    assert {"Größe (cm)", "", "half", "money", "huge", "flag"} == set(schema.dense)
    assert {"year", "code", "pandas_id", "oracle_id", "key", "view", "user.age", "user.x.zip"} < set(schema.sparse)
    tables = schema.tables
    assert (tables["user"].rows, tables["user"].out_of_range) == (261, "clamp"), "includes ids of test/"
    assert tables[schema.sparse["code"].table].rows == 100 and tables["year"].rows == 2025
    assert schema.sparse["scores.key"].weights == "scores.value"
    assert "caf\u00e9_id: {table: café}" in found.schema_yaml()
    assert "0 to 259 including test" in found.schema_yaml()


def test_columns_of_the_same_ids_share_a_table(odd_folder):
    found = inspect(str(odd_folder))
    sparse = found.schema.sparse
    assert sparse["clicked_items"].table == sparse["item_id"].table == "item"
    assert sparse["clicked_items"].pooling == "sequence" and sparse["views"].pooling == "mean"
    assert found.schema.tables["item"].rows == 103
    assert sparse["[/red]"].table != sparse["a\nb"].table, "small integers overlap by chance"
    text = found.schema_yaml().partition("\nstatistics:")[0]
    lines = {line.strip().partition(":")[0]: line for line in text.splitlines()}
    assert "shares item's table: 100 % of its values are also in item_id" in lines["clicked_items"]
    assert "the most recent id must be last" in lines["clicked_items"]


def test_text_ids_share_tables_with_unique_names(tmp_path):
    rng = np.random.default_rng(0)
    cities = [f"city {i}" for i in range(40)]
    columns = {
        "home": rng.choice(cities, 900),
        "work": rng.choice(cities[:30], 900),
        "colour": rng.choice([f"colour {i}" for i in range(20)], 900),
        "colour_id": rng.integers(0, 20, 900),
        "history": pa.array([rng.integers(0, 70, 5).tolist() for _ in range(900)]),
        "user_id": rng.integers(0, 700, 900),
        "film_id": rng.integers(0, 70, 900),
        "prev_film_id": rng.integers(0, 70, 900),
    }
    sparse = inspect_columns(tmp_path, columns).schema.sparse
    assert sparse["work"].table == sparse["home"].table == "home"
    assert sparse["history"].table == sparse["prev_film_id"].table == sparse["film_id"].table == "film"
    assert {sparse["colour"].table, sparse["colour_id"].table} == {"colour", "colour_2"}
    assert sparse["user_id"].table == "user"


@pytest.mark.parametrize(
    "values,transform",
    [
        ([1, 2, 3, 4, 5], {"at_least": 4}),
        ([0.5, 1, 2, 3, 4, 4.5, 5], {"at_least": 4}),
        ([-1, 1], {"at_least": 1}),
        ([0, 1, None, 3], {"at_least": 3}),
        (list(range(200)), {"at_least": 99.5}),
        (["yes", "no"], {"positive": ["yes"]}),
        (["N", "Y", "N"], {"positive": ["Y"]}),
        (["view", "view", "Purchase", "click"], {"positive": ["Purchase", "click"]}),
        (["red", "blue", "red"], {"positive": ["blue"]}),
        (["0", "1"], {"positive": ["1"]}),
        ([b"no", b"yes"], {"positive": ["yes"]}),
    ],
)
@pytest.mark.parametrize("name", ["label", "stars: 1"])
def test_non_binary_labels_get_a_binarize_transform(tmp_path, name, values, transform):
    values = [v for v in values if v is not None] * 100
    columns = {name: values, "user_id": np.arange(len(values)) % 9}
    found = inspect_columns(tmp_path, columns, labels=None if name == "label" else [name])
    assert found.transforms == [{"do": "binarize", "columns": [name], **transform}]
    text = found.schema_yaml()
    assert read_with_schema_text(text, tmp_path).labels == [name]
    assert "choose the t" in text
    if len(set(values)) < 64:
        assert "of the rows are currently 1" in text


def test_shown_command_includes_the_transforms(tmp_path, capsys):
    place = tmp_path / "my data"
    found = inspect_columns(place, {"label": ["yes", "no"] * 9, "user_id": [1, 2] * 9})
    settings = read_shown_settings(found, tmp_path / "schema.yaml", capsys)
    assert settings["data.train"] == str(place)
    assert yaml.safe_load(settings["data.transforms"])[0]["positive"] == ["yes"]


def test_unsuitable_labels_are_rejected(tmp_path):
    for values, reason in (
        ([f"name {i}" for i in range(90)], "90 distinct texts.*binarize"),
        ([[1]] * 90, "of type list"),
        (pa.nulls(90), "only nulls"),
    ):
        with pytest.raises(SchemaError, match=rf"(?s)column 'label' cannot be the label: .*{reason}"):
            inspect_columns(tmp_path, {"label": values, "user_id": np.arange(90) % 7})
    columns = {"label": np.arange(90) % 5 + 1, "click": np.arange(90) % 2, "user_id": np.arange(90) % 7}
    found = inspect_columns(tmp_path, columns)
    assert found.schema.labels == ["click"] and "named like a label" in found.schema_yaml()
    assert "label" not in found.schema.columns, "the column may leak the click"
    write(tmp_path / "a.parquet", {"stars": np.arange(90) % 5 + 1, "user_id": np.arange(90) % 40})
    with pytest.raises(SchemaError, match="which a transform can convert to 0 and 1: stars"):
        inspect(str(tmp_path))


def test_differing_files_are_named(tmp_path):
    n = 400
    base = {"click": np.arange(n) % 2, "user_id": np.arange(n) % 9}
    ids, texts = np.arange(n) % 20, [str(i) for i in np.arange(n) % 20]
    a = base | {"x_id": ids, "y": ids * 1.0, "z": ids, "w": ids, "here": ids}
    a |= {"v": pa.nulls(n), "price": ids - 5}
    b = base | {"x_id": ids * 1.0, "y": ids * 1.0, "z": texts, "w": pa.array([{"a": 1}] * n), "v": ids}
    b |= {"price": ids * 0.5 - 5}
    write(tmp_path / "b.parquet", b)
    found = inspect_columns(tmp_path, a)
    text = found.schema_yaml()
    schema = read_with_schema_text(text, tmp_path)
    assert {"user_id", "x_id", "z", "v"} == set(schema.sparse) and set(schema.dense) == {"price"}
    where, there = tmp_path / "a.parquet", tmp_path / "b.parquet"
    assert f"its type differs: int64 in {where}; double in {there}" in text
    assert f"skipped: w (int64): its type differs: int64 in {where}; struct<a: int64> in {there}" in text
    assert f"skipped: here (int64): the column is missing in {there}" in text
    assert f"skipped: w.a (int64): the column is missing in {where}" in text
    write(tmp_path / "b.parquet", b | {"w": pa.array([[[1]]] * n)})
    text = inspect(str(tmp_path)).schema_yaml()
    assert f"its type differs: int64 in {where}; list<element: list<element: int64>> in {there}" in text


def test_duplicate_or_unreadable_columns_are_skipped_by_name(tmp_path):
    n = 300
    table = pa.table([np.arange(n) % 2, np.arange(n) % 9, np.arange(n), np.arange(n)], ["y", "user", "x", "x"])
    write(tmp_path / "a.parquet", table)
    found = inspect(str(tmp_path))
    assert f"skipped: x (int64): several columns have this name in {tmp_path}" in found.schema_yaml()
    read_with_schema_text(found.schema_yaml(), tmp_path)
    spoiled = {"y": np.arange(n) % 2, "user": np.arange(n) % 9, "big": np.arange(n) * 7.5}
    write(tmp_path / "a.parquet", spoiled, compression="none", use_dictionary=False)
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    column = pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(2)
    raw[column.data_page_offset : column.data_page_offset + 20] = bytes(20)
    (tmp_path / "a.parquet").write_bytes(raw)
    text = inspect(str(tmp_path)).schema_yaml()
    assert f"skipped: big (double): cannot be read in {tmp_path / 'a.parquet'}, row group 0: " in text


def test_nulls_inside_lists_are_reported(odd_folder):
    text = inspect(str(odd_folder)).schema_yaml()
    holes = next(line for line in text.splitlines() if line.startswith("  holes"))
    assert "2,800 nulls inside lists" in holes, "includes nulls of test/"
    assert "{do: drop_null, columns: [holes]}" in text, "nulls without weights are dropped"
    assert "{do: fill_null, columns: [tags], value: 6}" in text, "nulls with weights become an id"


def test_non_utf8_column_names_are_rejected(tmp_path):
    write(tmp_path / "a.parquet", {"label": [0, 1], "QQQQ": [1, 2]})
    raw = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(raw.replace(b"QQQQ", b"\xff\xfe\xfdQ"))
    with pytest.raises(DataError, match=r"(?s)utf-8.*a\.parquet"):
        inspect(str(tmp_path))


def test_inspect_of_a_file_reads_its_sibling_splits(tmp_path):
    write(tmp_path / "train.parquet", {"label": [0, 1] * 50, "user_id": [1, 2] * 50})
    write(tmp_path / "valid.parquet", {"label": [0, 1] * 50, "user_id": [1, 7] * 50})
    found = inspect(str(tmp_path / "train.parquet"))
    assert found.schema.tables["user"].rows == 9 and found.rows == 100
    assert found.scan.inspected_parts == {"valid": str(tmp_path / "valid.parquet")}
    write(tmp_path / "test.parquet", {"user_id": [1, 9] * 50})
    (tmp_path / "val.parquet").mkdir()
    found = inspect(str(tmp_path / "train.parquet"))
    assert list(found.scan.inspected_parts) == ["valid"] and found.schema.tables["user"].rows == 9
    assert "# test was not inspected: some of its files lack column label\n" in found.schema_yaml()
    assert "# val was not inspected: the folder contains no Parquet files\n" in found.schema_yaml()


@pytest.mark.parametrize("place", ["", " "])
def test_inspect_rejects_an_empty_path(place, tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", {"label": [0, 1] * 50, "user_id": [1, 2] * 50})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="the path of the data is empty"):
        inspect(place)


@pytest.mark.parametrize("rows", [0, -5])
def test_inspect_rejects_max_rows_below_one(rows, tmp_path):
    write(tmp_path / "a.parquet", {"label": [0, 1] * 50, "user_id": [1, 2] * 50})
    with pytest.raises(ConfigError, match=f"{rows} rows.*\n.*--rows"):
        inspect(str(tmp_path), max_rows=rows)


@pytest.mark.parametrize(
    "out,what",
    [("there.yaml", "the file exists"), ("no/x.yaml", "there is no folder with this path"), (".", "is a folder")],
)
def test_inspect_checks_the_output_path_before_reading(out, what, tmp_path, monkeypatch):
    (tmp_path / "there.yaml").write_text("")
    monkeypatch.setattr(column_scan, "read_footer", lambda path: pytest.fail("a footer was read"))
    done = CliRunner().invoke(app, ["inspect", str(tmp_path), "--out", str(tmp_path / out)])
    assert isinstance(done.exception, ConfigError) and what in done.exception.what


def test_partition_columns_are_proposed(tmp_path):
    """Use folders like Spark's partitionBy. Days are skipped because later rows have other days."""
    for label in (0, 1):
        for zone in ("04", "4", "a b"):
            folder = tmp_path / f"train/label={label}/zone={zone}/day=2026-11-0{label + 1}"
            folder.mkdir(parents=True)
            rows = parquet.make_tiny_table(40, label).drop_columns(["label"])
            pq.write_table(rows, folder / "a.parquet")
    found = inspect(str(tmp_path / "train"))
    assert found.schema.labels == ["label"] and "day" not in found.schema.sparse
    assert found.schema.tables[found.schema.sparse["zone"].table].out_of_range == "hash"
    assert found.rows == 240
    data = scan(str(tmp_path / "train"), ReadPlan(found.schema))
    assert data.rows == 240 and data.form.from_folders == {"label", "zone"}
    assert inspect(str(tmp_path / "train"), reserve_columns=["day"]).reserve_columns == ["day"]


def test_weights_must_match_the_lengths_of_their_ids(tmp_path):
    """Training rejects rows whose weights and ids differ in length."""
    tags, weights = pa.array([[1, 2], [3, 4]] * 50), pa.array([[0.5], [1.0]] * 50)
    found = get_findings(inspect_columns(tmp_path, {"tags": tags, "tags_weights": weights}))
    assert (
        found["tags_weights"].kind == "skipped"
        and "lengths differ from the lengths in tags" in found["tags_weights"].why
    )


def test_plural_of_ids_is_not_the_name_of_their_weights(tmp_path):
    ids, numbers = pa.array([[1, 2], [3, 4]] * 50), pa.array([[0.5, 1.5], [1.0, 2.0]] * 50)
    found = get_findings(inspect_columns(tmp_path, {"price": ids, "prices": numbers}))
    assert found["price"].kind == "sparse" and found["prices"].kind == "skipped"


@pytest.mark.parametrize("kind", [pa.float64(), pa.decimal256(60, 0)])
def test_integers_beyond_int64_are_not_ids(tmp_path, kind):
    values = pa.array([10**20 * (i % 7 - 3) for i in range(100)], pa.decimal256(60, 0)).cast(kind)
    item = get_findings(inspect_columns(tmp_path, {"item_id": values, "user_id": [1, 2, 3, 4] * 25}))["item_id"]
    assert item.kind == "skipped" and "int64" in item.why


def test_column_missing_in_some_files_is_read_from_folders(tmp_path):
    """Training applies the same rule."""
    values = {"label": [0, 1] * 30, "user_id": [1, 2, 3] * 20}
    write(tmp_path / "k=5/a.parquet", values | {"k": [7] * 60})
    write(tmp_path / "k=6/a.parquet", values)
    k = get_findings(inspect(str(tmp_path)))["k"].stats
    assert (k.lowest, k.highest, k.distinct) == (5, 6, 2)
    write(tmp_path / "k=6/a.parquet", values | {"k": [8] * 60})
    k = get_findings(inspect(str(tmp_path)))["k"].stats
    assert (k.lowest, k.highest) == (7, 8), "all files contain the column"


@pytest.mark.parametrize(
    ("texts", "positive"), [(["00", "01"], "01"), (["0.0", "1.0"], "1.0"), (["no", "Yes"], "Yes"), (["x", "y z"], "x")]
)
def test_positive_text_of_a_label_is_detected(tmp_path, texts, positive):
    """The rarer text is positive, unless another text is a known positive value."""
    for text in texts:
        write(tmp_path / f"label={text}/a.parquet", {"user_id": [1, 2, 3] * (10 + 9 * (text == "y z"))})
    (label,) = [f for f in inspect(str(tmp_path)).findings if f.kind == "label"]
    assert label.transforms == [{"do": "binarize", "columns": ["label"], "positive": [positive]}]
    assert f"mean 1, currently {positive} (" in " ".join(label.notes)
