"""A run folder whose run is tracked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytrec.config.run_config import RunConfig, load_config


def config(folder: Path, values: dict[str, Any]) -> RunConfig:
    """Writes config.yaml into a folder, with some values; what is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {"name": "run", "dir": str(folder), **values.get("run", {})}
    made = load_config({"data": {"train": "d"}, **values, "run": run})
    (folder / "config.yaml").write_text(made.to_yaml())
    return made
