"""A data set with numbered rows, and a configuration for training on the data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from watched import MOST

BATCH, EPOCHS, TEST_ROWS = 512, 3, 20_000
USERS, TAGS = 1000, 50


def table(rows: int, seed: int, ids: np.ndarray) -> pa.Table:
    """Return rows whose noisy label depends on user, tags and price."""
    rng = np.random.default_rng(seed)
    user, price = rng.integers(0, USERS, rows), rng.normal(size=rows).astype(np.float32)
    lengths = rng.integers(1, 4, rows)
    ends = np.cumsum(lengths)
    tags = rng.integers(0, TAGS, ends[-1])
    liked = np.add.reduceat(tags % 5 - 2, ends - lengths)
    logit = 0.7 * (user % 5 - 2) + price + 0.3 * liked
    return pa.table(
        {
            "label": (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int8),
            "price": price,
            "user": user,
            "tags": pa.ListArray.from_arrays(np.append(0, ends).astype(np.int32), tags),
            "row": ids,
        }
    )


def prepare(folder: Path, steps: int) -> int:
    """Write data for `steps` steps in EPOCHS epochs with a partial last batch; return the number of rows."""
    rows = steps // EPOCHS * BATCH - BATCH // 3
    for name, count, ids in (
        ("train", rows, np.arange(rows)),
        ("test", TEST_ROWS, np.full(TEST_ROWS, rows)),  # a table row that is never trained
    ):
        (folder / name).mkdir(parents=True)
        whole, part = table(count, len(name), ids), -(-count // 4)
        for i in range(4):
            piece = whole.slice(i * part, part)
            pq.write_table(piece, folder / name / f"part-{i}.parquet", row_group_size=3000)
    schema = {
        "labels": ["label"],
        "dense": ["price"],
        "sparse": {"user": {"table": "user"}, "tags": {"table": "tag", "pooling": "mean"}, "row": {"table": "row"}},
        "tables": {
            "user": {"rows": USERS, "dim": 4},
            "tag": {"rows": TAGS, "dim": 4},
            "row": {"rows": rows + 1, "dim": 4},
        },
    }
    (folder / "schema.yaml").write_text(yaml.safe_dump(schema))
    return rows


def configure(folder: Path, data: Path, workers: int | dict[str, int]) -> Path:
    """Write the configuration, and return the path of its file."""
    values = {
        "data": {
            "train": str(data / "train"),
            "test": str(data / "test"),
            "global_batch_size": BATCH,
            "lanes": 6,
            "buffer_gib": 0.06,
        },
        "model": {"bottom_mlp": [64], "top_mlp": [128, 64]},
        # Sums over different numbers of ranks round differently, which a large learning rate would amplify.
        "optim": {"dense": {"lr": 3e-4}},
        "train": {"epochs": EPOCHS, "log_every_steps": 50},
        "checkpoint": {"every_steps": 25, "keep_last": 2},
        "scaling": {"num_workers": workers, "device": "cpu", "hang_timeout_s": 20, "max_failures": 1000},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
    }
    path = folder / f"{'fixed' if workers == MOST else 'elastic'}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
