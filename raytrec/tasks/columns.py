"""What tasks and evaluations read of a row beside its features. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytrec.common.errors import ConfigError, did_you_mean
from raytrec.config.schema import Schema
from raytrec.tasks.task import Task, key_columns, label_ranges, task_rows, whole_labels


def columns_to_read(tasks: Sequence[Task], schema: Schema, slices: Sequence[str] = ()) -> dict[str, Any]:
    """Labels, masks, weights and keys of a dataset: arguments of data.fragments.scan.

    Args:
        slices: columns whose values an evaluation tells apart, and calls by their text.
    """
    return {
        "label_ranges": label_ranges(tasks, schema),
        "whole_labels": whole_labels(tasks),
        "tasks": task_rows(tasks),
        "key_columns": key_columns(tasks, slices),
        "groups": key_columns(tasks),
        "carry": tuple(slices),
    }


def check_carried(tasks: Sequence[Task], slices: Sequence[str], carried: Sequence[str]) -> None:
    """Looks whether the columns that rows are grouped by are carried.

    Raises:
        ConfigError: one is not in data.carry.
    """
    named = [(f"tasks[{i}].group", task.group) for i, task in enumerate(tasks)]
    named += [(f"tasks[{i}].item", task.item) for i, task in enumerate(tasks)]
    named += [(f"tasks[{i}].item_count", task.item_count) for i, task in enumerate(tasks)]
    named += [("eval.slices", column) for column in slices]
    for key, column in named:
        if column is not None and column not in carried:
            near = did_you_mean(column, list(carried))
            raise ConfigError(
                f"column '{column}' is not carried" + (f"; did you mean '{near}'?" if near else ""),
                where=key,
                expected=f"one of data.carry: {', '.join(carried)}" if carried else "a column of data.carry",
                do=f"add it: data.carry=[{', '.join(dict.fromkeys([*carried, column]))}]",
            )
