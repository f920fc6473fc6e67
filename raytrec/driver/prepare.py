"""Prepare a run: resolve its configuration, open its data, and create its folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from raytrec.checkpoint.files import find, steps
from raytrec.checkpoint.index import INDEX
from raytrec.common.errors import ConfigError, RunError, convert_os_errors
from raytrec.common.messages import CHECKS, DELTA_STREAM, EVENTS, METRICS, RANKS
from raytrec.common.processes import get_owner_name, remove_leftovers
from raytrec.common.redaction import find_hidden_keys
from raytrec.common.storage import join_uri, make_absolute, make_relative, quote_for_shell
from raytrec.config.data import to_run_name
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.config.transforms import VOCABULARY_TRANSFORMS
from raytrec.config.trust import SEARCH, find_checkpoint_origin, mark_as_own
from raytrec.data.fragments import Dataset
from raytrec.driver.datasets import open_data
from raytrec.driver.driver_state import DRIVER_RECORD_FILE as DRIVER
from raytrec.driver.recorder import RESULT, write_text
from raytrec.driver.resume import find_interrupted_run, resume_config
from raytrec.tracking.mlflow_records import DELIVERY_STATE_FILE as DELIVERED

SCRATCH_PREFIX, TRACEBACK_FILE = "raytrec-evaluate-", "error.txt"
# Files of an earlier run that are removed when a new run starts in the same folder.
RUN_RECORD_FILES = (METRICS, RANKS, CHECKS, EVENTS, DELTA_STREAM, DELIVERED, DRIVER)


@dataclass(frozen=True)
class RunPlan:
    """Training run whose configuration, schema and data have been opened and checked.

    Attributes:
        config: Resolved configuration (`resolve`).
        schema: Schema of the run.
        datasets: Datasets by name: "train"; "valid", "test" and "items" (eval.retrieval) if the run has them.
        start: new, warm (a new run with the weights of warm_start.from), or resumed (an interrupted run).
    """

    config: RunConfig
    schema: Schema
    datasets: dict[str, Dataset]
    start: Literal["new", "warm", "resumed"]


def open_run(config: RunConfig, resumed: bool) -> RunPlan:
    """Open the schema and the data of a resolved configuration, without writing anything.

    Args:
        config: Configuration returned by `resolve_config`.
        resumed: True if the configuration is that of an interrupted run, which is to be resumed.

    Raises:
        ConfigError, SchemaError, DataError: The configuration, schema or data are invalid.
        CheckpointError: data.schema is the index of a checkpoint that cannot be read or is damaged.
    """
    check_no_redacted_values(config)
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
    """Return the resolved configuration of a run, and True if an interrupted run is to be resumed.

    Args:
        source: Config file, its values or a RunConfig; None: the configuration of `resume` or `start_from`.
        overrides: `section.key=value` strings.
        start_from: Run or checkpoint folder that provides the initial weights (warm_start.from).
        resume: Folder of an interrupted run to resume.
        resume_latest: True to resume the newest interrupted run of the same config and data, if any; needs `source`.
        allow_code: True if a configuration that is not the user's own may name code (config/trust.py).

    Raises:
        ConfigError: The input is invalid, or a run cannot be resumed with these changes.
        RunError: The run to resume does not exist or has finished, or there is no checkpoint to start from.
        CheckpointError: The checkpoint to start from is damaged.
        DataError: A path is not valid, or its store cannot be reached.
    """
    if not resume and source is None:
        config, name = load_checkpoint_config(start_from, overrides, allow_code=allow_code)
        return resolve(config, name), False
    if not resume:
        overrides = [*overrides, f"warm_start.from={start_from}"] if start_from else overrides
        config = load_config(source, overrides, allow_code=allow_code)
        is_named = bool(config.run.name or config.run.dir)
        config = resolve(config, source)
        resume = find_interrupted_run(config, is_named) if resume_latest else None
        if not resume:
            return config, False
    return resolve(resume_config(resume, source, overrides, allow_code), source), True


def resolve(config: RunConfig, source: object, kind: str = "run") -> RunConfig:
    """Return a copy of a configuration in which run.name, run.dir and tracking.uri are set, and all paths are absolute.

    Paths must be absolute because workers run in other working directories. warm_start.from becomes the folder of a
    checkpoint.

    Args:
        config: Configuration to resolve.
        source: Config file or name, from which an unnamed run gets its name; other values: the name begins with run.
        kind: Kind of command; any kind except "run" is part of the default name.

    Raises:
        ConfigError: run.dir is a URI, or this process runs in a Ray job, a path is relative, and no root is set.
        RunError, CheckpointError: There is no checkpoint in warm_start.from, or it is damaged.
        DataError: warm_start.from is not a valid path, or its store cannot be reached.
    """
    config = config.model_copy(deep=True)
    run, data, tracking = config.run, config.data, config.tracking
    stem = Path(source).stem if isinstance(source, (str, Path)) else "run"
    stem += "" if kind == "run" else f"-{kind}"
    run.name = run.name or f"{to_run_name(stem)}-{datetime.now():%Y%m%d-%H%M%S}"
    run.dir = run.dir or f"runs/{run.name}"
    if "://" in run.dir:
        raise ConfigError(
            f"run.dir cannot be a URI: {run.dir}",
            where="run.dir",
            expected="a folder on a file system that all nodes share",
            do="use a local or mounted folder; object stores are not supported as run folders",
        )
    place = partial(make_absolute, root=run.root)
    with_vocabulary = [each for each in data.transforms if isinstance(each, VOCABULARY_TRANSFORMS)]
    places = [(run, "dir"), (config.checkpoint, "dir"), (config.plan, "mmap_dir"), (config.export.deltas, "to")]
    places += [(data, key) for key in ("train", "valid", "test", "schema_path")]
    places += [(config.warm_start, "from_"), (config.eval.retrieval, "items")]
    places += [(transform, "vocabulary") for transform in with_vocabulary]
    for section, key in places:
        if value := getattr(section, key, None):
            setattr(section, key, place(value) if isinstance(value, str) else [*map(place, value)])
    if config.warm_start.from_:
        config.warm_start.from_ = find(config.warm_start.from_)[0]
    server = os.environ.get("MLFLOW_TRACKING_URI")  # nodes of a cluster may set it
    tracking.uri = tracking.uri or server or f"sqlite:///{Path(run.dir).parent}/mlflow.db"
    return config


def check_no_redacted_values(config: RunConfig) -> None:
    """Check that no value of a configuration is the placeholder for secrets (***) of checkpoints and MLflow.

    Raises:
        ConfigError: Values are placeholders; the message names their keys.
    """
    if keys := find_hidden_keys(config.model_dump(by_alias=True, mode="json")):
        raise ConfigError(
            f"values are redacted in checkpoints and in MLflow: {', '.join(keys)}",
            where="the configuration, which comes from a checkpoint or from MLflow",
            do=f"pass the values again: {' '.join(f'{key}=…' for key in keys)}",
        )


def write_config(folder: Path, config: RunConfig) -> None:
    """Write config.yaml into a run folder, as `write_marked_file` does."""
    write_marked_file(folder / "config.yaml", config.to_yaml())


def write_marked_file(file: Path, text: str) -> None:
    """Write a text to a configuration file, and mark the file as this user's own (config/trust.py).

    Raises:
        OSError: The file cannot be written.
    """
    write_text(file, text)
    mark_as_own(file)


def make_run_folder(folder: Path, config: RunConfig, schema: Schema) -> None:
    """Create the folder of a new run with config.yaml and schema.yaml; remove records of a run without checkpoints.

    Raises:
        RunError: The folder contains a finished run or a search, the checkpoint folder contains checkpoints, or one of
            these folders cannot be accessed.
    """
    contents = {RESULT: "a finished run", SEARCH: "a search"}
    if content := next((what for name, what in contents.items() if (folder / name).exists()), None):
        raise RunError(
            f"the run folder already contains {content}",
            where=str(folder),
            expected="a new folder",
            do="choose another run.dir or run.name, or remove the folder",
        )
    with convert_os_errors(
        "cannot access the checkpoint folder",
        where=config.checkpoint_root,
        expected="storage that is reachable and grants this user access",
    ):
        saved_steps = steps(config.checkpoint_root)
    if saved_steps:
        # Without a configuration in the run folder, checkpoint.dir contains the checkpoints of another run.
        is_run = (folder / "config.yaml").is_file()
        resume = f"resume the run: raytrec train --resume {quote_for_shell(make_relative(folder))}; or " * is_run
        raise RunError(
            f"the checkpoint folder already contains checkpoints up to step {saved_steps[0]}",
            where=config.checkpoint_root,
            expected="a new folder",
            do=f"{resume}choose another {'checkpoint.dir' if config.checkpoint.dir else 'run.dir or run.name'}",
        )
    with convert_os_errors("cannot write the run folder", where=str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        for name in RUN_RECORD_FILES:
            (folder / name).unlink(missing_ok=True)
        write_text(folder / "schema.yaml", schema.to_yaml())
        write_config(folder, config)  # last: a run that has a configuration can be resumed


def load_checkpoint_config(
    place: str | Path, overrides: list[str], *, allow_code: bool = False
) -> tuple[RunConfig, str]:
    """Return the configuration of a new run that starts from a checkpoint, and the name of the checkpoint's run.

    The new run starts with the weights of the checkpoint and uses its schema. The name omits the date and time.

    Args:
        place: Run folder or checkpoint folder.
        overrides: `section.key=value` strings.
        allow_code: True if the configuration may name code (config/trust.py).

    Raises:
        RunError, CheckpointError: There is no checkpoint in `place`, or it is damaged.
        ConfigError: An override is invalid, or the configuration names code that is not allowed.
        DataError: `place` is not a valid path, or its store cannot be reached.
    """
    folder, index = find(place)
    stored = index["about"]["config"]
    config = load_config(stored, allow_code=True)  # none of the code that it names runs before it is loaded again
    name = re.sub(r"-\d{8}-\d{6}$", "", config.run.name or "run")
    config.run.name = config.run.dir = config.checkpoint.dir = None
    start = [f"warm_start.from={json.dumps(folder)}", f"data.schema={json.dumps(join_uri(folder, INDEX))}"]
    elsewhere = find_checkpoint_origin(folder, stored)
    return load_config(config, start + overrides, elsewhere=elsewhere, allow_code=allow_code), name


@contextmanager
def create_scratch_folder() -> Iterator[str]:
    """Yield a temporary run folder for an evaluation or prediction, because the run folder may be another user's.

    The folder is removed after the block or, if the process was killed, by the next such command. A folder that
    contains error.txt is kept, because an error message refers to this file.
    """
    remove_leftovers(tempfile.gettempdir(), f"{SCRATCH_PREFIX}{{owner}}-*", keep=TRACEBACK_FILE)
    folder = tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{get_owner_name()}-")
    try:
        yield folder
    finally:
        if not (Path(folder) / TRACEBACK_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)
