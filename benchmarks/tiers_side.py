"""Model and table on the rank that benchmarks/tiers.py measures."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from harness import status_bytes

from raytrec.checkpoint.restore import restore
from raytrec.checkpoint.save import CheckpointWriter
from raytrec.checkpoint.snapshot import RowSnapshot
from raytrec.checkpoint.state import LogicalState
from raytrec.checks.parity.batches import make_local_batch, make_random_batches
from raytrec.common.memory import retain_freed_memory
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.worker.build import build_step

DIM, FEATURES, BATCH, BATCHES = 32, 8, 2048, 16
ROW_BYTES = DIM * 4 + 4  # float32 values and one value of state
IDS = {"uniform": 1.0, "skewed": 5.0}  # power to which a uniform number is raised


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement with one kernel.

    Attributes:
        kernel: Compute kernel of the table: fused or fused_mmap.
        rows: Number of rows of the table.
        steps: Number of training steps before the table is saved.
        folder: Folder for checkpoints and the tables' files.
        memory_gib: Value of plan.memory_gib.
    """

    kernel: str
    rows: int
    steps: int
    folder: str
    memory_gib: float | None = None


class Trained:
    """Model with one table on this rank, and batches for training."""

    def __init__(self, settings: Settings, rows: int, *, fill: bool):
        self.config, self.schema = describe(settings, rows)
        self._folder = f"{settings.folder}/checkpoints"
        self.step, _ = build_step(self.config, self.schema, torch.device("cpu"), fill=fill)
        self.state = LogicalState(self.step.model, self.step.optimizer)
        self._batches = {
            ids: self.random_batches(lambda uniform, rows, power=power: skewed(uniform, rows, power))
            for ids, power in IDS.items()
        }

    def train(self, steps: int, ids: str = "uniform") -> list[float]:
        """Train for `steps` steps, starting with the first batch, and return the losses."""
        batches = islice(cycle(self._batches[ids]), steps)
        return [float(outputs.loss.detach()) for outputs in self.step.train(batches, steps)]

    def random_batches(self, ids_of: Callable[[torch.Tensor, int], torch.Tensor], seed: int = 1) -> list[Any]:
        """Return random batches, whose ids `ids_of` computes from uniform numbers and the number of rows."""
        batches = []
        for whole in make_random_batches(self.schema, BATCH, BATCHES, seed=seed):
            batch, rows = make_local_batch(whole, self.schema, [0, BATCH], 0), self.schema.tables["t"].rows
            values = batch.sparse.values()
            values.copy_(ids_of((values.double() + 0.5) / rows, rows))
            batches.append(batch)
        torch.manual_seed(0)
        return batches

    def save(self) -> None:
        """Save a checkpoint that replaces the previous one."""
        self._end_save(self._begin_save())

    def save_while_training(self) -> list[float]:
        """Save a checkpoint during training and return the losses."""
        saver, losses = self._begin_save(RowSnapshot(self.step.model, self.state.tables)), []
        while saver.busy or not losses:
            losses += self.train(BATCHES)
        self._end_save(saver)
        return losses

    def _begin_save(self, rows: RowSnapshot | None = None) -> CheckpointWriter:
        keeping = self.config.checkpoint.model_copy(update={"async_save": rows is not None, "keep_last": 1})
        shutil.rmtree(self._folder, ignore_errors=True)
        saver = CheckpointWriter(self._folder, keeping, rows=rows)
        saver.save(1, self.state.tensors(), {})
        return saver

    def _end_save(self, saver: CheckpointWriter) -> None:
        if error := saver.collect_outcome().error:
            raise error
        saver.close()

    def restore(self) -> None:
        """Restore the checkpoint."""
        assert restore(self._folder, self.state).folder


def skewed(uniform: torch.Tensor, rows: int, power: float) -> torch.Tensor:
    """Return skewed ids spread over the table; a higher power makes frequent ids more frequent."""
    return scattered((uniform**power * rows).long(), rows)


def scattered(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the ids mapped by a multiplicative permutation, so that frequent ids are not neighbors."""
    return ids * 2_654_435_761 % rows


def own_memory() -> int:
    """Return the bytes of this process's memory that are not backed by files."""
    return status_bytes("RssAnon", "RssShmem")


def describe(settings: Settings, rows: int) -> tuple[Any, Any]:
    """Return the configuration and the schema for a table with this number of rows."""
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


def set_up_once(settings: Settings) -> None:
    """Train, save and restore a small table, so that one-time costs are not measured."""
    retain_freed_memory()
    small = Trained(replace(settings, folder=f"{settings.folder}/small"), 1000, fill=True)
    small.train(3)
    small.save_while_training()
    small.restore()
