"""Ranking form of HSTU in raytrec compared with plain torch in one process: a part of `benchmarks/sequences.py`.

Both sides train on the same global batches of rows with one candidate each: one process with plain torch
(hstu_rank_plain.py), and raytrec's ranks. The items of histories are counted as tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import next_item
import numpy as np
from hstu_rank_plain import PlainRanker, padded
from next_item_plain import PlainStep
from rank_group import rig, run_script, trainer

SHAPE = next_item.ML1M | {"model": "hstu_rank", "users": 6_040, "encoder": 128, "actions": 3, "dropout": 0.1}
CASES = {("hstu_rank", "MovieLens-1M"): SHAPE}
SMALLEST = {("hstu_rank", "MovieLens-1M"): SHAPE | {"rows": 4}}


def rows_of(shape: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return the columns of a global batch; events of all histories are concatenated, oldest first."""
    offsets, history, items, _ = next_item.rows_of(shape, seed)
    rng = np.random.default_rng(seed)
    return {
        "offsets": offsets.astype(np.int32),
        "history": history,
        "items": items,
        "users": rng.integers(0, shape["users"], len(items)),
        "labels": rng.integers(0, 2, len(items)).astype(np.float32),
        "actions": rng.integers(0, 2 ** shape["actions"], len(history)),
        "times": np.cumsum(rng.exponential(3600.0, len(history))),
    }


def build_raytrec(shape: dict[str, Any], rank: int, world: int) -> tuple[Any, Iterator[Any]]:
    """Return raytrec's step and the batches for this rank."""
    from raytrec.data.canonical import build_canonical_table

    history = {"table": "item", "pooling": "sequence", "side_features": ["action", "time"]}
    tables = {"item": shape["items"], "user": shape["users"]}
    schema = {
        "sparse": {"user": {"table": "user"}, "item": {"table": "item"}, "history": history},
        "tables": {name: {"rows": rows, "dim": shape["dim"]} for name, rows in tables.items()},
    }
    sizes = {name: shape[name] for name in ("dim", "blocks", "heads", "encoder", "dropout")}
    columns = {"max_length": shape["length"], "actions": {"action": shape["actions"]}, "time": "time"}
    optim = {"embeddings": {"name": "adam", "lr": 1e-3}, "dense": {"lr": 1e-3}}
    model = {"name": "hstu_rank", **columns, **sizes}
    rank_rig = rig(schema, model, world, shape["rows"], ["history"], optim=optim)
    rank_rows = slice(rank * shape["rows"] // world, (rank + 1) * shape["rows"] // world)
    pieces = []
    for seed in range(next_item.PIECES):
        rows = rows_of(shape, seed)
        table = build_canonical_table(
            rank_rig.form,
            [rows["labels"]],
            [],
            [rows["users"], rows["items"]],
            [(rows["offsets"], rows["history"], None)],
            shape["rows"],
            side_features_of={"history": np.stack([rows["actions"], rows["times"]], 1).astype(np.float64)},
        )
        pieces.append(rank_rig.pieces(table)[rank_rows])
    return rank_rig.step, rank_rig.repeat(pieces)


def build_plain(shape: dict[str, Any]) -> tuple[Any, Iterator[Any]]:
    """Return the plain torch step and its batches."""
    pieces = [rows_of(shape, seed) for seed in range(next_item.PIECES)]
    return PlainStep(PlainRanker(shape)), (padded(piece) for piece in cycle(pieces))


def build(rank: int, world: int, shape: dict[str, Any], plain: bool) -> tuple[Any, Iterator[Any]]:
    """Return a side's step and batches."""
    return build_plain(shape) if plain else build_raytrec(shape, rank, world)


if __name__ == "__main__":
    run_script(lambda: None, trainer(build))
