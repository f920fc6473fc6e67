"""Going on with a run that was interrupted: which one, and whether it is still the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from raytrec.checkpoint.files import newest
from raytrec.config import RunConfig, load_config
from raytrec.errors import ConfigError, DataError, RunError
from raytrec.schema import Schema
from raytrec.storage import absolute
from raytrec.train.watch import RESULT

# What may change in mid-run: it does not change what is trained. (Where the data lie may change, because
# their row groups are compared, too.)
FREE = (
    "scaling.",
    "plan.",
    "tracking.",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.best_by",
    "checkpoint.asynchronous",
    "train.log_every_steps",
    "train.eval_every_steps",
    "train.on_nan",
    "train.deterministic",
    "data.train",
    "data.valid",
    "data.test",
    "data.schema",
    "data.readers",
    "data.buffer_gib",
    "data.prefetch",
    "run.dir",
    "run.name",
    "run.root",
)


def resume_config(
    place: str | Path, source: Any, overrides: list[str], allow_code: bool = False
) -> RunConfig:
    """The configuration of a run that is not finished, with what may be changed in it changed.

    Args:
        place: the run folder.
        source: a config to hold it to; None: the run's own.
        overrides: `section.key=value` strings.
        allow_code: a source out of a URI may name code (trust.py); the run's own always may.

    Raises:
        RunError: no run there, or a finished one. ConfigError: a change that would make it another run.
    """
    folder = Path(absolute(str(place)))
    check_unfinished(folder)
    if not (folder / "config.yaml").is_file():
        raise RunError(
            "there is no run here",
            where=str(folder),
            expected="the folder of a run, with its config.yaml",
            do="give the folder that `raytrec train` printed (run.dir)",
        )
    before = load_config(folder / "config.yaml")
    config = load_config(source if source is not None else before, overrides, allow_code=allow_code)
    for section, key in (("run", "name"), ("run", "dir"), ("run", "start_from"), ("checkpoint", "dir")):
        part = getattr(config, section)
        if getattr(part, key) is None:
            setattr(part, key, getattr(getattr(before, section), key))
    config.run.dir = str(folder)  # it may have been moved since
    config.tracking.uri = config.tracking.uri or before.tracking.uri
    if changed := _differences(before, config):
        raise ConfigError(
            "the configuration has changed in what decides the result:\n" + "\n".join(changed),
            where=str(folder / "config.yaml"),
            expected="the configuration that the run began with",
            do=f"leave these as they were; or begin a new run with its weights: raytrec train --from {place}",
        )
    return config


def check_unfinished(folder: Path) -> None:
    """Raises a RunError when the run in a folder has finished."""
    if (folder / RESULT).exists():
        raise RunError(
            "this run has finished",
            where=str(folder),
            expected="a run that was interrupted",
            do=f"look at its {RESULT}, or begin a new run with its weights: raytrec train --from {folder}",
        )


def interrupted(config: RunConfig, named: bool) -> Path | None:
    """The run that the same command has begun before and that has not finished.

    Args:
        config: resolved, as of a new run.
        named: whether the user has chosen its name or folder. Else it is the newest run of this name and
            another time whose configuration and data are the same.

    Returns:
        Its folder, or None.
    """
    folder = Path(config.run.dir)
    if named:
        return folder if _is_unfinished(folder) else None
    stem = config.run.name.rsplit("-", 2)[0]  # NAME-date-time
    found = [f for f in sorted(folder.parent.glob(f"{stem}-*"), reverse=True) if _is_unfinished(f)]
    return next((f for f in found if _is_same(load_config(f / "config.yaml"), config)), None)


def _is_unfinished(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and not (folder / RESULT).exists()


def _is_same(before: RunConfig, after: RunConfig) -> bool:
    data = all(getattr(before.data, part) == getattr(after.data, part) for part in ("train", "valid", "test"))
    return data and not _differences(before, after)


def check_same_data(folder: Path, root: str, schema: Schema, fingerprint: str) -> None:
    """Looks whether the cursor in the newest checkpoint still means the same rows.

    Raises:
        ConfigError, DataError: what has changed.
    """
    if schema.to_yaml() != (folder / "schema.yaml").read_text():
        raise ConfigError(
            "the schema has changed since the run began",
            where=f"data.schema, {folder / 'schema.yaml'}",
            expected="the schema that the run began with",
            do=f"set data.schema={folder / 'schema.yaml'}",
        )
    _, index, _ = newest(root)
    if index and index["about"]["data"] != fingerprint:
        raise DataError(
            "data.train has other row groups than when the run was interrupted",
            where=f"data.train; {root}",
            expected="the same files: which rows are left is counted in their row groups",
            do=f"bring the files back; or begin a new run with the weights: raytrec train --from {folder}",
        )


def _differences(before: RunConfig, after: RunConfig) -> list[str]:
    old, new = (_flat(yaml.safe_load(c.to_yaml())) for c in (before, after))
    return [
        f"  {key}: {old.get(key)} → {new.get(key)}"
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not key.startswith(FREE)
    ]


def _flat(values: dict, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
