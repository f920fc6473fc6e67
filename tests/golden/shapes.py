"""Generated data with the columns and table sizes of each example, and labels from a planted model.

The rows depend only on a seed and are written as Parquet, so the trainer reads them like any other data.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

GROUP_ROWS = 512
MAX_BAG_LENGTH = 8  # ids per bag
HASH_MULTIPLIER = 0x9E3779B97F4A7C15  # the effect of an id on the label is a hash of the id


def _make_tables(rows, dim, **features):
    """Return `sparse` and `tables` of a schema with one table per feature; `features` adds keys."""
    return {
        "sparse": {name: {"table": name, **features.get(name, {})} for name in rows},
        "tables": {name: {"rows": count, "dim": dim} for name, count in rows.items()},
    }


def _make_click_schema(sizes, dim, **features):
    """Return a schema with Criteo's 13 numbers and 26 ids."""
    rows = {f"C{i}": size for i, size in enumerate(sizes, 1)}
    return {"labels": ["label"], "dense": [f"I{i}" for i in range(1, 14)], **_make_tables(rows, dim, **features)}


MOVIELENS = {  # as written by `raytrec prepare movielens` for the 100K set
    "labels": ["label"],
    **_make_tables(
        {
            "user_id": 944,
            "item_id": 1683,
            "age": 62,
            "gender": 3,
            "occupation": 22,
            "zip_prefix": 102,
            "release_year": 73,
            "genres": 20,
            "hour": 24,
            "weekday": 7,
        },
        16,
        genres={"pooling": "mean"},
    ),
}
MOVIELENS["sparse"]["history"] = {"table": "item_id", "pooling": "sequence"}

OWN = {  # a shared table, bags with and without weights, and ids out of range
    "labels": ["clicked"],
    "dense": ["price"],
    "sparse": {
        "shop": {"table": "shop"},
        "visited": {"table": "shop", "pooling": "mean", "weights": "minutes"},
        "words": {"table": "word", "pooling": "sum"},
    },
    "tables": {"shop": {"rows": 3000, "dim": 16, "out_of_range": "hash"}, "word": {"rows": 800, "dim": 16}},
}

ML1M = {"labels": ["label"], **_make_tables({"user_id": 6040, "item_id": 3706}, 16)}

ADULT = {
    "labels": ["income", "never_married"],
    "dense": ["age", "education_num", "capital_gain", "capital_loss", "hours_per_week"],
    **_make_tables({"workclass": 9, "education": 17, "occupation": 15, "race": 6, "sex": 3, "native_country": 41}, 8),
}

SHAPES = {
    "synthetic": _make_click_schema(
        [50_000, 20_000, 8_000, 3_000, 1_000, 500, 200, 100, *[1_000] * 18],
        16,
        **{f"C{i}": {"pooling": "mean" if i % 2 else "sum"} for i in range(21, 27)},
    ),
    "criteo_kaggle": _make_click_schema([100_000] * 26, 16),
    "criteo_1tb": _make_click_schema([2_000] * 26, 128),  # the real tables have 10 M rows each: 133 GB
    "movielens": MOVIELENS,
    "ml1m": ML1M,
    "adult": ADULT,
    "own": OWN,
}
BAGS = {"history", "genres", "visited", "words", *(f"C{i}" for i in range(21, 27))}


def write(shape: str, rows: int, folder: Path) -> Path:
    """Write schema.yaml and train/, seeded by the shape's name, and return the folder."""
    schema, rng = SHAPES[shape], np.random.default_rng(list(shape.encode()))
    columns, logits_B = {}, np.zeros(rows)
    for name in schema.get("dense", []):
        columns[name] = rng.standard_normal(rows, np.float32)
        logits_B += 0.3 * columns[name]
    for name, feature in schema["sparse"].items():
        table = schema["tables"][feature["table"]]
        bag = name in BAGS and (shape != "criteo_kaggle" and shape != "criteo_1tb")
        lengths_B = rng.integers(0, MAX_BAG_LENGTH + 1, rows) if bag else np.ones(rows, np.int64)
        # Squared uniform numbers: small ids are frequent.
        ids = (rng.random(lengths_B.sum()) ** 2 * table["rows"]).astype(np.int64)
        if "out_of_range" in table:
            ids *= 5
        owner = np.repeat(np.arange(rows), lengths_B)
        np.add.at(logits_B, owner, _compute_effect(ids) / np.maximum(lengths_B, 1)[owner])
        offsets = np.concatenate([[0], np.cumsum(lengths_B)]).astype(np.int32)
        columns[name] = pa.ListArray.from_arrays(offsets, ids) if bag else ids
        if "weights" in feature:
            weights = rng.random(len(ids), np.float32) + np.float32(0.5)
            columns[feature["weights"]] = pa.ListArray.from_arrays(offsets, weights)
    labels_B = rng.random(rows) < 1 / (1 + np.exp(-logits_B))
    columns |= {name: labels_B.astype(np.int8) for name in schema["labels"]}
    (folder / "train").mkdir(parents=True)
    (folder / "schema.yaml").write_text(yaml.safe_dump(schema, sort_keys=False))
    pq.write_table(pa.table(columns), folder / "train/part.parquet", row_group_size=GROUP_ROWS)
    return folder


def _compute_effect(ids):
    """Return the effect of ids on the logit, between -1/2 and 1/2."""
    with np.errstate(over="ignore"):
        return (ids.astype(np.uint64) * np.uint64(HASH_MULTIPLIER) >> np.uint64(40)) / 2.0**24 - 0.5
