"""A recipe: visits of a shop, with the amounts paid."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from raytrec_datasets.writing import SPLITS, Output, SplitWriter

from raytrec.config.schema import Schema


def prepare(out: Path, rows: int = 1000, seed: int = 0, force: bool = False) -> None:
    """Visits of a shop."""
    output = Output(out, "shop", {"rows": rows, "seed": seed}, force)
    if not output.is_ready():
        rng, counts = np.random.default_rng(seed), dict.fromkeys(SPLITS, rows)
        with output:
            for name, count in counts.items():
                visitor, paid = rng.integers(0, 50, count), rng.exponential(20, count)
                bought = (visitor % 2 == 0) & (paid > 5)
                visits = {"bought": bought.astype(np.int8), "paid": paid, "visitor": visitor}
                table = pa.table(visits)
                writer = SplitWriter(output.partial / name, table.schema, group_rows=200)
                writer.write(table)
                writer.close()
            output.finish(SCHEMA, counts)
    output.summary()


SCHEMA = Schema.parse(
    {
        "labels": ["bought"],
        "dense": ["share"],  # column added by the transform
        "sparse": {"visitor": {"table": "visitor"}},
        "tables": {"visitor": {"rows": 50, "dim": 8}},
    },
    "shop",
)
