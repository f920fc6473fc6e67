"""A rank of `benchmarks/ids.py` and `benchmarks/ids_resume.py`: it trains a table when it is told to.

    python benchmarks/ids_side.py RANK WORLD STORE

It reads lines of JSON: {"ids", "new_share"} builds a model and batches, {"steps"} trains so many steps,
{"stream"} sends so many distinct ids through a map alone, {"resume", "first", "saves"} trains on distinct
ids from one checkpoint to others. To each it answers with a line, [seconds, CPU seconds]; of the last two,
[seconds, bytes that the process has grown by].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch
from rank_group import join_group, time_steps
from torch import nn

DIM, ROWS, BATCH, BAG, SINGLES, PIECES = 16, 100_000, 2048, 8, 4, 16
FEATURES = [f"f{i}" for i in range(SINGLES)]
AT_ONCE = 16_384  # ids of a stream
RESUME_ROWS = 12_288  # of a step of a run that is resumed


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
        from raytrec.data.batch import Collator
        from raytrec.data.form import Form, ReadPlan
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
        self._form = Form(ReadPlan(schema), lists=frozenset({"bag"}))
        self._collate, self._random = Collator(self._form), np.random.default_rng(rank)
        self._world, self._new_share, self._next = world, new_share, (rank + 1) * 2**40
        self._pieces = [self._ids() for _ in range(PIECES)]
        self._step, _ = build_step(config, schema, torch.device("cpu"))

    def train(self, steps: int) -> tuple[float, float]:
        """(seconds, CPU seconds) of so many steps."""
        return time_steps(self._step, self._batches(), steps)

    def _ids(self) -> np.ndarray:
        return (self._random.zipf(1.05, BATCH * (SINGLES + BAG)) * 7919) % 90_000

    def _batches(self) -> Iterator[Any]:
        from raytrec.data.canonical import canonical_table
        from raytrec.data.pieces import Rows

        offsets, labels = np.arange(0, BATCH * BAG + 1, BAG, np.int32), np.ones(BATCH, np.float32)
        for number in range(sys.maxsize):
            ids = self._pieces[number % PIECES].copy()
            new = int(len(ids) * self._new_share)
            if new:
                ids[:: len(ids) // new][:new] = np.arange(self._next, self._next + new)
                self._next += new
            singles = np.split(ids[: BATCH * SINGLES], SINGLES)
            bag = (offsets, ids[BATCH * SINGLES :], None)
            rows = Rows.of(canonical_table(self._form, [labels], [], singles, [bag], BATCH).to_batches()[0])
            yield self._collate([rows], BATCH, BATCH * self._world, number)


def stream(ids: int, world: int) -> tuple[float, int]:
    """(seconds, bytes that this process has grown by since a tenth of them) of distinct ids through a map."""
    from raytrec.common.collectives import Peers
    from raytrec.config.schema_parts import ManagedIds
    from raytrec.embeddings.managed.batches import IdExchange

    peers, cpu = Peers(), torch.device("cpu")
    exchange, mine = IdExchange({"item": (ROWS, ManagedIds())}, 0, peers, cpu), AT_ONCE // world
    memory, before, began = psutil.Process().memory_info, 0, perf_counter()
    steps = -(-ids // AT_ONCE)
    for step in range(steps):
        if step == steps // 10:
            before = memory().rss
        first = step * AT_ONCE + peers.rank * mine
        exchange.train({"item": torch.arange(first, first + mine)}, step)
    return perf_counter() - began, memory().rss - before


def resume(rank: int, world: int, root: str, first: int, saves: list[int]) -> tuple[float, int]:
    """(seconds, bytes that this process has grown by since a tenth of them) of the steps after `first`, from
    the checkpoint of that step, and with a checkpoint at each of `saves`."""
    from raytrec.checkpoint.managed import ids_to_read, saved_ids, take_over_ids
    from raytrec.checkpoint.restore import restore
    from raytrec.checkpoint.save import Saver
    from raytrec.checkpoint.state import LogicalState
    from raytrec.config.run_config import RunConfig
    from raytrec.config.schema import Schema
    from raytrec.data.form import Form, ReadPlan
    from raytrec.worker.build import build_step

    features = {name: {"table": "item"} for name in ("new", "known")}
    tables = {"item": {"rows": ROWS, "dim": DIM, "ids": "managed"}}
    schema = Schema.parse({"labels": ["y"], "sparse": features, "tables": tables}, "ids")
    config = RunConfig.model_validate(
        {
            "data": {"train": "unused", "global_batch_size": RESUME_ROWS},
            "scaling": {"num_workers": world},
            "model": {"name": "ids_side:Sum"},
            "optim": {"embeddings": {"name": "adagrad"}},
            "checkpoint": {"async_save": False},
        }
    )
    torch.manual_seed(0)
    step, _ = build_step(config, schema, torch.device("cpu"))
    state = LogicalState(step.model, step.optimizer)
    saver = Saver(root, config.checkpoint)
    if first:
        found = restore(root, state, more=lambda about: ids_to_read(about, step.maps))
        take_over_ids(step.maps, found.more, found.about)
        step.trained = first
    batches, memory = _distinct(Form(ReadPlan(schema)), rank, world, first), psutil.Process().memory_info
    before, began, early = 0, perf_counter(), first + (saves[-1] - first) // 10
    for save in saves:
        for _ in step.train(batches, save - step.trained):
            if step.trained == early:
                before = memory().rss
        ids, about = saved_ids(step.maps)
        saver.save(save, state.tensors(), about, ids)
        if error := saver.taken().error:
            raise error
    return perf_counter() - began, memory().rss - before


def _distinct(form: Any, rank: int, world: int, first: int) -> Iterator[Any]:
    """This rank's batches from step `first` on, of ids that are functions of the step alone."""
    from raytrec.data.batch import Collator
    from raytrec.data.canonical import canonical_table
    from raytrec.data.pieces import Rows

    collate, size = Collator(form), RESUME_ROWS // world
    places = np.arange(rank * size, (rank + 1) * size)
    for number in range(first, sys.maxsize):
        new = number * RESUME_ROWS + places
        ids = [new, np.maximum(new - RESUME_ROWS * (1 + places % 4), places)]
        labels = (new * 7919 % 13 < 6).astype(np.float32)
        rows = Rows.of(canonical_table(form, [labels], [], ids, [], size).to_batches()[0])
        yield collate([rows], size, RESUME_ROWS, number)


def serve(rank: int, world: int, store: str) -> None:
    """Does what the lines say, until there are none."""
    join_group(rank, world, store)
    side = None
    for line in sys.stdin:
        told = json.loads(line)
        if "stream" in told:
            answer = stream(told["stream"], world)
        elif "resume" in told:
            answer = resume(rank, world, told["resume"], told["first"], told["saves"])
        elif "steps" in told:
            answer = side.train(told["steps"])
        else:
            side = Side(rank, world, told["ids"], told["new_share"])
            answer = side.train(20)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
