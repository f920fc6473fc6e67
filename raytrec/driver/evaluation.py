"""Evaluating what a run has saved: with which configuration; and how to, when its own evaluation failed."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from raytrec.checkpoint.files import folder_of, newest
from raytrec.checkpoint.table_starts import schema_of
from raytrec.common.errors import ConfigError, DataError, RaytrecError
from raytrec.common.leftovers import owner, remove_leftovers
from raytrec.common.storage import relative
from raytrec.config.overrides import section_of
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.config.trust import checkpoint_origin, code_in

# What plays a part in an evaluation, and is not the model.
SECTIONS = ("data", "scaling", "plan", "train", "eval")
RULE = "out_of_range"
SCRATCH, TRACEBACK = "raytrec-evaluate-", "error.txt"


def evaluation_config(
    about: dict[str, Any], folder: str, overrides: list[str], *, allow_code: bool
) -> tuple[RunConfig, Schema]:
    """The configuration and the schema of an evaluation: the checkpoint's, with changes.

    Args:
        about: what the checkpoint says of itself.
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
        if section_of(override) not in SECTIONS:
            raise ConfigError(
                f"'{override}' has no part in an evaluation",
                where="command line, --set",
                expected=f"a key of {', '.join(SECTIONS)}, or tables.NAME.{RULE}: the model is fixed",
            )
    elsewhere = checkpoint_origin(folder, about["config"])
    config = load_config(about["config"], others, elsewhere=elsewhere, allow_code=allow_code, stored=True)
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
    """A folder for what an evaluation writes: a run or a checkpoint that is evaluated may be somebody else's.

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
        folder, _, _ = newest(config.checkpoint_root)
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
