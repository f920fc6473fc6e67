"""Driver side of `raytrec predict`, which scores all rows in a folder of Parquet files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa

from raytrec.common.errors import DataError, RunError
from raytrec.common.formatting import format_count
from raytrec.common.storage import extract_path, make_absolute
from raytrec.config.features import set_draw_rows
from raytrec.config.overrides import Overrides, to_override_texts
from raytrec.config.run_config import RunConfig
from raytrec.config.tasks import TowerName
from raytrec.config.transforms import Transform
from raytrec.data.files.file_identity import fingerprint, identify_files
from raytrec.data.files.footers import read_footer
from raytrec.data.files.partitions import infer_folder_type, parse_folder_values
from raytrec.data.fragments import Dataset
from raytrec.data.item_reader import check_suspect_groups
from raytrec.driver.console import Pairs, Result, RunConsole
from raytrec.driver.datasets import open_inputs, select_tower_schema, show_file_counts, to_example_schema
from raytrec.driver.evaluation import Checkpoint, resolve_checkpoint
from raytrec.driver.launch import open_session, run_group
from raytrec.driver.prepare import create_scratch_folder
from raytrec.driver.recorder import Watch
from raytrec.prediction.folder import (
    PARTS_FOLDER,
    VECTOR,
    Counts,
    Manifest,
    PredictionFolder,
    PredictionTask,
    check_output_folder,
    claim_prediction_folder,
)
from raytrec.prediction.inputs import MIN_SPAN_ROWS, CarriedColumns, choose_columns
from raytrec.prediction.worker import predict_worker, write_empty
from raytrec.tasks.task import Task, resolve_tasks
from raytrec.worker.context import WorkerTask


@dataclass(frozen=True)
class Predictions(Result):
    """Result of `predict`.

    Attributes:
        metrics: Metrics of the complete folder: predict.rows, predict.files, predict.skipped_rows,
            predict.skipped_files, predict.ids (number of all ids; 0 if no table clamps or hashes ids into range),
            predict.changed_ids (number of clamped or hashed ids) and changed (feature → number of clamped or
            hashed ids, if any). Metrics of this call: predict.rows_per_s (None if no rows were left to predict),
            world_size (0 if all files were complete) and seconds. Also name, and checkpoint (path or URI).
        columns: Columns of the output files, in order.
    """

    columns: list[str] = field(default_factory=list)


def predict(
    place: str | Path,
    data: str,
    out: str,
    *,
    columns: Sequence[str] | None = None,
    vectors: TowerName | None = None,
    workers: int | None = None,
    checkpoint: str | int | None = None,
    overrides: Overrides | None = None,
    allow_code: bool = False,
) -> Predictions:
    """Predict all rows of a Parquet folder, and write one output file with the same name per input file.

    The order of rows is kept. If a call is interrupted, the next call keeps complete files and predicts the rest. With
    data.on_error=skip, unreadable files get no output file, and unreadable rows get null scores.

    Args:
        place: Run folder or checkpoint folder; nothing is written there.
        data: Parquet folder or file; local, s3:// or gs://. No labels are needed.
        out: Output folder; local, s3:// or gs://. All nodes must be able to access it.
        columns: Input columns to carry over to the output; [] for none; default: the run's data.reserve_columns.
        vectors: Tower whose vectors are written instead of scores, "query" or "item". The input then needs only
            the columns of this tower's features.
        workers: Number of workers; default: the run's scaling.num_workers.
        checkpoint: Step of the run's checkpoint, or "best" (by checkpoint.best_metric); default: the newest.
        overrides: `section.key=value` strings, or a mapping, for the sections data, scaling, plan and train, such as
            data.on_error=skip, or tables.NAME.out_of_range=RULE.
        allow_code: True to import code (module:name) that a run's configuration written by another user names.

    Returns:
        Predictions: Metrics of the output folder and of this call, and the columns of the output files.

    Raises:
        RunError: There is no checkpoint, `out` cannot be read or written or is in use by another process, Ray cannot
            be started or joined, or workers failed more often than scaling.max_failures or in a way that would recur.
        CheckpointError: The checkpoint is damaged.
        ConfigError, SchemaError: `out` is inside `data` or contains other files or predictions, a setting is invalid,
            the configuration names code that is not allowed or does not fit the cluster, or `vectors` is set but the
            model does not compute query and item vectors.
        DataError: The input is missing or damaged, does not match the schema or lacks one of `columns`, or a path is
            not valid.
        Interrupted: Ctrl-C or SIGTERM ended the workers.

    Example:
        >>> raytrec.predict("runs/films", "films/test", "scores", columns=["user_id"]).columns
        ['user_id', 'score']
    """
    began, out, data = perf_counter(), make_absolute(str(out)), make_absolute(str(data))
    changes = [f"scaling.num_workers={workers}"] if workers else []
    changes += to_override_texts(overrides)
    saved = resolve_checkpoint(place, checkpoint, changes, allow_code)
    saved = replace(saved, schema=to_example_schema(saved.config, saved.schema, data))
    config, schema = saved.config, saved.schema
    tasks = resolve_tasks(config.tasks, schema)
    scores, below = [VECTOR] if vectors else list_score_columns(tasks), check_output_folder(out, data)
    chosen = choose_columns(columns, config.data.reserve_columns, scores)
    dataset, files = _open_input(data, saved, vectors)
    carried = _make_carried_columns(chosen, set_draw_rows(config.data.transforms, schema), files)
    manifest = Manifest(
        run=config.run.name,
        checkpoint=saved.folder,
        checkpoint_id=saved.index["sha256"],
        scores=scores,
        columns=chosen,
        data=data,
        input=_hash_input(dataset, files, below, config),
        rules={name: table.out_of_range for name, table in schema.tables.items()},
        vectors=vectors,
    )
    share = -(-config.data.global_batch_size // config.scaling.max_workers)  # does not depend on the number of ranks
    batch_rows = max(1, min(share, max(files.values())))
    task = PredictionTask(out, below, files, carried, manifest, batch_rows, MIN_SPAN_ROWS)
    target = PredictionFolder(out)
    with target.hold():
        figures = _predict_missing(target, claim_prediction_folder(target, manifest), task, saved, dataset, tasks)
        metrics = _compute_figures(target, task, dataset) | figures
        target.remove(PARTS_FOLDER)
    metrics |= {
        "seconds": round(perf_counter() - began, 3),
        "name": f"{config.run.name} on {data}",
        "checkpoint": saved.folder,
    }
    names = [*chosen, *scores]
    next_steps = [f"predictions  {out}", f"columns      {', '.join(names)}"]
    return Predictions(metrics, out, next_steps, _pairs(metrics), names)


def _pairs(metrics: dict[str, Any]) -> Pairs:
    speed = metrics["predict.rows_per_s"]
    pairs = [
        ("rows", f"{metrics['predict.rows']:,}"),
        ("files", f"{metrics['predict.files']:,}"),
        ("rows per second", f"{speed:,.0f}" if speed else "all rows were already predicted"),
        ("seconds", f"{metrics['seconds']:,.1f}"),
    ]
    if ids := metrics["predict.ids"]:
        pairs.append(("ids clamped or hashed", f"{metrics['predict.changed_ids']:,} of {ids:,}"))
    for key in ("skipped_rows", "skipped_files"):
        if count := metrics[f"predict.{key}"]:
            pairs.append((key.replace("_", " "), f"{count:,}"))
    return pairs


def list_score_columns(tasks: Sequence[Task]) -> list[str]:
    """Return the names of the score columns: `score`, or `score_TASK` for each of several tasks."""
    return ["score"] if len(tasks) == 1 else [f"score_{task.name}" for task in tasks]


def list_score_types(tasks: Sequence[Task]) -> list[pa.DataType]:
    """Return the types of the score columns: float, or list<float> for a task with classes."""
    return [pa.float32() if task.outputs == 1 else pa.list_(pa.float32()) for task in tasks]


def _open_input(data: str, saved: Checkpoint, tower: TowerName | None) -> tuple[Dataset, dict[str, int]]:
    """Return the dataset without labels, and path of each readable file → number of rows, including empty files."""
    part = select_tower_schema(saved.config, saved.schema, tower, "--vectors") if tower else saved.schema
    dataset = open_inputs(saved.config, part, data, trained=saved.text_ids)
    check_suspect_groups(dataset)
    rows: dict[str, int] = {}
    for group in dataset.groups:
        rows[group.path] = rows.get(group.path, 0) + group.rows
    broken = {error.where for error in dataset.left_out}
    files = [path for path in dataset.listing.files if path in rows or not _is_broken(path, broken)]
    return dataset, {path: rows.get(path, 0) for path in files}


def _is_broken(path: str, places: set[str]) -> bool:
    """Return True if a file without rows in the dataset is unreadable or was skipped; False if it is empty.

    `places` contains the `where` of the errors of skipped files.
    """
    if any(where.startswith(path) for where in places):
        return True
    try:
        return read_footer(path).num_rows > 0
    except DataError:
        return True


def _make_carried_columns(names: list[str], transforms: tuple[Transform, ...], files: dict[str, int]) -> CarriedColumns:
    """Return the carried columns, after checking that they exist for every file.

    Raises:
        DataError: As for `CarriedColumns.schema`.
    """
    folder_values = [parse_folder_values(path) for path in files]
    keys = set.intersection(*map(set, folder_values)) if folder_values else set()
    folders = {key: infer_folder_type(values[key] for values in folder_values) for key in keys}
    carried = CarriedColumns(tuple(names), transforms, folders, os.getcwd())
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(carried.schema, files):
            pass
    return carried


def _hash_input(dataset: Dataset, files: dict[str, int], below: str, config: RunConfig) -> str:
    """Return a hash of the names and contents of the input files and of the transforms."""
    names = sorted(f"{extract_path(path).removeprefix(below)} {rows}" for path, rows in files.items())
    transforms = [str(transform.model_dump(mode="json")) for transform in config.data.transforms]
    return hashlib.sha256("\n".join([fingerprint(identify_files(dataset)), *transforms, *names]).encode()).hexdigest()


def _predict_missing(
    target: PredictionFolder,
    names: set[str],
    task: PredictionTask,
    saved: Checkpoint,
    dataset: Dataset,
    tasks: Sequence[Task],
) -> dict[str, Any]:
    """Predict the files that are not complete yet. Return predict.rows_per_s and world_size of this call.

    `names` contains the paths of existing files in the folder. run.dir of the configuration in `saved` is changed.
    """
    config, complete = saved.config, target.find_finished(task, names)
    kinds = [pa.list_(pa.float32())] if task.manifest.vectors else list_score_types(tasks)
    for path, rows in task.files.items():
        if not rows and path not in complete:
            write_empty(task, path, kinds)
    if all(path in complete or not rows for path, rows in task.files.items()):
        return {"predict.rows_per_s": None, "world_size": 0}
    with create_scratch_folder() as config.run.dir, RunConsole(config.run.name) as console, open_session(config):
        show_file_counts(console, {"data": dataset})
        for error in dataset.left_out:
            console.warn(f"skipped a file, which gets no predictions: {error.what} ({error.where})")
        if complete:
            console.note(f"already complete: {len(complete):,} of {len(task.files):,} files")
        of_ranks = WorkerTask(config, saved.schema, {"predict": dataset}, None, saved.folder)
        result = run_group(partial(predict_worker, task), of_ranks, Watch(console), restarts=True)
    speed = result["predicted"] / result["predict_s"] if result["predict_s"] else None
    return {"predict.rows_per_s": speed and round(speed, 1), "world_size": result["world_size"]}


def _compute_figures(target: PredictionFolder, task: PredictionTask, dataset: Dataset) -> dict[str, Any]:
    """Return the metrics of the complete folder, as described in Predictions.

    Raises:
        RunError: A file is missing or damaged although all workers have succeeded.
    """
    complete, counts = target.find_finished(task, target.list_names()), Counts()
    if missing := [path for path in task.files if path not in complete]:
        others = f" and {format_count(len(missing) - 1, 'other input file')}" if len(missing) > 1 else ""
        raise RunError(
            f"the predictions of {missing[0]}{others} are missing or damaged, although all workers have succeeded",
            where=target.uri,
            expected="a folder that all nodes share and only raytrec writes to",
            do="repeat the command; complete files are kept",
        )
    for file_counts in complete.values():
        counts += file_counts
    return {
        "predict.rows": counts.rows,
        "predict.files": len(complete),
        "predict.skipped_rows": counts.skipped,
        "predict.skipped_files": len(dataset.left_out),
        "predict.ids": sum(ids for _, ids in counts.changed.values()),
        "predict.changed_ids": sum(changed for changed, _ in counts.changed.values()),
        "changed": {feature: changed for feature, (changed, _) in counts.changed.items() if changed},
    }
