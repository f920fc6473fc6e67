"""Data of which only the query's or the item's tower is read; items that rows are ranked among."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from raytrec.common.errors import ConfigError, DataError
from raytrec.config.evaluation import TowerName
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.transforms import columns_before, needed_transforms
from raytrec.data.arrow import is_text, one_array
from raytrec.data.columns import Place
from raytrec.data.decode import decode
from raytrec.data.fragments import Dataset, RowGroup, scan
from raytrec.data.hashing import NULL_KEY, keys_of
from raytrec.data.read_plan import ReadPlan, Reserved
from raytrec.data.transform import apply_transforms

ITEMS = "items"  # the name of their dataset among those of a run


def part_of_tower(config: RunConfig, schema: Schema, tower: TowerName, where: str) -> Schema:
    """The schema with the features of one tower alone.

    Args:
        where: what asks for it, for messages.

    Raises:
        ConfigError: the model gives no vectors of query and item.
    """
    if not config.model.retrieves:
        raise ConfigError(
            f"model.name={config.model.name} gives no vectors of query and item",
            where=where,
            expected="a model with a query and an item tower, such as two_tower (docs/retrieval.md)",
        )
    return schema.part(config.model.tower_members(schema)[tower])


def open_inputs(
    config: RunConfig,
    schema: Schema,
    places: str | list[str],
    key: str = "--data",
    reserve_columns: tuple[str, ...] = (),
    reserved_by: str = "--item",
) -> Dataset:
    """A dataset of which no labels are read; by its footers alone.

    Args:
        schema: the run's, or a tower of it.
        key: what named the places, for messages.
        reserve_columns: columns that go along.
        reserved_by: what named those.

    Raises:
        DataError: files, columns or types that are not what the schema says.
    """
    inputs = [name for name in schema.columns if name not in schema.labels]
    plan = ReadPlan(
        schema,
        needed_transforms(tuple(config.data.transforms), [*inputs, *reserve_columns]),
        reserved=Reserved(
            reserve_columns, groups=reserve_columns, named_by=dict.fromkeys(reserve_columns, reserved_by)
        ),
        read_labels=False,
    )
    return scan(places, plan, key, skip=config.data.on_error == "skip")


def open_items(config: RunConfig, schema: Schema, evaluated: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """The items of eval.retrieval, as a dataset of the run; nothing where it is not set.

    Args:
        evaluated: datasets of the run, whose rows name items.

    Raises:
        ConfigError, DataError: as in `part_of_tower`, `open_inputs` and `check_items`; or the rows name
            items in another type.
    """
    section = config.eval.retrieval
    if section is None:
        return {}
    key = "eval.retrieval.items"
    part = part_of_tower(config, schema, "item", "eval.retrieval")
    items = open_inputs(config, part, section.items, key, (section.item,), "eval.retrieval.item")
    check_items(items, section.item)
    kind = items.form.types[section.item]
    for dataset in evaluated.values():
        types = dataset.form.types
        for column in (section.item, *section.seen):
            other = types.get(column)
            other = other.value_type if column in dataset.form.plan.reserved.lists else other
            if other is not None and is_text(other) != is_text(kind) and not pa.types.is_null(other):
                raise DataError(
                    f"'{column}' holds {other}, and items are named by {kind}",
                    where=f"{dataset.uri}, {key}={section.items}",
                    expected="items named alike everywhere",
                    do="name another column in eval.retrieval, or use data.transforms: {do: cast, …}",
                )
    return {ITEMS: items}


def check_items(items: Dataset, column: str) -> None:
    """Reads the items' keys: each item has one, and no two the same.

    Raises:
        DataError: names the file, row group and row of one that has none, or the same as one before it.
    """
    if column in items.form.from_folders:
        raise DataError(
            f"the items' key '{column}' is no column of theirs, but in the names of their folders",
            where=items.uri,
            expected="a column with a key of its own for each item",
        )
    keys = np.concatenate([_keys(items, group, column) for group in items.groups])
    if len(missing := np.flatnonzero(keys == NULL_KEY)):
        raise DataError(
            "an item has no key", where=_place(items, column, int(missing[0])), expected="a value"
        )
    order = np.argsort(keys, kind="stable")
    if len(twice := order[1:][keys[order[1:]] == keys[order[:-1]]]):
        raise DataError(
            f"{len(twice):,} items have the key of an item before them",
            where=_place(items, column, int(twice.min())),
            expected="one row for each item",
            do="leave the others out, or name another column",
        )


def _keys(items: Dataset, group: RowGroup, column: str) -> np.ndarray:
    transforms = needed_transforms(items.form.plan.transforms, [column])
    table = decode(group.path, group.index, 0, group.rows, columns_before(transforms, [column]))
    table = apply_transforms(
        table, transforms, f"{group.path}, row group {group.index}", items.form.plan.folder
    )
    return keys_of(one_array(table[column]))


def _place(items: Dataset, column: str, row: int) -> str:
    """Where a row of the dataset is, in words."""
    for group in items.groups:
        if row < group.rows:
            break
        row -= group.rows
    return Place(group.path, group.index, 0).of(column, row)
