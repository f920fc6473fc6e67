"""A run before it starts: resolved configuration, data, folder."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from raytrec.checkpoint.files import find, steps
from raytrec.checkpoint.index import INDEX
from raytrec.common.errors import ConfigError, RunError, os_errors
from raytrec.common.messages import CHECKS, EVENTS, METRICS, RANKS
from raytrec.common.redaction import hidden_keys
from raytrec.common.storage import absolute, in_shell, join_uri, relative
from raytrec.config.data import name_like
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.config.transforms import WITH_VOCABULARY
from raytrec.config.trust import checkpoint_origin, mark
from raytrec.data.fragments import Dataset
from raytrec.driver.datasets import open_data
from raytrec.driver.driver_state import NOTE as DRIVER
from raytrec.driver.recorder import RESULT, write_text
from raytrec.driver.resume import interrupted, resume_config
from raytrec.tracking.feed import NOTE as DELIVERED

OF_START = (METRICS, RANKS, CHECKS, EVENTS, DELIVERED, DRIVER)  # records that a new run does not continue


@dataclass(frozen=True)
class RunPlan:
    """A run before it starts.

    Attributes:
        config: resolved (`resolve`).
        datasets: "train", "valid", "test" and "items" (eval.retrieval) → Dataset, as far as the run has them.
        start: new, warm (with the weights of warm_start.from), or resumed (the folder is config.run.dir).
    """

    config: RunConfig
    schema: Schema
    datasets: dict[str, Dataset]
    start: Literal["new", "warm", "resumed"]


def open_run(config: RunConfig, resumed: bool) -> RunPlan:
    """Opens the schema and the data of a resolved configuration; nothing is written.

    Raises:
        ConfigError, SchemaError, DataError: what is wrong with the input.
    """
    check_nothing_hidden(config)
    schema, datasets = open_data(config)
    start: Any = "resumed" if resumed else "warm" if config.warm_start.from_ else "new"
    return RunPlan(config, schema, datasets, start)


def resolve_config(
    source: Any,
    overrides: list[str],
    start_from: Any = None,
    resume: Any = None,
    resume_latest: bool = False,
    allow_code: bool = False,
) -> tuple[RunConfig, bool]:
    """(the resolved configuration, whether it is an interrupted run's).

    Args:
        source, start_from, resume, resume_latest, allow_code: as in run.train.
        overrides: `section.key=value` strings.

    Raises:
        ConfigError: what is wrong with the input. RunError: a run to resume that does not exist, or has
            finished.
    """
    if not resume and source is None:
        config, name = config_from(start_from, overrides, allow_code=allow_code)
        return resolve(config, name), False
    if not resume:
        overrides = [*overrides, f"warm_start.from={start_from}"] if start_from else overrides
        config = load_config(source, overrides, allow_code=allow_code)
        is_named = bool(config.run.name or config.run.dir)
        config = resolve(config, source)
        resume = interrupted(config, is_named) if resume_latest else None
        if not resume:
            return config, False
    return resolve(resume_config(resume, source, overrides, allow_code), source), True


def resolve(config: RunConfig, source: object, kind: str = "run") -> RunConfig:
    """Names, folders and stores filled in; every path absolute, because workers run elsewhere."""
    config = config.model_copy(deep=True)
    run, data, tracking = config.run, config.data, config.tracking
    stem = Path(source).stem if isinstance(source, (str, Path)) else "run"
    stem += "" if kind == "run" else f"-{kind}"
    run.name = run.name or f"{name_like(stem)}-{datetime.now():%Y%m%d-%H%M%S}"
    run.dir = run.dir or f"runs/{run.name}"
    if "://" in run.dir:
        raise ConfigError(
            f"run.dir is {run.dir}",
            where="run.dir",
            expected="a folder on a file system that all nodes share",
            do="use a local or mounted folder; object stores are not supported as run folders",
        )
    place = partial(absolute, root=run.root)
    with_vocabulary = [each for each in data.transforms if isinstance(each, WITH_VOCABULARY)]
    places = [(run, "dir"), (config.checkpoint, "dir"), (config.plan, "mmap_dir")]
    places += [(data, key) for key in ("train", "valid", "test", "schema_path")]
    places += [(config.warm_start, "from_"), (config.eval.retrieval, "items")]
    places += [(transform, "vocabulary") for transform in with_vocabulary]
    for section, key in places:
        if value := getattr(section, key, None):
            setattr(section, key, place(value) if isinstance(value, str) else [*map(place, value)])
    if config.warm_start.from_:
        config.warm_start.from_ = find(config.warm_start.from_)[0]
    server = os.environ.get("MLFLOW_TRACKING_URI")  # which a cluster's nodes can have
    tracking.uri = tracking.uri or server or f"sqlite:///{Path(run.dir).parent}/mlflow.db"
    return config


def check_nothing_hidden(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: values are missing because they were redacted where the configuration comes from.
    """
    if keys := hidden_keys(config.model_dump(by_alias=True, mode="json")):
        raise ConfigError(
            f"redacted in checkpoints and in MLflow: {', '.join(keys)}",
            where="the configuration, which comes from there",
            do=f"pass it again: {' '.join(f'{key}=…' for key in keys)}",
        )


def write_config(folder: Path, config: RunConfig) -> None:
    """Writes a run's config.yaml, and marks it as this user's (trust.py)."""
    write_marked(folder / "config.yaml", config.to_yaml())


def write_marked(file: Path, text: str) -> None:
    """Write a file of settings, and mark it as this user's (trust.py)."""
    write_text(file, text)
    mark(file)


def make_run_folder(folder: Path, config: RunConfig, schema: Schema) -> None:
    """Prepare the folder of a new run, without the records of an earlier start that left no checkpoint.

    Raises:
        RunError: the folder holds a finished run or checkpoints, or cannot be written.
    """
    if (folder / RESULT).exists():
        raise RunError(
            "this run folder holds a finished run",
            where=str(folder),
            expected="a new folder",
            do="choose another run.dir or run.name, or remove the folder",
        )
    with os_errors(
        "the place for checkpoints cannot be looked at",
        where=f"checkpoint.dir={config.checkpoint_root}",
        expected="storage that answers, and lets this user in",
    ):
        held = steps(config.checkpoint_root)
    if held:
        raise RunError(
            f"there are checkpoints already, up to step {held[0]}",
            where=config.checkpoint_root,
            expected="a new folder",
            do=f"resume that run: raytrec train --resume {in_shell(relative(folder))}; or choose another "
            "run.dir or checkpoint.dir",
        )
    with os_errors("cannot write the run folder", where=str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        for name in OF_START:
            (folder / name).unlink(missing_ok=True)
        write_text(folder / "schema.yaml", schema.to_yaml())
        write_config(folder, config)  # last: a run that has a configuration can be resumed


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
    stored = index["about"]["config"]
    config = load_config(stored, allow_code=True)  # nothing of it runs before it is loaded again
    name = re.sub(r"-\d{8}-\d{6}$", "", config.run.name or "run")
    config.run.name = config.run.dir = config.checkpoint.dir = None
    own = [f"warm_start.from={json.dumps(folder)}", f"data.schema={json.dumps(join_uri(folder, INDEX))}"]
    elsewhere = checkpoint_origin(folder, stored)
    return load_config(config, own + overrides, elsewhere=elsewhere, allow_code=allow_code), name
