"""Warm starts: a new run that begins with the weights of an earlier one."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from raytrec.config import RunConfig, load_config
from raytrec.errors import ConfigError, SchemaError
from raytrec.schema import Schema
from raytrec.train import checkpoint


def config_from(place: str | Path, overrides: list[str]) -> tuple[RunConfig, str]:
    """The configuration of a checkpoint for a new run, and that run's name without its time.

    Args:
        place: run folder or checkpoint folder; its schema.yaml stays the schema.
        overrides: `section.key=value` strings, at least a new data.train.

    Raises:
        RunError: no checkpoint there. ConfigError: as in `load_config`.
    """
    folder = checkpoint.find(place)
    values = yaml.safe_load((folder / "config.yaml").read_text())
    name = re.sub(r"-\d{8}-\d{6}$", "", values["run"]["name"])
    values["run"] |= {"name": None, "dir": None, "start_from": str(folder)}
    values["data"]["schema"] = str(folder / "schema.yaml")
    return load_config(values, overrides), name


def check_fits(config: RunConfig, schema: Schema) -> None:
    """Looks whether the weights of run.start_from belong to this model and schema.

    Raises:
        ConfigError, SchemaError: what differs.
    """
    folder = Path(config.run.start_from)  # found when the configuration was resolved
    before = load_config(folder / "config.yaml")
    for key in ("name", "bottom_mlp", "top_mlp"):
        old, new = getattr(before.model, key), getattr(config.model, key)
        if old != new:
            raise ConfigError(
                f"model.{key} is {new}, and the checkpoint has {old}",
                where=f"run.start_from={folder}",
                expected="the checkpoint's model",
                do=f"set model.{key}={old}".replace(" ", ""),
            )
    old, new = _shapes(Schema.load(folder / "schema.yaml")), _shapes(schema)
    for what in {**old, **new}:
        if old.get(what) != new.get(what):
            raise SchemaError(
                f"{what}: {new.get(what, 'none')} now, {old.get(what, 'none')} in the checkpoint",
                where=f"run.start_from={folder}",
                expected="the checkpoint's labels, dense columns, sparse features and tables",
                do="train with the checkpoint's schema.yaml",
            )


def _shapes(schema: Schema) -> dict[str, object]:
    """What the shapes and the meaning of the weights depend on."""
    shapes: dict[str, object] = {"labels": schema.labels, "dense": schema.dense}
    shapes["sparse"] = [f"{name} → {spec.table}" for name, spec in schema.sparse.items()]
    return shapes | {f"tables.{name}": f"{t.rows} × {t.dim}" for name, t in schema.tables.items()}
