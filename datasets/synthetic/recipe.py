"""Criteo-shaped rows with labels from a planted model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from raytrec_datasets.synthetic.model import Planted, Rows, Shape, draw
from raytrec_datasets.writing import SPLITS, Output, SplitWriter, progress

from raytrec.config.schema import Schema

CHUNK_ROWS = 65_536  # a chunk depends on (seed, split, its number) alone, and memory holds one
BINS = 1_000_000  # of the true probability, for the best AUC


def write(
    out: Path,
    rows: int,
    seed: int,
    dense: int,
    sparse: int,
    multi_hot: int,
    table_rows: int,
    dim: int,
    force: bool,
) -> None:
    """Writes the dataset; its arguments are those of `raytrec prepare synthetic`."""
    options = {
        "rows": rows,
        "seed": seed,
        "dense": dense,
        "sparse": sparse,
        "multi_hot": multi_hot,
        "table_rows": table_rows,
        "dim": dim,
    }
    output = Output(out, "synthetic", options, force)
    if not output.is_ready():
        shape = Shape.of(dense, sparse, min(multi_hot, sparse), table_rows)
        model = Planted(shape, seed)
        counts = {"train": rows, "valid": max(rows // 10, 1), "test": max(rows // 10, 1)}
        with output, progress("synthetic rows", sum(counts.values())) as advance:
            best = {
                s: _write_split(output.partial / s, model, seed, i, counts[s], advance)
                for i, s in enumerate(SPLITS)
            }
            output.finish(schema_of(shape, dim), counts, best_auc=best)
    best = output.facts()["best_auc"]
    output.summary(
        "synthetic", lines=[f"best reachable AUC (the planted model itself): test {best['test']:.4f}"]
    )


def schema_of(shape: Shape, dim: int) -> Schema:
    """schema.yaml of a shape: I1… dense, C1… sparse."""
    pooling = {f: "mean" if shape.is_mean(f) else "sum" for f in range(len(shape.tables))}
    return Schema.parse(
        {
            "labels": ["label"],
            "dense": [f"I{i + 1}" for i in range(shape.dense)],
            "sparse": {f"C{f + 1}": {"table": f"C{f + 1}", "pooling": pooling[f]} for f in pooling},
            "tables": {f"C{f + 1}": {"rows": rows, "dim": dim} for f, rows in enumerate(shape.tables)},
        },
        "synthetic",
    )


def _write_split(folder: Path, model: Planted, seed: int, split: int, rows: int, advance) -> float:
    """Writes a split; the AUC of its true probabilities."""
    writer, histogram = None, np.zeros((2, BINS), np.int64)
    for chunk, start in enumerate(range(0, rows, CHUNK_ROWS)):
        rng = np.random.default_rng((seed, 3, split, chunk))
        drawn = draw(model.shape, rng, min(CHUNK_ROWS, rows - start))
        probability = 1 / (1 + np.exp(-model.logits(drawn)))
        label = rng.random(len(probability)) < probability
        bins = np.minimum((probability * BINS).astype(np.int64), BINS - 1)
        for value in (0, 1):
            histogram[value] += np.bincount(bins[label == value], minlength=BINS)
        table = _table(model, drawn, label)
        writer = writer or SplitWriter(folder, table.schema)
        writer.write(table)
        advance(len(label))
    writer.close()
    return _auc(*histogram)


def _table(model: Planted, drawn: Rows, label: np.ndarray) -> pa.Table:
    columns = {"label": label.astype(np.int8)}
    for i in range(model.shape.dense):
        columns[f"I{i + 1}"] = np.ascontiguousarray(drawn.dense[:, i])
    for f in range(len(model.shape.tables)):
        ids = model.ids(f, drawn.ranks[f])
        if model.shape.is_bag(f):
            offsets = np.concatenate([[0], np.cumsum(drawn.lengths[f])]).astype(np.int32)
            ids = pa.ListArray.from_arrays(offsets, ids)
        columns[f"C{f + 1}"] = ids
    return pa.table(columns)


def _auc(negative: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve from counts by bin; rows in one bin are ties and count half."""
    below = np.cumsum(negative) - negative
    pairs = negative.sum() * positive.sum()
    return float((positive * (below + negative / 2)).sum() / pairs) if pairs else 0.5
