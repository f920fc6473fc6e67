"""Random columns of any Arrow type, and functions that read them as a run does."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st
from reading import parse_transforms, read_canonical_rows

from raytrec.config.data import TaskSection
from raytrec.config.schema import Schema
from raytrec.data.arrow import is_list, is_text
from raytrec.tasks.task import resolve_tasks
from raytrec.tasks.task_columns import build_read_plan

LEAF_TYPES = [
    *(pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.string()),
    *(pa.large_string(), pa.string_view(), pa.binary(), pa.binary(3), pa.binary_view(), pa.date32()),
    *(pa.date64(), pa.time32("ms"), pa.time64("ns"), pa.duration("s"), pa.timestamp("ns"), pa.null()),
    *(pa.timestamp("us", "Asia/Tokyo"), pa.decimal128(20, 0), pa.decimal256(40, 3), pa.decimal32(6, 2)),
    *(pa.uuid(), pa.bool8(), pa.dictionary(pa.int32(), pa.string()), pa.json_()),
]


def nested_types(inner):
    named = st.sampled_from(["a", "b.c", "id", "", "ü"])
    return st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(pa.list_view),
        inner.map(lambda kind: pa.list_(kind, 2)),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
        st.lists(st.tuples(named, inner), min_size=1, max_size=3).map(pa.struct),
    )


column_types = st.recursive(st.sampled_from(LEAF_TYPES), nested_types, max_leaves=4)
column_names = st.one_of(
    st.sampled_from(["x", "label", "user.id", "history", "x_weights", "click", "day_id", "a b", "x.a", "ids"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12),
)


def random_array(kind, rng, rows):
    """Return a random array of any type, with nulls where Parquet supports them."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, random_array(kind.storage_type, rng, rows))
    if pa.types.is_null(kind):
        return pa.nulls(rows)
    mask = np.array([rng.random() < 0.1 for _ in range(rows)])
    if pa.types.is_struct(kind):
        parts = [random_array(kind.field(i).type, rng, rows) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=pa.array(mask))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(random_array(kind.value_type, rng, 2 * rows), 2)
    lengths = [0 if m else rng.randrange(4) for m in mask]
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    if pa.types.is_map(kind):
        keys = pa.array([f"k{i % 5}" for i in range(offsets[-1])], pa.string())
        return pa.MapArray.from_arrays(offsets, keys, random_array(kind.item_type, rng, int(offsets[-1])))
    if is_list(kind):
        values = random_array(kind.value_type, rng, int(offsets[-1]))
        if pa.types.is_list_view(kind):
            return pa.ListViewArray.from_arrays(offsets[:-1], np.diff(offsets), values)
        large = pa.types.is_large_list(kind)
        return (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, values)
    if pa.types.is_dictionary(kind):
        return random_array(kind.value_type, rng, rows).dictionary_encode()
    most = rng.choice([2, 10, 100])
    whole = [None if m else rng.randrange(most) for m in mask]
    if pa.types.is_fixed_size_binary(kind):
        return pa.array([None if v is None else bytes([v]) * kind.byte_width for v in whole], kind)
    if is_text(kind):
        return pa.array([None if v is None else str(v) for v in whole]).cast(kind)
    if pa.types.is_floating(kind):
        odd = [v if v is None or rng.random() < 0.9 else float("nan") for v in whole]
        return pa.array(odd, pa.float64()).cast(kind)
    if pa.types.is_boolean(kind):
        return pa.array([v if v is None else v % 2 == 0 for v in whole], kind)
    if pa.types.is_decimal(kind):
        return pa.array([None if v is None else Decimal(v) for v in whole], kind)
    if pa.types.is_date64(kind):
        return pa.array(whole, pa.int32()).cast(pa.date32()).cast(kind)
    bits = pa.int32() if pa.types.is_temporal(kind) and kind.bit_width == 32 else pa.int64()
    return pa.array(whole, bits).cast(kind)


def read_every_row(place, schema, transforms=(), tasks=({},)):  # noqa: B006 (nothing changes it)
    """Read all rows of a file or folder as a run does."""
    resolved = resolve_tasks([TaskSection(**task) for task in tasks], schema)
    read_canonical_rows(place, build_read_plan(resolved, schema, parse_transforms(transforms)))


def read_with_schema_text(text, *places):
    """Read all rows of folders with the schema, transforms and tasks of a text; return the schema."""
    comments = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    pasted = "\n".join(line for line in comments if line.startswith(("data:", "tasks:", "  ")))
    values = yaml.safe_load(pasted) or {}
    transforms, tasks = values.get("data", {}).get("transforms", ()), values.get("tasks", [{}])
    schema = Schema.parse(yaml.safe_load(text), "text")
    for place in places:
        read_every_row(place, schema, transforms, tasks)
    return schema


def write(path, columns, **settings):
    """Write a Parquet file; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **settings)


def unusual_columns(rows, seed, users=200):
    """Return columns with unusual names, types and values."""
    rng = np.random.default_rng(seed)
    item = rng.integers(0, 90, rows)
    some = rng.random(rows) < 0.1
    bags = [rng.integers(0, 90, n).tolist() for n in rng.integers(0, 6, rows)]
    when = np.datetime64("2026-01-01T00:00:00") + rng.integers(0, 10**6, rows).astype("timedelta64[s]")
    return {
        "label": rng.integers(1, 6, rows),
        "Größe (cm)": pa.array(rng.normal(size=rows), mask=some),
        "café_id": rng.integers(0, 50, rows),
        "a: b": rng.choice(["x", "y"], rows),
        "[/red]": rng.integers(0, 9, rows),
        "": rng.normal(size=rows),
        "half": pa.array(rng.normal(size=rows).astype(np.float16)),
        "halves": pa.array([[np.float16(0.5)]] * rows, pa.list_(pa.float16())),
        "deep": pa.array([[[1], [2]]] * rows),
        "view": pa.array(rng.choice(["p", "q", "r"], rows), pa.string_view()),
        "views": pa.array(bags, pa.list_view(pa.int64())),
        "when": pa.array(when),
        "day": pa.array(when.astype("datetime64[D]")),
        "since": (when - np.datetime64("1970-01-01")).astype("timedelta64[ms]").astype(np.int64),
        "took": pa.array(rng.integers(1, 99, rows), pa.duration("s")),
        "user": pa.array([{"id": int(i), "age": float(i % 7), "x": {"zip": int(i % 5)}} for i in item]),
        "user_id": rng.integers(0, users, rows),
        "item_id": item,
        "clicked_items": pa.array(bags),
        "holes": pa.array([[1, None, 3]] * rows),
        "tags": pa.array([[5, None]] * rows),
        "tags_weights": pa.array([[1.0, None]] * rows),
        "pandas_id": pa.array(np.where(some, np.nan, item)),
        "oracle_id": pa.array(item).cast(pa.decimal128(20, 0)),
        "money": pa.array(np.round(rng.random(rows) * 50, 2)).cast(pa.decimal128(9, 2)),
        "year": rng.integers(1990, 2025, rows),
        "code": rng.choice([10_000_017, 10_000_523, 10_000_871], rows),
        "huge": np.where(rng.random(rows) < 0.01, np.inf, rng.normal(size=rows) * 1e5),
        "scores": pa.array([[("a", 0.5)]] * rows, pa.map_(pa.string(), pa.float64())),
        "key": pa.array([rng.bytes(2) for _ in range(rows)], pa.binary(2)),
        "flag": pa.array(rng.random(rows) < 0.5, mask=some),
        "nothing": pa.nulls(rows),
        "a\nb": rng.integers(0, 3, rows),
    }


def write_unusual_dataset(folder):
    """Write train/ (two files) and test/, which has users and nulls that do not occur in train/."""
    write(folder / "train" / "a.parquet", unusual_columns(2000, 0), row_group_size=700)
    write(folder / "train" / "b.parquet", unusual_columns(500, 1))
    later = unusual_columns(300, 2, users=260)
    later["item_id"][0] = 101
    later["money"] = pa.array([None, *later["money"].to_pylist()[1:]], pa.decimal128(9, 2))
    write(folder / "test" / "a.parquet", later)
    return folder
