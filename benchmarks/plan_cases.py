"""Plans for `benchmarks/plan.py` (three schemas, several ways of sharding), and training under a plan."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from harness import status_bytes
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.embeddings.tables import tables
from raytrec.worker.build import build_step


def _schema(dense: int, features: list[tuple[int, int, int]]) -> Schema:
    """Return a schema with a table for each feature, given as (rows, columns, ids per bag)."""
    names = [f"f{i}" for i in range(len(features))]
    statistics = {
        name: {"mean_length": ids, "p99_length": ids, "max_length": ids, "distinct": rows}
        for name, (rows, _, ids) in zip(names, features, strict=True)
    }
    return Schema.parse(
        {
            "labels": ["y"],
            "dense": [f"d{i}" for i in range(dense)],
            "sparse": {name: {"table": name} for name in names},
            "tables": {name: {"rows": rows, "dim": dim} for name, (rows, dim, _) in zip(names, features, strict=True)},
            "statistics": statistics,
        },
        "plans",
    )


# Many tables with one id per row; few tables with wide rows and long bags; tables of uneven sizes and loads.
SCHEMAS: dict[str, tuple[Schema, dict[str, Any], int]] = {
    "clicks": (
        _schema(13, [(150_000 if i < 20 else 400, 16, 1) for i in range(26)]),
        {"name": "dlrm", "bottom_mlp": [256, 64], "top_mlp": [256, 128]},
        512,
    ),
    "bags": (
        _schema(4, [(120_000, 64, ids) for ids in (1, 5, 10, 20, 30, 40)]),
        {"name": "dcn", "bottom_mlp": [64], "cross_layers": 2, "cross_rank": 64, "top_mlp": [128]},
        256,
    ),
    "uneven": (
        _schema(8, [(1_000_000, 32, 20), (400_000, 32, 8), *[(5_000, 32, 2)] * 10]),
        {"name": "dlrm", "bottom_mlp": [512, 128], "top_mlp": [512, 256]},
        384,
    ),
}
PLANNED = "planned"  # sharding types chosen by the planner
WAYS = {
    1: ("table_wise", "data_parallel"),
    2: ("table_wise", "row_wise", "column_wise", "mixed", PLANNED),
    3: ("table_wise", "row_wise", PLANNED),
    4: ("table_wise", "row_wise", "mixed", PLANNED),
}


@dataclass(frozen=True)
class PlanCase:
    """Model of a schema under one way of sharding.

    Attributes:
        schema: Schema of the data.
        model: Section `model` of the configuration.
        rows: Number of rows per rank and step.
        way: Sharding type of all tables, or mixed or planned; see `config_of`.
    """

    schema: Schema
    model: dict[str, Any]
    rows: int
    way: str


CASES = {
    f"{name} {way}": PlanCase(*of_schema, way)
    for name, of_schema in SCHEMAS.items()
    for way in ("table_wise", "row_wise", "column_wise", "data_parallel", "mixed", PLANNED)
}


def ids_of(case: PlanCase, feature: str) -> int:
    """Return the number of ids per bag of a feature."""
    return round(case.schema.statistics[feature].mean_length)


def config_of(case: PlanCase, world: int) -> RunConfig:
    """Return the configuration of a case.

    With `planned`, the planner chooses. With `mixed`, the largest tables are row-wise, the smallest are
    data-parallel, and the others are table-wise.
    """
    ways = {name: case.way for name in case.schema.tables}
    if case.way == "mixed":
        sizes = {name: table.rows * table.dim for name, table in case.schema.tables.items()}
        for name, size in sizes.items():
            ways[name] = "row_wise" if size == max(sizes.values()) else "table_wise"
            if size <= 10_000:
                ways[name] = "data_parallel"
    values: dict[str, Any] = {
        "data": {"train": "unused/train", "global_batch_size": case.rows * world, "buffer_gib": 0.01},
        "scaling": {"num_workers": world, "device": "cpu"},
        "model": case.model,
        "optim": {"embeddings": {"name": "adagrad"}, "dense": {"name": "adagrad"}},
        "plan": {"tables": {name: {"sharding_type": way} for name, way in ways.items()}}
        if case.way != PLANNED
        else {"sharding_types": ["table_wise", "row_wise", "column_wise"]},
        "checkpoint": {"async_save": False},
        "tracking": {"every_steps": None},
    }
    return load_config(values)


def release() -> None:
    """Return free memory to the system, and reset the peak resident memory of this process."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class Trained:
    """Model under a plan on this rank, trained on batches in memory."""

    def __init__(self, name: str, rank: int, world: int):
        case = CASES[name]
        self._before = status_bytes("VmRSS")
        config, schema = config_of(case, world), case.schema
        rows = config.data.global_batch_size // world
        self._step, _ = build_step(config, schema, torch.device("cpu"), fill=False)
        for table in tables(self._step.model).values():
            for part in (table.weight, *table.state.values()):
                for shard in part.local:  # touches the pages
                    shard.values.fill_(0.01)
        rng = np.random.default_rng(rank)
        lengths = torch.tensor([ids_of(case, name) for name in schema.sparse], dtype=torch.int32)
        bounds = [schema.tables[spec.table].rows for spec in schema.sparse.values()]
        self._batches = []
        for _ in range(4):
            ids = [rng.integers(0, n, rows * int(k)) for n, k in zip(bounds, lengths, strict=True)]
            sparse = KeyedJaggedTensor(
                list(schema.sparse),
                torch.from_numpy(np.concatenate(ids)),
                lengths=lengths.repeat_interleave(rows),
                length_per_key=[len(of) for of in ids],
            )
            labels = torch.from_numpy(rng.integers(0, 2, (rows, 1)).astype(np.float32))
            dense = torch.from_numpy(rng.normal(size=(rows, len(schema.dense))).astype(np.float32))
            self._batches.append(Batch(dense, sparse, labels, torch.ones(rows), rows * world))

    def train(self, steps: int) -> list[float]:
        """Train for some steps, and return the median [seconds, CPU seconds] per step."""
        batches = (self._batches[i % 4] for i in range(steps))
        times = [(perf_counter(), process_time()) for _ in self._step.train(batches, steps)]
        return np.median(np.diff(times, axis=0), axis=0).tolist()

    def memory(self) -> int:
        """Return the plan's peak bytes, without a batch that this class holds in addition to the pipeline's batches."""
        spare = sum(t.numel() * t.element_size() for t in _tensors(self._batches[0]))
        return status_bytes("VmHWM") - self._before - spare


def _tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch.dense, batch.labels, batch.weights, batch.sparse.values(), batch.sparse.lengths()]
