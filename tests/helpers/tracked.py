"""Run folders of tracked runs, and their metrics in MLflow."""

from __future__ import annotations

from pathlib import Path
from time import time
from typing import Any

from raytrec.common.messages import Compared
from raytrec.config.run_config import RunConfig, load_config
from raytrec.tracking.journal import append_line


def write_tracked_config(folder: Path, values: dict[str, Any]) -> RunConfig:
    """Write config.yaml with some values to a folder and return the RunConfig."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {"name": "run", "dir": str(folder), **values.get("run", {})}
    made = load_config({"data": {"train": "d"}, **values, "run": run})
    (folder / "config.yaml").write_text(made.to_yaml())
    return made


def add_compared_line(folder: Path, figures: dict[str, Any], step: int, unix_s: float | None = None) -> None:
    """Append a Compared message to the run folder; MLflow uses its figure names unchanged."""
    append_line(folder, Compared(step=step, unix_s=time() if unix_s is None else unix_s, figures=figures))


def mlflow_client(uri: str) -> Any:
    """Return an MLflow client for a store."""
    from mlflow import MlflowClient

    return MlflowClient(uri)


def metric_history(uri: str, run_id: str, name: str) -> list[tuple[int, float, int]]:
    """Return (step, value, timestamp in ms) of a metric, sorted by step."""
    found = mlflow_client(uri).get_metric_history(run_id, name)
    return sorted((each.step, each.value, each.timestamp) for each in found)
