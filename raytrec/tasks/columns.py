"""What tasks and evaluations read of a row beside its features. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from raytrec.common.errors import ConfigError, DataError, did_you_mean
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
        "reserve_columns": tuple(slices),
    }


def check_reserved(tasks: Sequence[Task], slices: Sequence[str], reserved: Sequence[str]) -> None:
    """Looks whether the columns that rows are grouped by are reserved.

    Raises:
        ConfigError: one is not in data.reserve_columns.
    """
    named = [(f"tasks[{i}].group", task.group) for i, task in enumerate(tasks)]
    named += [(f"tasks[{i}].item", task.item) for i, task in enumerate(tasks)]
    named += [(f"tasks[{i}].item_frequency", task.item_frequency) for i, task in enumerate(tasks)]
    named += [("eval.slices", column) for column in slices]
    for key, column in named:
        if column is not None and column not in reserved:
            near = did_you_mean(column, list(reserved))
            raise ConfigError(
                f"column '{column}' is not reserved" + (f"; did you mean '{near}'?" if near else ""),
                where=key,
                expected=f"one of data.reserve_columns: {', '.join(reserved)}"
                if reserved
                else "a column of data.reserve_columns",
                do=f"add it: data.reserve_columns=[{', '.join(dict.fromkeys([*reserved, column]))}]",
            )


def check_counts(tasks: Sequence[Task], types: Mapping[str, pa.DataType], uri: str) -> None:
    """Looks whether the columns that say how often items occur hold whole numbers.

    Args:
        types: of reserved columns, in all files of a dataset together.

    Raises:
        DataError: one does not.
    """
    for column in (task.item_frequency for task in tasks if task.item_frequency is not None):
        if not pa.types.is_integer(types.get(column, pa.int64())):
            raise DataError(
                f"'{column}', which says how often items occur, is of type {types[column]}",
                where=f"{uri}, column {column}",
                expected="whole numbers",
                do=f"data.transforms: {{do: cast, columns: [{column}], to: int64}}, or name another column",
            )
