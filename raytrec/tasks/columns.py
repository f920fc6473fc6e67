"""What tasks and evaluations read in addition to features.

No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import pyarrow as pa

from raytrec.common.errors import ConfigError, DataError, hint
from raytrec.config.schema import Schema
from raytrec.config.tasks import RetrievalSection
from raytrec.config.transforms import Transform
from raytrec.data.form import ReadPlan, Reserved, TaskRows
from raytrec.tasks.task import Task, key_columns


def read_plan(
    tasks: Sequence[Task],
    schema: Schema,
    transforms: Sequence[Transform] = (),
    slices: Sequence[str] = (),
    retrieval: RetrievalSection | None = None,
) -> ReadPlan:
    """Return the columns that tasks and evaluations read of a dataset's rows.

    Args:
        tasks: Tasks of the run.
        schema: Schema of the run.
        transforms: data.transforms.
        slices: Columns by whose values an evaluation is split.
        retrieval: eval.retrieval of a dataset whose rows' items are ranked among all items.
    """
    ranked = (retrieval.right_column, *retrieval.seen) if retrieval else ()
    key = "right_items" if retrieval and retrieval.right_items else "item"
    named_by = {retrieval.right_column: f"eval.retrieval.{key}"} if retrieval else {}
    seen, keys = tuple(retrieval.seen) if retrieval else (), key_columns(tasks, slices)
    return ReadPlan(
        schema,
        tuple(transforms),
        task_rows(tasks),
        Reserved(
            columns=tuple(dict.fromkeys([*slices, *ranked])),
            keys=keys,
            groups=tuple(dict.fromkeys([*key_columns(tasks), *ranked])),
            lists=seen,
            or_lists=(retrieval.right_column,) if retrieval and retrieval.right_column not in keys else (),
            named_by=named_by | dict.fromkeys(seen, "eval.retrieval.seen"),
        ),
        label_ranges(tasks, schema),
        whole_labels(tasks),
    )


def task_rows(tasks: Sequence[Task]) -> tuple[TaskRows, ...]:
    """Return which rows count in each task, without the losses, whose modules readers need not import."""
    names = [each.name for each in fields(TaskRows)]
    return tuple(TaskRows(**{name: getattr(task, name) for name in names}) for task in tasks)


def whole_labels(tasks: Sequence[Task]) -> frozenset[str]:
    """The labels that have to be whole numbers."""
    return frozenset(task.label for task in tasks if task.loss.whole_labels)


def label_ranges(tasks: Sequence[Task], schema: Schema) -> dict[str, tuple[float, float] | None]:
    """Label → the least and greatest value that all of its tasks take; None: any finite number."""
    ranges: dict[str, tuple[float, float] | None] = dict.fromkeys(schema.labels)
    for task in tasks:
        before, mine = ranges[task.label], task.loss.label_range
        if before and mine:
            mine = max(before[0], mine[0]), min(before[1], mine[1])
        ranges[task.label] = mine or before
    return ranges


def check_reserved(tasks: Sequence[Task], slices: Sequence[str], reserved: Sequence[str]) -> None:
    """Looks whether the columns that rows are grouped by are reserved.

    Raises:
        ConfigError: one is not in data.reserve_columns.
    """
    keys = ("group", "item", "item_frequency")
    named = [(f"tasks[{i}].{key}", getattr(task, key)) for key in keys for i, task in enumerate(tasks)]
    named += [("eval.slices", column) for column in slices]
    for key, column in named:
        if column is not None and column not in reserved:
            raise ConfigError(
                f"column '{column}' is not reserved" + hint(column, list(reserved)),
                where=key,
                expected=f"one of data.reserve_columns: {', '.join(reserved)}"
                if reserved
                else "a column of data.reserve_columns",
                do=f"add it: data.reserve_columns=[{', '.join(dict.fromkeys([*reserved, column]))}]",
            )


def check_counts(tasks: Sequence[Task], types: Mapping[str, pa.DataType], uri: str) -> None:
    """Checks that the columns of item frequencies hold whole numbers.

    Args:
        types: of reserved columns, in all files of a dataset together.

    Raises:
        DataError: one does not.
    """
    for column in (task.item_frequency for task in tasks if task.item_frequency is not None):
        if not pa.types.is_integer(types.get(column, pa.int64())):
            raise DataError(
                f"'{column}', the frequency of items, is of type {types[column]}",
                where=f"{uri}, column {column}",
                expected="whole numbers",
                do=f"data.transforms: {{do: cast, columns: [{column}], to: int64}}, or name another column",
            )
