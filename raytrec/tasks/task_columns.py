"""Columns that tasks and evaluations read in addition to features, and log-odds of the labels.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import log

import numpy as np
import pyarrow as pa

from raytrec.common.errors import ConfigError, DataError, format_suggestion
from raytrec.config.features import select_needed_transforms
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, advise_transform
from raytrec.config.tasks import RetrievalSection
from raytrec.config.transforms import Transform
from raytrec.data.fragments import Dataset
from raytrec.data.item_reader import read_in_batches
from raytrec.data.pages.decode import ReadErrorPolicy
from raytrec.data.read_plans import ReadPlan, ReservedColumnSet, TaskRows
from raytrec.tasks.task import Task, key_columns, resolve_tasks

MAX_LABELS_READ = 1_000_000  # approximate number of rows whose labels are read, from row groups across all files


def build_read_plan(
    tasks: Sequence[Task],
    schema: Schema,
    transforms: Sequence[Transform] = (),
    slices: Sequence[str] = (),
    retrieval: RetrievalSection | None = None,
) -> ReadPlan:
    """Return the read plan for a dataset, with the columns that tasks and evaluations read.

    Args:
        tasks: Tasks of the run.
        schema: Schema of the run.
        transforms: data.transforms.
        slices: Columns whose values divide the rows of an evaluation into slices (eval.slices).
        retrieval: Section eval.retrieval, for a dataset whose rows contain right items; None: no items are ranked.
    """
    right, seen = ((retrieval.right_column,), tuple(retrieval.seen)) if retrieval else ((), ())
    right_key = "right_items" if retrieval and retrieval.right_items else "item"
    keys = key_columns(tasks, slices)
    return ReadPlan(
        schema,
        tuple(transforms),
        task_rows(tasks),
        ReservedColumnSet(
            columns=tuple(dict.fromkeys([*slices, *right, *seen])),
            keys=keys,
            groups=tuple(dict.fromkeys([*key_columns(tasks), *right, *seen])),
            lists=seen,
            optional_lists=tuple(column for column in right if column not in keys),
            named_by=dict.fromkeys(right, f"eval.retrieval.{right_key}") | dict.fromkeys(seen, "eval.retrieval.seen"),
        ),
        label_ranges(tasks, schema),
        whole_labels(tasks),
    )


def task_rows(tasks: Sequence[Task]) -> tuple[TaskRows, ...]:
    """Return the row rules of each task without the loss, so that processes that read data need not import losses."""
    names = [field.name for field in fields(TaskRows)]
    return tuple(TaskRows(**{name: getattr(task, name) for name in names}) for task in tasks)


def whole_labels(tasks: Sequence[Task]) -> frozenset[str]:
    """Return the labels that must be whole numbers, because the loss of a task requires this."""
    return frozenset(task.label for task in tasks if task.loss.whole_labels)


def label_ranges(tasks: Sequence[Task], schema: Schema) -> dict[str, tuple[float, float] | None]:
    """Return schema label → (smallest, largest) value that all tasks with this label allow; None: any finite number."""
    ranges: dict[str, tuple[float, float] | None] = dict.fromkeys(schema.labels)
    for task in tasks:
        common, allowed = ranges[task.label], task.loss.label_range
        if common and allowed:
            allowed = max(common[0], allowed[0]), min(common[1], allowed[1])
        ranges[task.label] = allowed or common
    return ranges


def check_group_columns(tasks: Sequence[Task], slices: Sequence[str], reserved: Sequence[str]) -> None:
    """Check that the columns that tasks and slices name are in data.reserve_columns.

    Raises:
        ConfigError: A column is not in data.reserve_columns.
    """
    keys = ("group", "item", "item_frequency")
    references = [(f"tasks[{i}].{key}", getattr(task, key)) for key in keys for i, task in enumerate(tasks)]
    references += [("eval.slices", column) for column in slices]
    listed = f": {', '.join(reserved)}" if reserved else ""
    for key, column in references:
        if column is not None and column not in reserved:
            suggestion = format_suggestion(column, reserved)
            raise ConfigError(
                f"column '{column}' is not in data.reserve_columns{suggestion}",
                where=key,
                expected=f"a column of data.reserve_columns{listed}",
                do=("correct the name, or " if suggestion else "")
                + f"set data.reserve_columns=[{', '.join(dict.fromkeys([*reserved, column]))}]",
            )


def check_frequency_columns(tasks: Sequence[Task], types: Mapping[str, pa.DataType], uri: str) -> None:
    """Check that the columns named by tasks.item_frequency have integer types.

    Args:
        tasks: Tasks of the run.
        types: Types of the reserved columns, common to all files of a dataset.
        uri: Path or URI of the dataset, for messages.

    Raises:
        DataError: A column has another type.
    """
    for column in (task.item_frequency for task in tasks if task.item_frequency is not None):
        if not pa.types.is_integer(types.get(column, pa.int64())):
            raise DataError(
                f"column '{column}', which tasks.item_frequency names, has type {types[column]}",
                where=f"{uri}, column {column}",
                expected="an integer type, because the values are numbers of occurrences",
                do=f"{advise_transform('cast', column, to='int64')}; or use another column",
            )


def explain_ignored_log_odds(config: RunConfig, schema: Schema) -> str | None:
    """Return why the tasks or the data rule out train.initial_bias=log_odds, as a clause for a warning, or None.

    Raises:
        ConfigError: See `resolve_tasks`.
    """
    tasks = resolve_tasks(config.tasks, schema)
    if schema.candidates:
        return "the rows are requests with candidates"
    if any(task.loss.reads_vectors for task in tasks):
        return "the model returns vectors of queries and items instead of logits"
    if not any(task.loss.log_odds for task in tasks):
        losses = list(dict.fromkeys(task.loss for task in config.tasks))
        return f"the logits of the loss{'es' * (len(losses) > 1)} {', '.join(losses)} are not log-odds"
    return None


def log_odds(config: RunConfig, schema: Schema, dataset: Dataset) -> tuple[float, ...]:
    """Return the log-odds of label 1 in the data for each column of logits, the model's initial biases (worker.build).

    The value is 0 for tasks whose logits are not log-odds, and for tasks with only positives or only negatives.
    Rows are weighted as in the tasks' losses, by mask, sample weight and positive_weight. Only columns with labels,
    masks and weights are read, from about MAX_LABELS_READ rows.

    Returns:
        One number per column of logits, or () if `explain_ignored_log_odds` returns a reason.

    Raises:
        ConfigError: See `resolve_tasks`.
        DataError: A label, mask or weight cannot be read (data.on_error: fail).
    """
    if explain_ignored_log_odds(config, schema):
        return ()
    tasks = resolve_tasks(config.tasks, schema)
    plan = dataset.form.plan
    names = [*schema.labels, *(column.column for column in plan.task_columns)]
    transforms = select_needed_transforms(plan.transforms, names)
    plan = replace(plan, schema=schema.select_features(()), transforms=transforms, reserved=ReservedColumnSet())
    form = replace(dataset.form, plan=plan)
    sums = np.zeros((2, len(tasks)))  # sum of the weights of negatives, and of positives
    for group in dataset.groups[:: -(-dataset.rows // MAX_LABELS_READ)]:
        for table in read_in_batches(group, form, ReadErrorPolicy(config.data.on_error == "skip")):
            labels = _matrix(table, "labels")
            weights = _matrix(table, "task_weights") if plan.has_task_weights else np.ones((len(table), len(tasks)))
            if "present" in table.column_names:
                weights = weights * table["present"].to_numpy()[:, None]
            for place, task in enumerate(tasks):
                of_task = labels[:, task.column]
                positive = weights[:, place] * of_task * task.positive_weight
                sums[:, place] += np.sum(weights[:, place] * (1 - of_task)), np.sum(positive)
    return tuple(
        log(positive / negative) if task.loss.log_odds and positive > 0 and negative > 0 else 0.0
        for task, negative, positive in zip(tasks, *sums, strict=True)
        for _ in range(task.outputs)
    )


def _matrix(table: pa.Table, name: str) -> np.ndarray:
    """Return a column of equally long lists as float64 [rows, length]."""
    return table[name].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1).astype(np.float64)
