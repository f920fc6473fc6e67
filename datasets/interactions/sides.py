"""Features of users and items, from files or recipes.

    FILE.parquet, FILE.csv     a column of keys, named like the source's users or items, and a column for each
                               feature: whole numbers, text, or lists; other numbers are dense columns
    FILE.json                  {"key": [attribute, …], …}, S3-Rec's item2attributes.json: feature `attributes`

The ids of a feature are positions in its sorted values, from 1. Id 0 stands for an unknown value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
from raytrec_datasets.interactions.tables import check_columns, suffix_of

from raytrec.common.errors import ConfigError, DataError

ATTRIBUTES = "attributes"
RESERVED_COLUMN_NAMES = (
    "label",
    "user",
    "item",
    "history",
    "history_time",
    "later",
    "time",
    "item_count",
    "seen",
    "right_items",
    "item_key",
    "user_key",
)


@dataclass(frozen=True)
class Side:
    """Feature of users or items.

    Attributes:
        name: Name of the column.
        keys: Distinct keys of users or items.
        values: Value for each key: an id (0: unknown), a list of ids, or float32. Other values, such as
            titles, are written only to items/.
        rows: Number of rows of the feature's table; 0: the feature has no table.
    """

    name: str
    keys: pa.Array
    values: pa.Array
    rows: int = 0

    @property
    def is_bag(self) -> bool:
        """Return True if the values are lists."""
        return pa.types.is_list(self.values.type)

    def of(self, keys: pa.Array) -> pa.Array:
        """Return the value of each key; 0, an empty list or null for keys without a value.

        Raises:
            ConfigError: The feature's keys cannot be converted to the type of `keys`.
        """
        try:
            indices = pc.index_in(keys, value_set=self.keys.cast(keys.type))
        except pa.ArrowInvalid as error:
            raise ConfigError(
                f"the keys of the side feature {self.name} cannot be converted to the type in the source: {error}",
                where="--user-features, --item-features",
                expected=f"keys of type {keys.type}",
            ) from None
        values = self.values.take(indices)
        if self.is_bag:
            return pc.if_else(values.is_null(), pa.scalar([], values.type), values)
        return values.fill_null(0) if self.rows or pa.types.is_floating(values.type) else values


@dataclass(frozen=True)
class Sides:
    """Side features of users and of items; a feature's keys are those of the source."""

    user: list[Side] = field(default_factory=list)
    item: list[Side] = field(default_factory=list)

    @property
    def features(self) -> list[Side]:
        """Return the features that models train on."""
        return [side for side in (*self.user, *self.item) if side.rows or pa.types.is_floating(side.values.type)]


def read_sides(path: Path, key: str) -> list[Side]:
    """Read the features in a file.

    Args:
        path: Parquet, CSV or JSON file.
        key: Name of the column that contains users or items.

    Raises:
        ConfigError: The column is missing, or a feature has an unsupported name or type.
        DataError: The file cannot be read, a key is empty or occurs twice, or a float is missing or not finite.
    """
    table = _table(path, key)
    keys = table[key].combine_chunks()
    if pc.count_distinct(keys).as_py() != len(keys) or keys.null_count:
        raise DataError(f"a value of {key} is empty or duplicated", where=str(path), expected="unique keys")
    return [_side(name, keys, table[name].combine_chunks(), path) for name in table.column_names if name != key]


def _table(path: Path, key: str) -> pa.Table:
    try:
        if path.suffix.lower() == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            return pa.table({key: list(content), ATTRIBUTES: list(content.values())})
        table = pq.read_table(path) if suffix_of(path) == ".parquet" else csv.read_csv(path)
    except (OSError, ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        raise DataError(
            f"cannot read the file: {error}", where=str(path), expected="FILE.parquet, FILE.csv or FILE.json"
        ) from None
    check_columns([key], table.column_names, path)
    return table


def _side(name: str, keys: pa.Array, values: pa.Array, path: Path) -> Side:
    if name in RESERVED_COLUMN_NAMES:
        raise ConfigError(
            f"the side feature '{name}' has the name of a column that the recipe writes",
            where=str(path),
            expected=f"a name other than {', '.join(sorted(RESERVED_COLUMN_NAMES))}",
            do="rename the column",
        )
    if pa.types.is_floating(values.type):
        if not pc.all(pc.is_finite(values), skip_nulls=False, min_count=0).as_py():
            raise DataError(
                f"the side feature {name} has empty values, or values that are not finite",
                where=f"{path}, column {name}",
                expected="a finite number in each row",
                do="replace these values with numbers",
            )
        return Side(name, keys, values.cast(pa.float32()))
    inner = values.type.value_type if pa.types.is_list(values.type) else values.type
    if not (pa.types.is_integer(inner) or pa.types.is_string(inner) or pa.types.is_boolean(inner)):
        raise ConfigError(
            f"the side feature {name} has the unsupported type {values.type}",
            where=str(path),
            expected="whole numbers, text, booleans, lists of them, or floats",
        )
    return encode(name, keys, values)


def encode(name: str, keys: pa.Array, values: pa.Array) -> Side:
    """Return a feature with values, or lists of values, encoded as ids.

    Args:
        name: Name of the feature.
        keys: Distinct keys of users or items.
        values: Value, or list of values, for each key, of a type that Arrow can sort; nulls get id 0.
    """
    flat = values.flatten() if pa.types.is_list(values.type) else values
    vocabulary = pc.unique(flat.drop_null())
    vocabulary = vocabulary.take(pc.sort_indices(vocabulary))
    ids = pc.add(pc.index_in(flat, value_set=vocabulary).cast(pa.int64()), 1).fill_null(0)
    if pa.types.is_list(values.type):
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = pa.ListArray.from_arrays(pa.array(offsets), ids)
    return Side(name, keys, ids, len(vocabulary) + 1)
