"""SASRec and HSTU in raytrec compared with plain torch in one process: a part of `benchmarks/sequences.py`.

Both sides train on the same global batch: one process with plain torch (next_item_plain.py), and raytrec's
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
from harness import Grid
from next_item_plain import PlainModel, PlainStep, padded
from rank_group import Ranks, Rig, compare, rig, run_script, trainer

SIDES = {"plain": True, "raytrec": False}
PIECES = 4  # number of batches, on which the steps train repeatedly
HEADER = ("model", "data shape", "workers", "plain torch, tokens/s", "raytrec, tokens/s", "raytrec ÷ plain")
# Lengths of histories are log-normal around `median`, clipped to `shortest` and `length`: 157 and 7 on average.
ML1M = {
    "rows": 128,
    "items": 3_706,
    "dim": 64,
    "length": 200,
    "median": 170,
    "spread": 0.6,
    "shortest": 20,
    "negatives": 128,
    "share_negatives": False,
    "dropout": 0.2,
    "blocks": 2,
    "heads": 2,
    "feedforward": 256,
}
AMAZON = ML1M | {
    "rows": 512,
    "items": 11_924,
    "length": 50,
    "median": 5.6,
    "spread": 0.75,
    "shortest": 3,
    "negatives": 1,
    "share_negatives": True,
    "dropout": 0.5,
    "feedforward": 64,
}
CASES = {
    ("sasrec", "MovieLens-1M"): ML1M,
    ("hstu", "MovieLens-1M"): ML1M,
    ("sasrec", "Amazon Toys"): AMAZON | {"dim": 128, "feedforward": 128},
    ("hstu", "Amazon Toys"): AMAZON | {"dim": 128},
    ("sasrec", "200,000 items"): AMAZON | {"items": 200_000},
}
SMALLEST = {("hstu", "MovieLens-1M"): ML1M | {"rows": 4}}


def lengths_of(shape: dict[str, Any], seed: int = 0) -> np.ndarray:
    """Return the lengths of the rows' histories, drawn from a long-tailed distribution and clipped."""
    drawn = np.random.default_rng(seed).lognormal(np.log(shape["median"]), shape["spread"], shape["rows"])
    return np.clip(drawn, shape["shortest"], shape["length"]).astype(int)


def rows_of(shape: dict[str, Any], seed: int, lengths: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Return (offsets, ids, own items, negatives) of a global batch.

    Args:
        shape: Shape of the data.
        seed: Seed of the batch.
        lengths: Lengths of the histories; None: the same lengths for each seed, in random order.
    """
    lengths = np.random.default_rng(seed).permutation(lengths_of(shape)) if lengths is None else lengths
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *lengths])
    # As in MovieLens, a few items make up most of the ids.
    popular = (shape["items"] * rng.random(offsets[-1] + len(lengths)) ** 2).astype(np.int64)
    negatives = rng.integers(0, shape["items"], (len(lengths), shape["negatives"]))
    return offsets, popular[: offsets[-1]], popular[offsets[-1] :], negatives


def build_raytrec(shape: dict[str, Any], rank: int, world: int) -> tuple[Any, Iterator[Any]]:
    """Return raytrec's step and the batches for this rank."""
    rank_rig = rig_of(shape, world)
    pieces = [piece_of(rank_rig, shape, rows_of(shape, seed), rank, world) for seed in range(PIECES)]
    return rank_rig.step, rank_rig.repeat(pieces)


def rig_of(shape: dict[str, Any], world: int) -> Rig:
    """Return raytrec's model of a shape on this rank."""
    sequence = {"table": "item", "pooling": "sequence"}
    schema = {
        "sparse": {"item": {"table": "item"}, "history": sequence, "negatives": sequence},
        "tables": {"item": {"rows": shape["items"], "dim": shape["dim"]}},
    }
    names = ("blocks", "heads", "dropout", "share_negatives", *["feedforward"] * (shape["model"] == "sasrec"))
    model = {
        "name": shape["model"],
        "max_length": shape["length"],
        "negatives": "negatives",
        "max_negatives": shape["negatives"],
        "positions": "order",
        "normalize": True,
        "temperature": 0.05,
        **{name: shape[name] for name in names},
    }
    tasks = [{"loss": "from_model", "metrics": []}]
    optim = {"embeddings": {"name": "adam", "lr": 1e-3}, "dense": {"lr": 1e-3}}
    lists = ["history", "negatives"]
    return rig(schema, model, world, shape["rows"], lists, tasks=tasks, optim=optim)


def piece_of(rank_rig: Rig, shape: dict[str, Any], rows: tuple[np.ndarray, ...], rank: int, world: int) -> Any:
    """Return this rank's rows of a global batch."""
    offsets, ids, own, negatives = rows
    starts = np.arange(len(own) + 1, dtype=np.int32) * shape["negatives"]
    bags = [(offsets.astype(np.int32), ids, None), (starts, negatives.ravel(), None)]
    rank_rows = slice(rank * shape["rows"] // world, (rank + 1) * shape["rows"] // world)
    return rank_rig.piece([np.ones(len(own), np.float32)], [own], bags)[rank_rows]


def build_plain(shape: dict[str, Any]) -> tuple[Any, Iterator[Any]]:
    """Return the plain torch step and its batches."""
    pieces = [rows_of(shape, seed) for seed in range(PIECES)]
    return PlainStep(PlainModel(shape)), (padded(*piece, shape) for piece in cycle(pieces))


def build(rank: int, world: int, shape: dict[str, Any], plain: bool) -> tuple[Any, Iterator[Any]]:
    """Return a side's step and batches."""
    return build_plain(shape) if plain else build_raytrec(shape, rank, world)


def measure(sides: dict[str, Ranks], model: str, shape: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return each side's tokens (ids in histories) per second and CPU-µs per token over all processes."""
    shape = shape | {"model": model}
    tokens = int(lengths_of(shape).sum())
    requests = {side: {"shape": shape, "plain": plain} for side, plain in SIDES.items()}
    return {
        side: {"tokens_per_s": 1e3 * tokens / of["step_ms"], "cpu_us_per_token": of["cpu_us_per_row"]}
        for side, of in compare(sides, requests, rounds, tokens, turn_s=0.8).items()
    }


def table_of(points: list[dict[str, Any]]) -> str:
    """Return the table for docs/benchmarks.md, with a row for each point."""
    rows = []
    for point in points:
        speeds = [point[side]["tokens_per_s"] for side in SIDES]
        cells = [point["model"], point["shape"], str(point["workers"]), *(f"{speed:,.0f}" for speed in speeds)]
        rows.append([*cells, f"{speeds[1] / speeds[0]:.2f} ×"])
    return Grid(HEADER, rows, left=2).markdown()


if __name__ == "__main__":
    run_script(lambda: None, trainer(build))
