"""What becomes of a checkpoint's tables that change their kind or their size: `raytrec convert`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raytrec.checkpoint.managed import ids_of
from raytrec.common.errors import SchemaError
from raytrec.config.managed import ManagedIds
from raytrec.config.schema import Table
from raytrec.data.hashing import hash_bits


@dataclass(frozen=True)
class TableChange:
    """A table as it becomes.

    Attributes:
        table: its new settings.
        told: a line about it.
        source: int64 [table.rows], of each row the one of the checkpoint that it has been; -1: it begins with
            its initial values, and without optimizer state. None: all rows stay as they are.
        ids: of a table with managed ids, what is saved of them: name after ids/TABLE/ → int64 [n].
        about: of the same table, what the index says of them.
    """

    table: Table
    told: str
    source: np.ndarray | None = None
    ids: Mapping[str, np.ndarray] = field(default_factory=dict)
    about: Mapping[str, Any] | None = None


def to_managed(name: str, table: Table) -> TableChange:
    """Ids 0 to rows - 1 keep their rows; one more row is for ids that have none."""
    if table.ids:
        raise _refused(name, "its ids are managed already", "a table whose ids are the numbers of its rows")
    if table.out_of_range == "hash":
        why = "a row of it is of all the ids that were hashed to it, and which these are is not known"
        raise _refused(name, why, "a table whose ids are the numbers of its rows")
    policy, rows = ManagedIds(), table.rows
    ids = np.arange(rows)
    ids = ids[np.argsort(hash_bits(ids.astype(np.uint64)).view(np.int64), kind="stable")]
    saved = {"id": ids, "row": ids, "sightings": np.ones_like(ids), "last": np.full_like(ids, -1)}
    return TableChange(
        Table(rows=rows + policy.fallback_rows, dim=table.dim, ids=policy),
        f"table {name}: ids 0 to {rows - 1:,} keep their rows; one more is for ids that have none",
        np.concatenate([np.arange(rows), np.full(policy.fallback_rows, -1)]),
        saved,
        {"rows": rows, "waiting": 0, "left": 0, "handed": rows, "marks": []},
    )


def to_hash(name: str, table: Table) -> TableChange:
    """Ids below the number of rows keep theirs; all others, and text, share them."""
    if table.ids:
        why = (
            "of its ids it is not known whether they were text, which is hashed in another way than integers"
        )
        raise _refused(name, why, "a table whose ids are the numbers of its rows")
    if table.out_of_range == "hash":
        raise _refused(name, "its ids are hashed already", "a table with out_of_range of error or clamp")
    return TableChange(
        table.model_copy(update={"out_of_range": "hash"}),
        f"table {name}: ids 0 to {table.rows - 1:,} keep their rows; all others are hashed to these",
    )


def resized(folder: str, index: Mapping[str, Any], name: str, table: Table, rows: int) -> TableChange:
    """The same with another number of rows: without managed ids, the first ones stay; with them, all ids, or
    those seen most often."""
    if table.out_of_range == "hash":
        raise _refused(name, "of another size it has other rows for the ids that are hashed", "another table")
    if rows == table.rows:
        raise _refused(name, f"it has {rows:,} rows already", "another number of rows")
    if table.ids and rows <= table.ids.fallback_rows:
        raise _refused(name, f"{rows} rows are none for ids", f"more than {table.ids.fallback_rows}")
    new = table.model_copy(update={"rows": rows})
    if table.ids:
        return _resized_ids(ids_of(folder, index, name), index["about"]["ids"][name], name, table, new)
    source = np.arange(rows)
    source[table.rows :] = -1
    more = rows > table.rows
    rest = (
        f"{rows - table.rows:,} more begin with their initial values"
        if more
        else (f"the last {table.rows - rows:,} are dropped")
    )
    return TableChange(new, f"table {name}: its first {min(rows, table.rows):,} rows stay, {rest}", source)


def _resized_ids(
    saved: Mapping[str, torch.Tensor], about: Mapping[str, Any], name: str, old: Table, new: Table
) -> TableChange:
    """Rows that the new table has, too, stay where they are; the others move to rows without an id."""
    values, room = {key: tensor.numpy() for key, tensor in saved.items()}, new.own_rows
    best = np.lexsort((-values["last"], -values["sightings"]))[:room]  # of equals, the first by its key
    kept = {key: column[np.sort(best)] for key, column in values.items()}
    before, free = kept["row"], np.ones(room, bool)
    stays = before < room
    free[before[stays]] = False
    left = np.flatnonzero(free)
    moving = len(before) - int(stays.sum())
    after = before.copy()
    after[~stays] = left[:moving]
    source = np.full(new.rows, -1)
    source[after] = before
    source[room:] = np.arange(old.own_rows, old.rows)
    dropped = len(values["id"]) - len(before)
    return TableChange(
        new,
        f"table {name}: {len(before):,} ids keep what they have learned"
        + (f"; {dropped:,} that were seen least are dropped" if dropped else ""),
        source,
        {**kept, "row": after} | ({"left": left[moving:]} if moving < len(left) else {}),
        {**about, "rows": len(before), "left": len(left) - moving, "handed": room},
    )


def _refused(table: str, why: str, expected: str) -> SchemaError:
    return SchemaError(
        f"table {table} cannot be converted: {why}",
        where=f"--table {table}",
        expected=expected,
        do=f"begin it anew in a warm start: warm_start.tables.{table}=new, with another schema",
    )
