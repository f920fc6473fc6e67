"""The plans of `benchmarks/plan.py`: three schemas, each sharded in several ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema


def _schema(dense: int, features: list[tuple[int, int, int]]) -> Schema:
    """Features with a table each: (rows, columns, ids of a bag)."""
    names = [f"f{i}" for i in range(len(features))]
    known = {
        name: {"mean_length": ids, "p99_length": ids, "max_length": ids, "distinct": rows}
        for name, (rows, _, ids) in zip(names, features, strict=True)
    }
    return Schema.parse(
        {
            "labels": ["y"],
            "dense": [f"d{i}" for i in range(dense)],
            "sparse": {name: {"table": name} for name in names},
            "tables": {
                name: {"rows": rows, "dim": dim} for name, (rows, dim, _) in zip(names, features, strict=True)
            },
            "statistics": known,
        },
        "plans",
    )


# Many tables with an id a row; few with wide rows and long bags; tables of very uneven sizes and loads.
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
PLANNED = "planned"  # as the planner chooses
WAYS = {
    1: ("table_wise", "data_parallel"),
    2: ("table_wise", "row_wise", "column_wise", "mixed", PLANNED),
    3: ("table_wise", "row_wise", PLANNED),
    4: ("table_wise", "row_wise", "mixed", PLANNED),
}


@dataclass(frozen=True)
class PlanCase:
    """A schema's model under one way of sharding."""

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
    """Ids of a bag."""
    return round(case.schema.statistics[feature].mean_length)


def config_of(case: PlanCase, world: int) -> RunConfig:
    """Its configuration. planned: as the planner chooses; mixed: the largest tables by rows, the
    smallest copied, the rest whole."""
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
