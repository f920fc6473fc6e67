"""A rank of `benchmarks/ids.py`: steps of training over a table, when it is told to.

    python benchmarks/ids_side.py RANK WORLD STORE

It reads lines of JSON: {"ids", "new_share"} builds a model and batches, {"steps"} trains so many steps,
{"stream"} sends so many distinct ids through a map alone. To each it answers with a line, [seconds, CPU
seconds]; of a stream, [seconds, bytes that the process has grown by].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from time import perf_counter, process_time
from typing import Any

import numpy as np
import psutil
import torch
from rank_group import join_group
from torch import nn

DIM, ROWS, BATCH, BAG, SINGLES, PIECES = 16, 100_000, 2048, 8, 4, 16
FEATURES = [f"f{i}" for i in range(SINGLES)]
AT_ONCE = 16_384  # ids of a stream


class Sum(nn.Module):
    """The logit of all embeddings: next to no dense work."""

    def __init__(self, schema: Any, config: Any):
        super().__init__()
        self.logit = nn.Linear(DIM, 1)

    def forward(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.logit(torch.stack(list(inputs.values())).sum(0)).squeeze(1)


class Side:
    """A model with one table, and batches for it.

    Args:
        ids: static or managed.
        new_share: of the ids of a batch, those that have never been before. The others are drawn from 90,000,
            few of which make most of them.
    """

    def __init__(self, rank: int, world: int, ids: str, new_share: float):
        from raytrec.config.run_config import RunConfig
        from raytrec.config.schema import Schema
        from raytrec.data.collate import Collator
        from raytrec.data.form import Form
        from raytrec.worker.build import build_step

        sparse = {name: {"table": "item"} for name in [*FEATURES, "bag"]}
        tables = {"item": {"rows": ROWS, "dim": DIM, "ids": ids}}
        schema = Schema.parse({"labels": ["y"], "sparse": sparse, "tables": tables}, "ids")
        config = RunConfig.model_validate(
            {
                "data": {"train": "unused", "global_batch_size": BATCH * world},
                "scaling": {"num_workers": world},
                "model": {"name": "ids_side:Sum"},
                "plan": {"tables": {"item": {"sharding_type": "row_wise"}}},
            }
        )
        self._form = Form(schema, lists=frozenset({"bag"}))
        self._collate, self._random = Collator(self._form), np.random.default_rng(rank)
        self._world, self._new_share, self._next = world, new_share, (rank + 1) * 2**40
        self._pieces = [self._ids() for _ in range(PIECES)]
        self._step, _ = build_step(config, schema, torch.device("cpu"))

    def train(self, steps: int) -> tuple[float, float]:
        """(seconds, CPU seconds) of so many steps."""
        began, used = perf_counter(), process_time()
        for _ in self._step.train(self._batches(), steps):
            pass
        return perf_counter() - began, process_time() - used

    def _ids(self) -> np.ndarray:
        return (self._random.zipf(1.05, BATCH * (SINGLES + BAG)) * 7919) % 90_000

    def _batches(self) -> Iterator[Any]:
        from raytrec.data.collate import Rows

        offsets, labels = np.arange(0, BATCH * BAG + 1, BAG, np.int32), np.ones(BATCH, np.float32)
        for number in range(sys.maxsize):
            ids = self._pieces[number % PIECES].copy()
            new = int(len(ids) * self._new_share)
            if new:
                ids[:: len(ids) // new][:new] = np.arange(self._next, self._next + new)
                self._next += new
            singles = np.split(ids[: BATCH * SINGLES], SINGLES)
            bag = (offsets, ids[BATCH * SINGLES :], None)
            rows = Rows.of(self._form.table([labels], [], singles, [bag], BATCH).to_batches()[0])
            yield self._collate([rows], BATCH, BATCH * self._world, number)


def stream(ids: int, world: int) -> tuple[float, int]:
    """(seconds, bytes that this process has grown by since a tenth of them) of distinct ids through a map."""
    from raytrec.config.managed import ManagedIds
    from raytrec.embeddings.managed.exchange import IdExchange
    from raytrec.embeddings.managed.peers import Peers
    from raytrec.embeddings.managed.row_map import RowMap

    peers, cpu = Peers(), torch.device("cpu")
    maps = {"item": RowMap(ROWS, ManagedIds(), 0, peers, cpu)}
    exchange, mine = IdExchange(maps, peers, cpu), AT_ONCE // world
    memory, before, began = psutil.Process().memory_info, 0, perf_counter()
    steps = -(-ids // AT_ONCE)
    for step in range(steps):
        if step == steps // 10:
            before = memory().rss
        first = step * AT_ONCE + peers.rank * mine
        exchange.train({"item": torch.arange(first, first + mine)}, step)
    return perf_counter() - began, memory().rss - before


def serve(rank: int, world: int, store: str) -> None:
    """Does what the lines say, until there are none."""
    join_group(rank, world, store)
    side = None
    for line in sys.stdin:
        told = json.loads(line)
        if "stream" in told:
            answer = stream(told["stream"], world)
        elif "steps" in told:
            answer = side.train(told["steps"])
        else:
            side = Side(rank, world, told["ids"], told["new_share"])
            answer = side.train(20)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
