"""A rank of a side of `benchmarks/next_item.py`: steps of SASRec or HSTU, by raytrec or in plain torch.

    python benchmarks/next_item_side.py RANK WORLD STORE

It reads lines of JSON: {"shape", "plain"} builds a model and batches, {"steps"} trains so many steps. To each
it answers with a line, [seconds, CPU seconds], of collating and training together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch
from next_item_plain import PlainStep, padded
from rank_group import serve_steps

PIECES = 4  # batches, that are trained over and over


def rows_of(shape: dict[str, Any], seed: int) -> tuple[np.ndarray, ...]:
    """(offsets, ids, own item, negatives) of a global batch, always as many ids."""
    lengths = np.random.default_rng(seed).permutation(lengths_of(shape))
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *lengths])
    # A few items are most of what there is, as in MovieLens.
    popular = (shape["items"] * rng.random(offsets[-1] + len(lengths)) ** 2).astype(np.int64)
    negatives = rng.integers(0, shape["items"], (len(lengths), shape["negatives"]))
    return offsets, popular[: offsets[-1]], popular[offsets[-1] :], negatives


def lengths_of(shape: dict[str, Any]) -> np.ndarray:
    """Of each row's history: long tails, cut at the length that is read."""
    drawn = np.random.default_rng(0).lognormal(np.log(shape["median"]), shape["spread"], shape["rows"])
    return np.clip(drawn, shape["shortest"], shape["length"]).astype(int)


def raytrec_of(shape: dict[str, Any], rank: int, world: int) -> tuple[Any, Iterator[Any]]:
    """(raytrec's Step, its batches)."""
    from raytrec.config.features import resolve_features
    from raytrec.config.run_config import RunConfig
    from raytrec.config.schema import Schema
    from raytrec.data.batch import Collator
    from raytrec.data.canonical import canonical_table
    from raytrec.data.form import Form, ReadPlan
    from raytrec.data.pieces import Rows
    from raytrec.worker.build import build_step

    sequence = {"table": "item", "pooling": "sequence"}
    sparse = {"item": {"table": "item"}, "history": sequence, "negatives": sequence}
    tables = {"item": {"rows": shape["items"], "dim": shape["dim"]}}
    values = {"labels": ["y"], "dense": [], "sparse": sparse, "tables": tables}
    schema = Schema.parse(values, "next item")
    of_model = {key: shape[key] for key in ("blocks", "heads", "dropout", "share_negatives")}
    if shape["model"] == "sasrec":
        of_model |= {"feedforward": shape["feedforward"]}
    config = RunConfig.model_validate(
        {
            "data": {"train": "unused", "global_batch_size": shape["rows"]},
            "scaling": {"num_workers": world},
            "model": {
                "name": shape["model"],
                "max_length": shape["length"],
                "negatives": "negatives",
                "max_negatives": shape["negatives"],
                "positions": "order",
                "normalize": True,
                "temperature": 0.05,
                **of_model,
            },
            "tasks": [{"loss": "from_model", "metrics": []}],
            "optim": {"embeddings": {"name": "adam", "lr": 1e-3}, "dense": {"lr": 1e-3}},
        }
    )
    form = Form(ReadPlan(schema), lists=frozenset({"history", "negatives"}))
    mine = slice(rank * shape["rows"] // world, (rank + 1) * shape["rows"] // world)
    pieces = []
    for seed in range(PIECES):
        offsets, ids, own, negatives = rows_of(shape, seed)
        starts = np.arange(len(own) + 1, dtype=np.int32) * shape["negatives"]
        bags = [(offsets.astype(np.int32), ids, None), (starts, negatives.ravel(), None)]
        labels = np.ones(len(own), np.float32)
        table = canonical_table(form, [labels], [], [own], bags, len(own))
        pieces.append(Rows.of(table.combine_chunks().to_batches()[0])[mine])
    collate = Collator(form, resolve_features(schema, config.model))
    step, _ = build_step(config, schema, torch.device("cpu"))
    return step, (collate([rows], len(rows), shape["rows"], 0) for rows in cycle(pieces))


def plain_of(shape: dict[str, Any]) -> tuple[Any, Iterator[Any]]:
    """The same of plain torch."""
    pieces = [rows_of(shape, seed) for seed in range(PIECES)]
    return PlainStep(shape), (padded(*piece, shape) for piece in cycle(pieces))


def serve(rank: int, world: int, store: str) -> None:
    """Does what the lines say, until there are none."""

    def of(told: dict[str, Any]) -> tuple[Any, Iterator[Any]]:
        return plain_of(told["shape"]) if told["plain"] else raytrec_of(told["shape"], rank, world)

    serve_steps(rank, world, store, of)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
