"""Tiny Parquet datasets with learnable labels and a schema.yaml."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from raytrec.config.schema import Schema

SCHEMA_YAML = """\
labels: [label]
dense: [price]
sparse:
  user: {table: user}
  tags: {table: tag, pooling: mean}
tables:
  user: {rows: 40, dim: 8}
  tag: {rows: 12, dim: 8}
"""


def make_tiny_table(rows, seed):
    """Return random rows whose label depends on user, tags and price, with noise."""
    rng = np.random.default_rng(seed)
    user, price = rng.integers(0, 40, rows), rng.normal(size=rows).astype(np.float32)
    lengths = rng.integers(0, 4, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tags = rng.integers(0, 12, offsets[-1])
    liked = np.add.reduceat(np.append(tags % 3 - 1, 0), offsets[:-1]) * (lengths > 0)
    logit = 2.0 * (user % 5 - 2) + price + liked
    label = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int8)
    return pa.table(
        {
            "label": label,
            "price": price,
            "user": user,
            "tags": pa.ListArray.from_arrays(offsets, tags),
            "row": np.arange(rows),
        }
    )


def write_split(folder, rows, seed, row_group=300, files=2):
    """Write a split as `files` Parquet files."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    whole, part = make_tiny_table(rows, seed), -(-rows // files)
    for i in range(files):
        pq.write_table(whole.slice(i * part, part), folder / f"part-{i}.parquet", row_group_size=row_group)
    return folder


def change_column_values(path, column, values, **settings):
    """Rewrite a file with changed values of a column, {row: value}; `config_values` are for write_table."""
    changed = pq.read_table(path)
    column_values = changed[column].to_numpy().copy()
    for row, value in values.items():
        column_values[row] = value
    place = changed.column_names.index(column)
    pq.write_table(changed.set_column(place, column, [column_values]), path, **settings)


def write_dataset(folder, train=2000, valid=501, test=1003):
    """Write train/, valid/, test/ and schema.yaml."""
    folder = Path(folder)
    for seed, (name, rows) in enumerate({"train": train, "valid": valid, "test": test}.items()):
        write_split(folder / name, rows, seed)
    (folder / "schema.yaml").write_text(SCHEMA_YAML)
    return folder


def tiny_schema(sparse=None, tables=None):
    """Return the Schema of the dataset, with added or replaced features and tables."""
    values = yaml.safe_load(SCHEMA_YAML)
    parts = {"sparse": values["sparse"] | (sparse or {}), "tables": values["tables"] | (tables or {})}
    return Schema.parse(values | parts, "tiny")


def config_values(folder, run_dir, **changes):
    """Return config values for the dataset; changes are section__key=value."""
    folder = Path(folder)
    values = {
        "run": {"dir": str(run_dir)},
        "data": {
            "train": str(folder / "train"),
            "valid": str(folder / "valid"),
            "test": str(folder / "test"),
            "global_batch_size": 128,
            "lanes": 6,
        },
        "model": {"bottom_mlp": [16], "top_mlp": [16]},
        "optim": {"embeddings": {"lr": 0.1}, "dense": {"lr": 0.01}},
        "scaling": {"num_workers": 2, "device": "cpu"},
        "tracking": {"report": False},  # rendering takes some seconds
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    return values


def canonical_to_dicts(table, form):
    """Convert a canonical table to dicts with labels, dense, present, weights and ids of each feature."""
    rows = []
    for row in table.to_pylist():
        plain = {name: row[name] for name in ("labels", "dense", "present") if name in row}
        plain |= {name: [i] * (i >= 0) for name, i in zip(form.singles, row.get("ids", []), strict=True)}
        plain |= {name: row[f"ids.{name}"] for name in form.bags}
        plain["weights"] = {n: row[f"weights.{n}"] for n in form.bags if f"weights.{n}" in row}
        rows.append(plain)
    return rows


def name_users(folder):
    """Replace the user ids in all files of a dataset by texts."""
    for path in folder.rglob("*.parquet"):
        table = pq.read_table(path)
        users = pa.array([f"user {user}" for user in table["user"].to_pylist()])
        pq.write_table(table.set_column(table.column_names.index("user"), "user", users), path)
