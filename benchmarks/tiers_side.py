"""The rank that benchmarks/tiers.py measures."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from itertools import cycle, islice
from time import perf_counter
from typing import Any

import torch
from rank_group import join_group

from raytrec.checkpoint.restore import restore
from raytrec.checkpoint.save import Saver
from raytrec.checkpoint.snapshot import RowSnapshot
from raytrec.checkpoint.state import LogicalState
from raytrec.checks.parity.batches import local_batch, random_batches
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.worker.build import build_step
from raytrec.worker.memory import keep_freed_memory

DIM, FEATURES, BATCH, BATCHES, WARM_UP = 32, 8, 2048, 16, 20
ROW_BYTES = DIM * 4 + 4  # float32, and one value of state
PIECE = 10  # steps between two looks at whether it is saved
IDS = {"uniform": 1.0, "skewed": 5.0}  # the power to which a uniform number is raised


@dataclass(frozen=True)
class Settings:
    """Of one run of one kernel."""

    kernel: str
    ids: str
    rows: int
    steps: int
    folder: str
    save: bool


class Trained:
    """A rank with a model over one table, and batches for it."""

    def __init__(self, settings: Settings, rows: int, *, fill: bool):
        self.config, self.schema = described(settings, rows)
        self.step, _ = build_step(self.config, self.schema, torch.device("cpu"), fill=fill)
        self.state = LogicalState(self.step.model, self.step.optimizer)

    def train(self, steps: int, ids: str) -> tuple[list[float], float]:
        """The losses of all steps, and seconds of those after the first few."""
        batches = islice(cycle(self._batches(IDS[ids])), steps)
        losses, began = [], perf_counter()
        for number, outputs in enumerate(self.step.train(batches, steps)):
            losses.append(float(outputs.loss.detach()))
            if number == WARM_UP - 1:
                began = perf_counter()
        return losses, perf_counter() - began

    def _batches(self, power: float) -> list[Any]:
        found = []
        for whole in random_batches(self.schema, BATCH, BATCHES, seed=1):
            batch, rows = local_batch(whole, self.schema, [0, BATCH], 0), self.schema.tables["t"].rows
            values = batch.sparse.values()
            values.copy_(((values.double() / rows) ** power * rows).long())
            values.copy_(values * 2_654_435_761 % rows)  # rows that are used often are not side by side
            found.append(batch)
        torch.manual_seed(0)
        return found

    def save(self, ids: str | None = None) -> list[float]:
        """Saves, in the place of what was saved before; with `ids`, trains until it is saved, and gives the
        losses."""
        keeping = self.config.checkpoint.model_copy(update={"async_save": bool(ids), "keep_last": 1})
        rows = RowSnapshot(self.step.model, self.state.tables) if ids else None
        folder, losses = f"{self.config.run.dir}/checkpoints", []
        shutil.rmtree(folder, ignore_errors=True)
        saver = Saver(folder, keeping, rows=rows)
        saver.save(1, self.state.tensors(), {})
        while ids and (saver.busy or not losses):
            losses += self.train(PIECE, ids)[0]
        if error := saver.taken().error:
            raise error
        saver.close()
        return losses

    def restore(self) -> None:
        """Reads what was saved."""
        assert restore(f"{self.config.run.dir}/checkpoints", self.state).folder


def described(settings: Settings, rows: int) -> tuple[Any, Any]:
    """The configuration and the schema."""
    sparse = {f"f{i}": {"table": "t"} for i in range(FEATURES)}
    tables = {"t": {"rows": rows, "dim": DIM}}
    schema = Schema.parse({"labels": ["y"], "dense": ["a"], "sparse": sparse, "tables": tables}, "tiers")
    values = {
        "run": {"dir": settings.folder},
        "data": {"train": "unused", "global_batch_size": BATCH},
        "model": {"bottom_mlp": [DIM], "top_mlp": [DIM]},
        "plan": {"tables": {"t": {"sharding_type": "table_wise", "compute_kernel": settings.kernel}}},
    }
    return RunConfig.model_validate(values), schema


def begin(store: str, settings: Settings) -> None:
    """Joins a group of one, and sets everything up that is set up once."""
    join_group(0, 1, store)
    keep_freed_memory()
    small = Trained(replace(settings, folder=f"{settings.folder}/small"), 1000, fill=True)
    small.train(3, settings.ids)
    small.save(settings.ids)
    small.restore()
