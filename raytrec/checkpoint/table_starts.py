"""How tables of a new run begin from a checkpoint. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from raytrec.common.errors import SchemaError
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Table


@dataclass(frozen=True)
class TableStart:
    """How a table of the new run begins.

    Attributes:
        policy: exact, resize, new or drop.
        rows: that are taken over.
        note: a line about it, where it is not simply taken over.
    """

    policy: str
    rows: int
    note: str | None


def table_starts(config: RunConfig, before: Schema, schema: Schema) -> dict[str, TableStart]:
    """table → how it begins, under warm_start.tables, tables of the checkpoint that have gone included.

    Raises:
        SchemaError: a table has changed, and warm_start.tables has no entry that fits.
    """
    return {
        table: _start(table, before.tables.get(table), schema.tables.get(table), _policy(config, table))
        for table in {**before.tables, **schema.tables}
    }


def _policy(config: RunConfig, table: str) -> str:
    """The last pattern that matches."""
    fitting = (policy for key, policy in config.warm_start.tables.items() if fnmatchcase(table, key))
    return ["exact", *fitting][-1]


def _start(table: str, old, new, policy: str) -> TableStart:
    had, has = (f"{t.rows:,} × {t.dim}{_of_ids(t)}" if t else "none" for t in (old, new))
    if new is None and policy == "drop":
        return TableStart("drop", 0, f"table {table} ({had}) of the checkpoint is dropped")
    if new is not None and policy == "new":
        return TableStart("new", 0, f"table {table} ({has}) gets its initial values")
    managed = [t for t in (old, new) if t and t.ids]
    alike = len(managed) != 1 and (not managed or old.own_rows == new.own_rows)
    if old and new and alike and (old.rows, old.dim) == (new.rows, new.dim):
        return TableStart("exact", new.rows, None)
    if old and new and not managed and old.dim == new.dim and policy == "resize":
        more = new.rows - old.rows
        dropped = f"the checkpoint's last {-more:,} rows are dropped"
        rest = f"{more:,} rows get their initial values" if more > 0 else dropped
        return TableStart("resize", min(old.rows, new.rows), f"table {table}: {rest}")
    fits = old and new and not managed and old.dim == new.dim
    fitting = "drop" if new is None else "resize" if fits else "new"
    raise SchemaError(
        f"tables.{table}: {has} now, {had} in the checkpoint",
        where="warm_start.from",
        expected="the checkpoint's tables, or an entry of warm_start.tables for those that differ",
        do=f"set warm_start.tables.{table}={fitting}, or train with the checkpoint's schema",
    )


def _of_ids(table: Table) -> str:
    if not table.ids:
        return ""
    return f" with managed ids, {table.ids.fallback_rows:,} of them for the fallback"


def schema_of(about: dict) -> Schema:
    """The schema in a checkpoint."""
    return Schema.stored(str(about.get("schema", "")), "the checkpoint's schema")
