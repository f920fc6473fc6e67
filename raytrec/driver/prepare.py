"""A run before it starts: its configuration resolved, its data opened, its folder made."""

from __future__ import annotations

import os
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from raytrec.checkpoint.files import find, steps
from raytrec.checkpoint.index import reason
from raytrec.common.errors import ConfigError, DataError, RunError
from raytrec.common.redaction import hidden_keys
from raytrec.common.storage import absolute, relative
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.config.sections import name_like
from raytrec.config.transforms import WITH_VOCABULARY
from raytrec.config.trust import mark
from raytrec.data.decode import SKIPPED, Faults
from raytrec.data.fragments import Dataset, list_files, scan
from raytrec.data.rows import check_accused
from raytrec.driver.recorder import RESULT, write_text
from raytrec.driver.resume import interrupted, resume_config
from raytrec.driver.towers import open_items
from raytrec.driver.warm_start import config_from, schema_at
from raytrec.tasks.columns import check_counts, check_reserved, read_plan
from raytrec.tasks.task import resolve_tasks


def resolve_run(
    source: Any,
    overrides: list[str],
    start_from: Any = None,
    resume: Any = None,
    resume_latest: bool = False,
    allow_code: bool = False,
) -> tuple[RunConfig, Path | None]:
    """The resolved config, and the folder of the run to resume, if it is not a new one."""
    if not resume:
        if source is None:
            config, named = config_from(start_from, overrides, allow_code=allow_code)
            return resolve(config, named), None
        overrides = [*overrides, f"warm_start.from={start_from}"] if start_from else overrides
        config = load_config(source, overrides, allow_code=allow_code)
        is_named = bool(config.run.name or config.run.dir)
        config = resolve(config, source)
        resume = interrupted(config, is_named) if resume_latest else None
        if not resume:
            return config, None
    config = resolve(resume_config(resume, source, overrides, allow_code), source)
    return config, Path(config.run.dir)


def resolve(config: RunConfig, source: object, kind: str = "run") -> RunConfig:
    """Names, folders and stores filled in; every path absolute, because workers run elsewhere."""
    config = config.model_copy(deep=True)
    run, data, tracking = config.run, config.data, config.tracking
    stem = Path(source).stem if isinstance(source, (str, Path)) else "run"
    stem += "" if kind == "run" else f"-{kind}"
    run.name = run.name or f"{name_like(stem)}-{datetime.now():%Y%m%d-%H%M%S}"
    place = partial(absolute, root=run.root)
    run.dir = run.dir or f"runs/{run.name}"
    if "://" in run.dir:
        raise ConfigError(
            f"run.dir is {run.dir}",
            where="run.dir",
            expected="a folder on a file system that all nodes share",
            do="use a local or mounted folder; object stores are not supported as run folders",
        )
    run.dir = place(run.dir)
    warm_start = config.warm_start
    warm_start.from_ = warm_start.from_ and find(place(warm_start.from_))[0]
    if config.checkpoint.dir:
        config.checkpoint.dir = place(config.checkpoint.dir)
    if config.plan.mmap_dir:
        config.plan.mmap_dir = place(config.plan.mmap_dir)
    for key in ("train", "valid", "test", "schema_path"):
        if value := getattr(data, key):
            setattr(data, key, place(value) if isinstance(value, str) else [*map(place, value)])
    for transform in data.transforms:
        if isinstance(transform, WITH_VOCABULARY) and transform.vocabulary:
            transform.vocabulary = place(transform.vocabulary)
    if config.eval.retrieval:
        config.eval.retrieval.items = place(config.eval.retrieval.items)
    server = os.environ.get("MLFLOW_TRACKING_URI")  # which a cluster's nodes can have
    tracking.uri = tracking.uri or server or f"sqlite:///{Path(run.dir).parent}/mlflow.db"
    return config


def check_nothing_hidden(config: RunConfig) -> None:
    """Whether passwords are there that a checkpoint, whose configuration this is, does not keep.

    Raises:
        ConfigError: with the keys that miss theirs.
    """
    if keys := hidden_keys(config.model_dump(by_alias=True, mode="json")):
        raise ConfigError(
            f"a password is missing in {', '.join(keys)}",
            where="the configuration, which comes from a checkpoint or from MLflow, where none are kept",
            do=f"say it again: {' '.join(f'{key}=…' for key in keys)}",
        )


def open_data(config: RunConfig) -> tuple[Schema, dict[str, Dataset]]:
    data = config.data
    list_files(data.train, "data.train")  # before the schema, which is looked for beside it
    schema = schema_at(data.schema_uri)
    datasets = {
        name: open_dataset(config, schema, places, f"data.{name}", to_train=name == "train")
        for name in ("train", "valid", "test")
        if (places := getattr(data, name))
    }
    datasets |= open_items(config, schema, datasets)
    for dataset in datasets.values():
        check_accused(dataset)
    _check_tasks_have_rows(datasets["train"])
    rows = datasets["train"].rows
    if config.data.drop_last and rows < config.data.global_batch_size:
        raise DataError(
            f"data.train has {rows:,} rows, fewer than one global batch, and data.drop_last leaves those out",
            where=f"{datasets['train'].uri}, data.global_batch_size={config.data.global_batch_size}",
            expected=f"at least {config.data.global_batch_size:,} rows, or data.drop_last=false",
            do=f"set data.drop_last=false, or lower data.global_batch_size to {rows} or less",
        )
    return schema, datasets


def open_dataset(
    config: RunConfig, schema: Schema, places: str | list[str], key: str, *, to_train: bool = False
) -> Dataset:
    """A dataset as a run reads it, by its footers alone.

    Args:
        key: of the configuration, which names it.
        to_train: of data.partitions, and without what only evaluations read.

    Raises:
        ConfigError: of tasks; a column that rows are grouped by is not reserved. DataError: files, columns or
            types that are not what the configuration says.
    """
    data, tasks = config.data, resolve_tasks(config.tasks, schema)
    check_reserved(tasks, config.eval.slices, data.reserve_columns)
    slices = [] if to_train else config.eval.slices
    retrieval = None if to_train else config.eval.retrieval
    dataset = scan(
        places,
        read_plan(tasks, schema, data.transforms, slices, retrieval),
        key,
        between=(data.partitions.from_, data.partitions.to) if to_train else (None, None),
        declared=data.reserve_columns,
        skip=data.on_error == "skip",
    )
    check_counts(tasks, dataset.form.types, dataset.uri)
    return dataset


def _check_tasks_have_rows(dataset: Dataset) -> None:
    """Looks whether some row counts in each task, as far as footers say.

    Raises:
        DataError: in one, none does.
    """
    for task, why in dataset.empty_tasks.items():
        raise DataError(
            f"task {task} has no rows: {why}",
            where=f"tasks, {dataset.uri}",
            expected="rows that it can learn from",
            do="correct the task's label, mask or sample_weight, or the data; or leave the task out",
        )


def note_constant_labels(config: RunConfig, schema: Schema, dataset: Dataset) -> list[str]:
    """A line for each task whose label has one value, and whose loss compares predictions with labels."""
    return [
        f"the label of task {task.name} is {dataset.constant_labels[task.label]:g} in every row of "
        f"data.train, from which {section.loss} learns nothing; in_batch_softmax and from_model can learn "
        "from positives alone"
        for section, task in zip(config.tasks, resolve_tasks(config.tasks, schema), strict=True)
        if task.label in dataset.constant_labels and not (task.loss.reads_vectors or task.loss.from_model)
    ]


def note_left_out(folder: Path, datasets: dict[str, Dataset]) -> list[str]:
    """Files that data.on_error=skip leaves out: into skipped.jsonl, and a line for each to warn with."""
    faults = Faults(skip=True, log=str(folder / SKIPPED))
    errors = [error for dataset in datasets.values() for error in dataset.left_out]
    for error in errors:
        faults.leave_out(error, rows=None)  # nobody knows how many
    return [f"skipped {error.where}: {error.what}" for error in errors]


def write_config(folder: Path, config: RunConfig) -> None:
    """Writes a run's config.yaml, and marks it as this user's (trust.py)."""
    write_text(folder / "config.yaml", config.to_yaml())
    mark(folder / "config.yaml")


def make_folder(folder: Path, config: RunConfig, schema: Schema) -> None:
    if (folder / RESULT).exists():
        raise RunError(
            "this run folder holds a finished run",
            where=str(folder),
            expected="a new folder",
            do="choose another run.dir or run.name, or remove the folder",
        )
    try:
        held = steps(config.checkpoint_root)
    except OSError as error:
        raise RunError(
            f"the place for checkpoints cannot be looked at: {reason(error)}",
            where=f"checkpoint.dir={config.checkpoint_root}",
            expected="storage that answers, and lets this user in",
        ) from None
    if held:
        raise RunError(
            f"there are checkpoints already, up to step {held[0]}",
            where=config.checkpoint_root,
            expected="a new folder",
            do=f"resume that run: raytrec train --resume {relative(folder)}; or choose another run.dir "
            "or checkpoint.dir",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "schema.yaml", schema.to_yaml())
        write_config(folder, config)  # last: a run that has a configuration can be resumed
    except OSError as error:
        raise RunError(f"cannot write the run folder: {error.strerror}", where=str(folder)) from None
