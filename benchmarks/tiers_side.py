"""The rank that benchmarks/tiers.py measures."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from rank_group import join_group

from raytrec.checkpoint.restore import restore
from raytrec.checkpoint.save import Saver
from raytrec.checkpoint.snapshot import RowSnapshot
from raytrec.checkpoint.state import LogicalState
from raytrec.checks.parity.batches import local_batch, random_batches
from raytrec.common.memory import keep_memory
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.worker.build import build_step

DIM, FEATURES, BATCH, BATCHES = 32, 8, 2048, 16
ROW_BYTES = DIM * 4 + 4  # float32, and one value of state
IDS = {"uniform": 1.0, "skewed": 5.0}  # the power to which a uniform number is raised


@dataclass(frozen=True)
class Settings:
    """Of one run of one kernel."""

    kernel: str
    rows: int
    steps: int
    folder: str
    memory_gib: float | None = None


class Trained:
    """A rank with a model over one table, and batches for it."""

    def __init__(self, settings: Settings, rows: int, *, fill: bool):
        self.config, self.schema = described(settings, rows)
        self._folder = f"{settings.folder}/checkpoints"
        self.step, _ = build_step(self.config, self.schema, torch.device("cpu"), fill=fill)
        self.state = LogicalState(self.step.model, self.step.optimizer)
        self._batches = {
            ids: self.random_batches(lambda uniform, rows, power=power: skewed(uniform, rows, power))
            for ids, power in IDS.items()
        }

    def train(self, steps: int, ids: str = "uniform") -> list[float]:
        """The losses of all steps, which begin with the first batch."""
        batches = islice(cycle(self._batches[ids]), steps)
        return [float(outputs.loss.detach()) for outputs in self.step.train(batches, steps)]

    def random_batches(self, ids_of: Callable[[torch.Tensor, int], torch.Tensor], seed: int = 1) -> list[Any]:
        """Batches with ids that `ids_of` makes of uniform numbers and the number of rows."""
        found = []
        for whole in random_batches(self.schema, BATCH, BATCHES, seed=seed):
            batch, rows = local_batch(whole, self.schema, [0, BATCH], 0), self.schema.tables["t"].rows
            values = batch.sparse.values()
            values.copy_(ids_of((values.double() + 0.5) / rows, rows))
            found.append(batch)
        torch.manual_seed(0)
        return found

    def save(self) -> None:
        """Saves, in the place of what was saved before."""
        self._end_save(self._begin_save())

    def save_while_training(self) -> list[float]:
        """The same while training goes on, all batches at a time; the losses."""
        saver, losses = self._begin_save(RowSnapshot(self.step.model, self.state.tables)), []
        while saver.busy or not losses:
            losses += self.train(BATCHES)
        self._end_save(saver)
        return losses

    def _begin_save(self, rows: RowSnapshot | None = None) -> Saver:
        keeping = self.config.checkpoint.model_copy(update={"async_save": rows is not None, "keep_last": 1})
        shutil.rmtree(self._folder, ignore_errors=True)
        saver = Saver(self._folder, keeping, rows=rows)
        saver.save(1, self.state.tensors(), {})
        return saver

    def _end_save(self, saver: Saver) -> None:
        if error := saver.taken().error:
            raise error
        saver.close()

    def restore(self) -> None:
        """Reads what was saved."""
        assert restore(self._folder, self.state).folder


def skewed(uniform: torch.Tensor, rows: int, power: float) -> torch.Tensor:
    """Ids of which small ones are the more frequent the higher the power, spread over the table."""
    return scattered((uniform**power * rows).long(), rows)


def scattered(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """The same ids, renamed: those that are used often are not side by side."""
    return ids * 2_654_435_761 % rows


def own_memory() -> int:
    """Bytes of this process's memory that are of no file."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def described(settings: Settings, rows: int) -> tuple[Any, Any]:
    """The configuration and the schema."""
    sparse = {f"f{i}": {"table": "t"} for i in range(FEATURES)}
    tables = {"t": {"rows": rows, "dim": DIM}}
    schema = Schema.parse({"labels": ["y"], "dense": ["a"], "sparse": sparse, "tables": tables}, "tiers")
    values = {
        "run": {"dir": settings.folder},
        "data": {"train": "unused", "global_batch_size": BATCH},
        "model": {"bottom_mlp": [DIM], "top_mlp": [DIM]},
        "plan": {
            "memory_gib": settings.memory_gib,
            "tables": {"t": {"sharding_type": "table_wise", "compute_kernel": settings.kernel}},
        },
    }
    return RunConfig.model_validate(values), schema


def begin(store: str, settings: Settings) -> None:
    """Joins a group of one, and sets everything up that is set up once."""
    join_group(0, 1, store)
    keep_memory()
    small = Trained(replace(settings, folder=f"{settings.folder}/small"), 1000, fill=True)
    small.train(3)
    small.save_while_training()
    small.restore()
