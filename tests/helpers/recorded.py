"""Made-up run folders with known values."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from raytrec.common.messages import PHASES
from raytrec.metrics.selection import read_metric_displays
from raytrec.tracking.aggregate import ID_STATISTIC_KEYS

RUN_START_UNIX_S = 1.8e9
METRIC_DESCRIPTIONS = {figure.key: asdict(figure) for figure in read_metric_displays()}
RUN_METRICS = [METRIC_DESCRIPTIONS[key] for key in ("auc", "ne", "logloss", "calibration")]
PHASE_SECONDS = (0.1, 0.02, 0.2, 0.4, 0.6, 1.2, 0.1, 0.6, 0.28)  # phases of 100 steps, 3.5 s in total
FAILURE_CAUSE = "rank 1 (pid 7 on 10.0.0.7) died at step 220"
SAVED_EVENT = {"event": "saved", "error": None, "seconds": 0.2}
EVENTS = (
    {"event": "started", "unix_s": 0, "attempt": 1, "workers": 2},
    {"event": "start", "unix_s": 1, "total": 500, "step": 0, "workers": 2, "metrics": RUN_METRICS},
    SAVED_EVENT | {"unix_s": 6, "step": 150, "folder": "c/1", "blocked_s": 0.01},
    {"event": "failed", "unix_s": 9, "cause": FAILURE_CAUSE, "rank": 1, "step": 220, "again": True},
    {"event": "started", "unix_s": 20, "attempt": 2, "workers": 2},
    {"event": "start", "unix_s": 21, "total": 500, "step": 150, "workers": 2, "metrics": RUN_METRICS},
    SAVED_EVENT | {"unix_s": 34, "step": 500, "folder": "c/2", "blocked_s": 0.03},
)
CONFIG_YAML = """run: {name: recorded, dir: /runs/recorded}
data: {train: data/train, global_batch_size: 2048}
optim: {embeddings: {lr: 0.02}}
tracking: {uri: 'http://me:sesame@mlflow:5000'}
"""


def write_json_lines(path: Path, lines: list[dict], *, more: str = "") -> None:
    """Write a JSON lines file and append the text `more`."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + more)


def write_recorded_run(
    folder: Path, *, tables: int = 3, ranks: int = 2, intervals: int = 5, names: list[str] | None = None
) -> Path:
    """Write every file of a run with `intervals` intervals of 100 steps.

    Table i has 100 × (i + 1) rows of 16 float32 values. Table 0 is row-wise on all ranks; other tables are on
    rank i % ranks. In each interval a rank looks up 6400 × (i + 1) bytes of table i.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = names or [f"table_{i}" for i in range(tables)]
    lines = [rank_line(names, rank, ranks, 100 * k) for k in range(1, intervals + 1) for rank in range(ranks)]
    write_json_lines(folder / "ranks.jsonl", lines)
    write_json_lines(folder / "metrics.jsonl", metric_lines(100 * intervals))
    write_json_lines(folder / "checks.jsonl", check_lines(100 * intervals))
    write_json_lines(folder / "events.jsonl", [e | {"unix_s": e["unix_s"] + RUN_START_UNIX_S} for e in EVENTS])
    plan = [
        {
            "table": name,
            "sharding_type": "table_wise",
            "compute_kernel": "fused",
            "ranks": ranks_holding_table(i, ranks),
        }
        for i, name in enumerate(names)
    ]
    plan[0]["sharding_type"] = "row_wise"
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "config.yaml").write_text(CONFIG_YAML)
    spec = {"tables": {name: {"rows": 100 * (i + 1), "dim": 16} for i, name in enumerate(names)}}
    (folder / "schema.yaml").write_text(json.dumps(spec))  # JSON is YAML
    (folder / "result.json").write_text(json.dumps(result_values(100 * intervals)))
    return folder


def ranks_holding_table(table: int, ranks: int) -> list[int]:
    """Return the ranks that hold a table."""
    return list(range(ranks)) if table == 0 else [table % ranks]


def rank_line(names: list[str], rank: int, world: int, step: int, attempt: int = 0, **changes) -> dict:
    """Return a line of ranks.jsonl."""
    tables = {
        name: shard_statistics(i, world if i == 0 else 1)
        for i, name in enumerate(names)
        if rank in ranks_holding_table(i, world)
    }
    return {
        "step": step,
        "first_step": step - 100,
        "unix_s": RUN_START_UNIX_S + step / 100 * 3.5,
        "rank": rank,
        "world": world,
        "attempt": attempt,
        "steps": 100,
        "seconds": 3.5,
        "phases_s": dict(zip(PHASES, PHASE_SECONDS, strict=True)),
        "system": {"cpu_percent": 98.0, "rss_bytes": 2**30, "host_memory_percent": 40.0, "gpu_percent": None},
        "tables": tables,
    } | changes


def shard_statistics(table: int, parts: int) -> dict:
    """Return the statistics that a rank reports for its shard of table number `table`."""
    rows = 100 * (table + 1) // parts
    counts = np.zeros(30, int)
    counts[12 + table % 4 : 15 + table % 4] = rows // 4, rows // 2, rows - rows // 4 - rows // 2
    return {
        "rows": rows,
        "columns": 16,
        "weight_bytes": rows * 64,
        "state_bytes": rows * 4,
        "device": "cpu",
        "lookups": 100 * (table + 1),
        "lookup_bytes": 6400 * (table + 1),
        "touched_rows": rows // 2,
        "unique_ratio": 0.5,
        "row_norm_p05": 0.1,
        "row_norm_p50": 0.2,
        "row_norm_p95": 0.4,
        "row_norm_max": 0.5,
        "row_norm_counts": counts.tolist(),
        "max_abs": 0.3,
        "weight_norm": 3.0,
        "gradient_norm": 0.04,
        "update_norm": 0.004,
        "dead_share": 0.25,
        **dict.fromkeys(("state_norm", "changed_share", "cache_hit_rate", "collision_rate", *ID_STATISTIC_KEYS)),
    }


def metric_lines(last: int) -> list[dict]:
    """Return training metrics every 20 steps, evaluations every 100 steps, and the final evaluation.

    As in EVENTS, workers die after step 220, and steps after 150 are repeated.
    """
    first = [(step, 1 + 0.035 * step) for step in range(20, min(last, 220) + 1, 20)]
    again = [(step, 21 + 0.035 * (step - 150)) for step in range(160, last + 1, 20)]
    lines = []
    for step, at_s in first + again:
        figures = {"logloss": 0.5 + 2 / step, "ne": 0.9 + 2 / step, "calibration": 1 + 1 / step}
        when = {"step": step, "unix_s": RUN_START_UNIX_S + at_s, "rows": 20 * 2048}
        lines.append({"kind": "train", **when, **figures, "rows_per_s": 60_000.0})
        if step % 100 == 0:
            lines.append({"kind": "eval", **when, **figures, "auc": 0.8 - 2 / step, "curves": metric_curves()})
    lines.append({**lines[-1], "kind": "final", "auc": 0.81, "step": last, "curves": metric_curves(0.2)})
    return lines


def metric_curves(power: float = 0.3) -> dict:
    """Return a ROC curve and a reliability curve; a higher power means a worse model."""
    grid = np.linspace(0, 1, 50)
    bins = (np.arange(20) + 0.5) / 20
    return {
        "roc": {"fpr": grid.tolist(), "tpr": (grid**power).tolist(), "metric": "auc"},
        "reliability": {
            "predicted": bins.tolist(),
            "actual": (bins ** (1 + power)).tolist(),
            "rows": [1000 - 40 * i for i in range(20)],
        },
    }


def check_lines(last: int) -> list[dict]:
    """Return the outcomes of five checks every 100 steps; parity fails once."""
    good = {"passed": True, "figure": 1e-7, "limit": 1e-4, "text": "as it should"}
    bad = good | {"passed": False, "text": "table table_1 on rank 1 differs by 0.2"}
    outcomes = {(300, "parity"): bad}
    return [
        {"step": step, "unix_s": RUN_START_UNIX_S + step, "check": name, **outcomes.get((step, name), good)}
        for step in range(0, last + 1, 100)
        for name in ("shards", "replicas", "parity", "conservation", "numerics")
    ]


def result_values(steps: int) -> dict:
    """Return the contents of result.json."""
    return {
        "train.rows": 2048 * steps,
        "train.steps": steps,
        "train.samples_per_s": 60_000.0,
        "eval.auc": 0.81,
        "eval.rows": 30_000,
        "eval.logloss": 0.43,
        "eval.ne": 0.78,
        "eval.calibration": 0.99,
        "world_size": 2,
        "seconds": 31.4,
        "name": "recorded",
    }
