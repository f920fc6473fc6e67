"""Warm starts: a new run that begins with the weights of an earlier one."""

from __future__ import annotations

import json
import re
from pathlib import Path

from raytrec.checkpoint.files import find
from raytrec.checkpoint.index import INDEX, read_index
from raytrec.checkpoint.table_starts import schema_of, table_starts
from raytrec.common.errors import ConfigError, SchemaError
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.config.trust import checkpoint_origin
from raytrec.embeddings.per_table import table_optimizers


def config_from(
    place: str | Path, overrides: list[str], *, allow_code: bool = False
) -> tuple[RunConfig, str]:
    """The configuration of a checkpoint for a new run, and that run's name without its time.

    Args:
        place: run folder or checkpoint folder; its schema stays the schema.
        overrides: `section.key=value` strings, at least a new data.train.
        allow_code: the configuration may name code (trust.py).

    Raises:
        RunError: no checkpoint there. ConfigError: as in `load_config`.
    """
    folder, index = find(place)
    # nothing of it runs before the next time
    whole = load_config(index["about"]["config"], allow_code=True, stored=True)
    values = whole.model_dump(by_alias=True, mode="json")
    name = re.sub(r"-\d{8}-\d{6}$", "", whole.run.name or "run")
    values["run"] |= {"name": None, "dir": None}
    values["checkpoint"]["dir"] = None
    given = {"warm_start.from": folder, "data.schema": f"{folder}/{INDEX}"}
    overrides = [*(f"{key}={json.dumps(each)}" for key, each in given.items()), *overrides]
    elsewhere = checkpoint_origin(folder, index["about"]["config"])
    return load_config(values, overrides, elsewhere=elsewhere, allow_code=allow_code), name


def check_fits(config: RunConfig, schema: Schema) -> list[str]:
    """Looks whether warm_start.from belongs to this model and schema; lines about what is not taken over.

    Raises:
        ConfigError, SchemaError: what differs, and warm_start.tables and warm_start.dense say nothing about.
    """
    about = find(config.warm_start.from_)[1]["about"]
    before = load_config(about["config"], allow_code=True, stored=True).model_dump(by_alias=True, mode="json")
    old_schema = schema_of(about)
    lines = [start.told for start in table_starts(config, old_schema, schema).values() if start.told]
    if config.warm_start.dense == "exact":
        _check_dense(config, before, old_schema, schema)
    if config.warm_start.optimizer:
        _check_optimizers(config, load_config(before, allow_code=True), old_schema, schema)
    return lines


def _check_optimizers(config: RunConfig, before: RunConfig, old_schema: Schema, schema: Schema) -> None:
    old, new = _optimizer_names(before, old_schema), _optimizer_names(config, schema)
    for part, name in new.items():
        if old.get(part, name) != name:
            raise ConfigError(
                f"the optimizer of {part} is {name}, the checkpoint has state of {old[part]}",
                where=f"warm_start.from={config.warm_start.from_}",
                expected="the checkpoint's optimizers",
                do="set warm_start.optimizer=false, or the checkpoint's optimizers",
            )


def _optimizer_names(config: RunConfig, schema: Schema) -> dict[str, str]:
    of_tables = table_optimizers(config, schema).items()
    return {"the dense layers": config.optim.dense.name} | {
        f"table {table}": optimizer.name for table, optimizer in of_tables
    }


def schema_at(uri: str) -> Schema:
    """The schema of a schema.yaml, or of a checkpoint (its checkpoint.json)."""
    folder, _, name = uri.rpartition("/")
    return schema_of(read_index(folder)["about"]) if name == INDEX else Schema.load(uri)


def _check_dense(config: RunConfig, before: dict, old_schema: Schema, schema: Schema) -> None:
    where, hint = f"warm_start.from={config.warm_start.from_}", ", or warm_start.dense=matching"
    for key, new in config.model.model_dump().items():
        old = before["model"].get(key)
        if old != new and key != "dropout":
            raise ConfigError(
                f"model.{key} is {new}, and the checkpoint has {old}",
                where=where,
                expected="the checkpoint's model",
                do=f"set model.{key}={old}".replace(" ", "").replace("set", "set ") + hint,
            )
    old_parts, parts = _dense_parts(old_schema), _dense_parts(schema)
    for what, new in parts.items():
        if new != old_parts[what]:
            raise SchemaError(
                f"{what}: {new} now, {old_parts[what]} in the checkpoint",
                where=where,
                expected="the checkpoint's labels, dense columns and sparse features",
                do="train with the checkpoint's schema" + hint,
            )


def _dense_parts(schema: Schema) -> dict[str, object]:
    """What the shapes and the meaning of dense weights depend on."""
    sparse = [f"{name} → {spec.table}" for name, spec in schema.sparse.items()]
    return {"labels": schema.labels, "dense": schema.dense, "sparse": sparse}
