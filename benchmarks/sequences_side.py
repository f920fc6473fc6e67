"""A rank of a side of `benchmarks/sequences.py`: steps of training over sequences, when it is told to.

    python benchmarks/sequences_side.py RANK WORLD STORE

It reads lines of JSON: {"length", "ids", "by_id"} builds a model and batches, {"steps"} trains so many steps.
To each it answers with a line, [seconds, CPU seconds], of collating and training together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from rank_group import batches_of, serve_steps
from torch import nn

DIM, ROWS, BATCH, PIECES = 16, 100_000, 512, 4
TABLES = {"item": {"sharding_type": "row_wise"}}


class Means(nn.Module):
    """The logit of a mean of a sequence beside its target: next to no dense work."""

    def __init__(self, schema: Any, config: Any):
        super().__init__()
        self.logit = nn.Linear(2 * DIM, 1)

    def forward(self, dense: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        mean_BD = inputs["history"]
        if not isinstance(mean_BD, torch.Tensor):
            history = mean_BD
            mean_BD = history.vectors.sum(1) / history.present.sum(1, keepdim=True).clamp(min=1)
        return self.logit(torch.cat([mean_BD, inputs["item"]], 1)).squeeze(1)


def build(rank: int, world: int, length: int | None, ids: int) -> tuple[Any, Iterator[Any]]:
    """(Step, its batches).

    Args:
        length: how many ids are read, at most; None: the mean of all.
    """
    from raytrec.config.features import resolve_features
    from raytrec.config.run_config import RunConfig
    from raytrec.config.schema import Schema
    from raytrec.data.batch import Collator
    from raytrec.data.form import Form, ReadPlan
    from raytrec.data.pieces import Rows
    from raytrec.worker.build import build_step

    history = {"table": "item", "pooling": "sequence"}
    sparse = {"item": {"table": "item"}, "history": history}
    tables = {"item": {"rows": ROWS, "dim": DIM}}
    values = {"labels": ["y"], "dense": [], "sparse": sparse, "tables": tables}
    schema = Schema.parse(values, "sequences")
    config = RunConfig.model_validate(
        {
            "data": {"train": "unused", "global_batch_size": BATCH * world},
            "scaling": {"num_workers": world},
            "model": {"name": "sequences_side:Means", "max_length": length},
            "plan": {"tables": TABLES},
        }
    )
    form = Form(ReadPlan(schema), lists=frozenset({"history"}))
    pieces = [Rows.of(rows_of(form, ids, PIECES * rank + i)) for i in range(PIECES)]
    collate = Collator(form, resolve_features(schema, config.model))
    step, _ = build_step(config, schema, torch.device("cpu"))
    return step, batches_of(collate, pieces, BATCH, BATCH * world)


def rows_of(form: Any, ids: int, seed: int) -> Any:
    """A batch of rows whose histories have half as many ids to half as many again, `ids` on average."""
    from raytrec.data.canonical import canonical_table

    rng = np.random.default_rng(seed)
    lengths = rng.integers(max(1, ids // 2), ids + (ids + 1) // 2 + 1, BATCH)
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    of_bags = [(offsets, rng.integers(0, ROWS, offsets[-1]), None)]
    labels = rng.integers(0, 2, BATCH).astype(np.float32)
    return canonical_table(form, [labels], [], [rng.integers(0, ROWS, BATCH)], of_bags, BATCH).to_batches()[0]


def serve(rank: int, world: int, store: str) -> None:
    """Does what the lines say, until there are none."""

    def of(told: dict[str, Any]) -> tuple[Any, Iterator[Any]]:
        return build(rank, world, told["length"] if told["by_id"] else None, told["ids"])

    serve_steps(rank, world, store, of)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
