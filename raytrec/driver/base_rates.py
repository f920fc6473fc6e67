"""The share of positives in the training data, before a run starts."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pyarrow as pa

from raytrec.config.features import needed_transforms
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.form import Reserved
from raytrec.data.fragments import Dataset
from raytrec.data.order import Item, Part
from raytrec.data.pages.decode import Faults
from raytrec.data.rows import CHECKED_ROWS, read_item
from raytrec.tasks.task import resolve_tasks

MOST_LABELS = 1_000_000  # whose labels are read, in row groups spread over the files


def log_odds(config: RunConfig, schema: Schema, dataset: Dataset) -> tuple[float, ...]:
    """Return the log-odds of the label 1 for each column of logits; 0 for tasks of other predictions.

    Rows count as in the tasks' losses: by mask, sample weight and positive_weight. Only the columns of
    labels, masks and weights are read.

    Returns:
        One number for each column; empty if a task has vectors, or rows are requests with candidates.

    Raises:
        DataError: A label, mask or weight cannot be read (data.on_error: fail).
    """
    tasks = resolve_tasks(config.tasks, schema)
    if schema.candidates or any(task.loss.reads_vectors for task in tasks):
        return ()
    plan = dataset.form.plan
    names = [*schema.labels, *(column.column for column in plan.columns_of_tasks)]
    transforms = needed_transforms(plan.transforms, names)
    plan = replace(plan, schema=schema.part(()), transforms=transforms, reserved=Reserved())
    form = replace(dataset.form, plan=plan)
    sums = np.zeros((2, len(tasks)))  # of weights where the label is 0 and 1
    for group in dataset.groups[:: -(-dataset.rows // MOST_LABELS)]:
        for first in range(0, group.rows, CHECKED_ROWS):
            rows = min(CHECKED_ROWS, group.rows - first)
            part = Part(group.path, group.index, first, rows, split=group.split)
            table = read_item(Item(0, 0, (part,), None), form, Faults(config.data.on_error == "skip"))
            labels = _matrix(table, "labels")
            weights = _matrix(table, "task_weights") if plan.weighs_tasks else np.ones((rows, len(tasks)))
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
    """Return a column of lists of one length as float64 [rows, length]."""
    return table[name].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1).astype(np.float64)
