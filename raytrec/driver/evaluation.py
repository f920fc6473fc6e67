"""`raytrec evaluate`, and the hint to it when a run's evaluation failed."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from time import perf_counter
from typing import Any

from raytrec.checkpoint.files import find, find_best, find_step, folder_of, newest
from raytrec.checkpoint.rows import schema_of
from raytrec.common.errors import ConfigError, DataError, RaytrecError
from raytrec.common.processes import owner, remove_leftovers
from raytrec.common.storage import absolute, relative
from raytrec.config.overrides import Overrides, as_texts, section_of
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.config.trust import checkpoint_origin, code_in
from raytrec.data.rows import check_accused
from raytrec.driver.console import Result, RunConsole
from raytrec.driver.datasets import check_rows_count, note_files, note_left_out, open_dataset, open_items
from raytrec.driver.launch import run_group
from raytrec.driver.recorder import Watch
from raytrec.driver.session import session_of
from raytrec.metrics.selection import Selection
from raytrec.worker.loop import evaluate_worker

# What plays a part in an evaluation, and is not the model.
SETTABLE = ("data", "scaling", "plan", "train", "eval")
RULE = "out_of_range"
SCRATCH, TRACEBACK = "raytrec-evaluate-", "error.txt"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, with the configuration and schema by which its model is built.

    Attributes:
        folder: Path or URI of the checkpoint.
        index: Content of its index.
    """

    config: RunConfig
    schema: Schema
    folder: str
    index: dict[str, Any]


def evaluation_config(
    about: dict[str, Any], folder: str, overrides: list[str], *, allow_code: bool
) -> tuple[RunConfig, Schema]:
    """The configuration and the schema of an evaluation: the checkpoint's, with changes.

    Args:
        about: of the checkpoint's index.
        folder: of the checkpoint.
        overrides: `section.key=value` of data, scaling, plan, train and eval;
            `tables.NAME.out_of_range=RULE`, where NAME may be a pattern such as `item*`.
        allow_code: the configuration may name code (trust.py).

    Raises:
        ConfigError, SchemaError: an override that is none, or that would make it another model.
    """
    of_tables = [override for override in overrides if override.startswith("tables.")]
    others = [override for override in overrides if override not in of_tables]
    for override in others:
        if section_of(override) not in SETTABLE:
            raise ConfigError(
                f"'{override}' has no part in an evaluation",
                where="command line, --set",
                expected=f"a key of {', '.join(SETTABLE)}, or tables.NAME.{RULE}: the model is fixed",
            )
    elsewhere = checkpoint_origin(folder, about["config"])
    config = load_config(about["config"], others, elsewhere=elsewhere, allow_code=allow_code)
    values = schema_of(about).model_dump()
    for override in of_tables:
        _set_rule(values["tables"], override)
    return config, Schema.parse(values, "the checkpoint's schema" + "".join(f" with {o}" for o in of_tables))


def _set_rule(tables: dict[str, dict[str, Any]], override: str) -> None:
    key, _, rule = override.partition("=")
    pattern, _, what = key.removeprefix("tables.").rpartition(".")
    if what != RULE:
        raise ConfigError(
            f"'{override}' cannot be set for an evaluation",
            where="command line, --set",
            expected=f"tables.NAME.{RULE}=error, clamp or hash; a table's size is that of the weights",
        )
    found = [table for table in tables if fnmatchcase(table, pattern)]
    if not found:
        raise ConfigError(
            f"there is no table '{pattern}'",
            where=f"command line, --set {override}",
            expected=f"one of {', '.join(tables)}, or a pattern such as '*'",
        )
    for table in found:
        tables[table][RULE] = rule


@contextmanager
def scratch_folder() -> Iterator[str]:
    """A folder for what an evaluation writes: a run or a checkpoint that is evaluated may be another user's.

    It goes with the block, or where its process was killed with the next one, unless there is a traceback in
    it that an error speaks of.
    """
    remove_leftovers(tempfile.gettempdir(), f"{SCRATCH}{{owner}}-*", keep=TRACEBACK)
    folder = tempfile.mkdtemp(prefix=f"{SCRATCH}{owner()}-")
    try:
        yield folder
    finally:
        if not (Path(folder) / TRACEBACK).exists():
            shutil.rmtree(folder, ignore_errors=True)


def with_recovery_hint(error: RaytrecError, config: RunConfig, steps: int) -> RaytrecError:
    """The error that ended a run, with what to do where the model is trained and saved all the same.

    Args:
        steps: of the whole run.
    """
    try:
        folder, _ = newest(config.checkpoint_root)
    except OSError:
        return error
    if not folder or folder != folder_of(config.checkpoint_root, steps):
        return error
    run = relative(Path(config.run.dir))
    words = ["raytrec", "evaluate", run]
    words += ["--set", "data.on_error=skip"] if isinstance(error, DataError) else []
    words += ["--allow-code"] if code_in(config.model_dump(by_alias=True)) else []
    advice = [error.do] if error.do else []
    advice += [
        f"all {steps} steps are trained and saved, in {folder}: evaluate them with `{shlex.join(words)}`",
        f"or mend this, and let the run come to its end: `raytrec train --resume {shlex.quote(run)}`",
    ]
    return type(error)(error.what, where=error.where, expected=error.expected, do="; ".join(advice))


def evaluate(
    place: str | Path,
    data: str | None = None,
    *,
    workers: int | None = None,
    batch_size: int | None = None,
    overrides: Overrides | None = None,
    allow_code: bool = False,
) -> Result:
    """Evaluates a finished run, or a checkpoint, on a folder of Parquet. Nothing is written there.

    Args:
        place: run folder or checkpoint folder.
        data: folder or file of Parquet, local or s3:// or gs://; default: the run's data.test, else its
            data.valid.
        workers: number of workers; default: as the run was trained.
        batch_size: global batch size; default: as the run was trained.
        overrides: `section.key=value` of data, scaling, plan and train, such as data.on_error=skip; and
            tables.NAME.out_of_range=RULE.
        allow_code: the configuration in there may name code (raytrec/config/trust.py).

    Returns:
        Result: eval.* figures, world_size and seconds.

    Raises:
        RunError: no checkpoint there. ConfigError, DataError: as in `train`.

    Example:
        >>> raytrec.evaluate("runs/films", "films/valid").metrics["eval.rows"]
        160
    """
    began = perf_counter()
    changes = [f"scaling.num_workers={workers}"] if workers else []
    changes += [f"data.global_batch_size={batch_size}"] if batch_size else []
    changes += as_texts(overrides)
    saved = resolve_checkpoint(place, None, changes, allow_code)
    config, schema, folder = saved.config, saved.schema, saved.folder
    places = absolute(data) if data else config.data.test or config.data.valid
    if not places:
        raise ConfigError("there is nothing to evaluate on", where=folder, expected="--data PARQUET")
    if config.eval.retrieval:
        config.eval.retrieval.items = absolute(config.eval.retrieval.items)
    datasets = {"test": open_dataset(config, schema, places, "--data")}
    datasets |= open_items(config, schema, datasets)
    for dataset in datasets.values():
        check_accused(dataset)
        check_rows_count(dataset)
    with scratch_folder() as config.run.dir, RunConsole(config.run.name) as console, session_of(config):
        note_files(console, datasets)
        for line in (left_out := note_left_out(Path(config.run.dir), datasets)):
            console.warn(line)
        figures = run_group(evaluate_worker, config, schema, datasets, folder, Watch(console))
    metrics = {
        **figures,
        "skipped_files": len(left_out),
        "seconds": round(perf_counter() - began, 3),
        "name": f"{config.run.name} on {data or datasets['test'].uri}",
    }
    return Result(metrics, Path(folder))


def resolve_checkpoint(
    place: str | Path, checkpoint: str | int | None, changes: list[str], allow_code: bool
) -> Checkpoint:
    """Return a checkpoint with its configuration and schema.

    Args:
        place: Run folder or checkpoint folder.
        checkpoint: Step, "best" or "newest" of a run; default: the newest.
        changes: Overrides as in `evaluation_config`.
        allow_code: True if the configuration may name code (trust.py).
    """
    is_step = str(checkpoint).isdecimal()
    if not is_step and checkpoint not in (None, "newest", "best"):
        raise ConfigError(
            f"--checkpoint is '{checkpoint}'",
            where="--checkpoint",
            expected="a step such as 1200, best, or newest",
            do="or give the folder of a checkpoint in place of the run's",
        )
    folder, index = find_step(place, int(checkpoint)) if is_step else find(place)
    config, schema = evaluation_config(index["about"], folder, changes, allow_code=allow_code)
    if checkpoint == "best":
        by = Selection.of_config(config, schema).best(config.checkpoint.best_metric)
        folder, index = find_best(place, by)
        config, schema = evaluation_config(index["about"], folder, changes, allow_code=allow_code)
    return Checkpoint(config, schema, folder, index)
