"""`raytrec convert`: changes the kind or size of trained tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raytrec.checkpoint.index import INDEX
from raytrec.common.errors import ConfigError, SchemaError, unknown
from raytrec.common.storage import absolute, join_uri, open_filesystem
from raytrec.config.schema import Schema
from raytrec.driver.evaluation import resolve_checkpoint

if TYPE_CHECKING:
    from raytrec.checkpoint.convert import TableChange

TABLE_KINDS = "managed, resize:ROWS or hash"


@dataclass(frozen=True)
class Converted:
    """The checkpoint that `convert` wrote.

    Attributes:
        path: the folder of the new checkpoint.
        lines: one for each table that changed.
    """

    path: str
    lines: list[str]


def convert(
    place: str | Path,
    tables: Sequence[str],
    out: str,
    *,
    checkpoint: str | int | None = None,
    allow_code: bool = False,
) -> Converted:
    """Writes a checkpoint in which tables are of another kind; weights and optimizer state of the rows that
    stay are kept to the last bit. A new run begins with it (`--warm-start`), and it can be evaluated and
    predicted with.

    Memory: a few blocks, 8 bytes for each row of a table that changes, and 32 for each managed id of it.

    Args:
        place: run folder or checkpoint folder. Nothing is written there.
        tables: TABLE=KIND, where KIND is managed, resize:ROWS or hash (docs/data.md).
        out: the folder to write to, local or s3:// or gs://.
        checkpoint: of a run, a step, or "best"; default: the newest.
        allow_code: the run's configuration may name code, where another user has written it.

    Raises:
        RunError: no checkpoint there. ConfigError, SchemaError: a table that does not exist, or cannot
            become this. CheckpointError: damaged, or no room.
    """
    saved = resolve_checkpoint(place, checkpoint, [], allow_code)
    schema, folder, index = saved.schema, saved.folder, saved.index
    wanted, out = _parse(tables, schema), absolute(out).rstrip("/")
    filesystem, index_file = open_filesystem(join_uri(out, INDEX))
    if filesystem.get_file_info(index_file).is_file:
        expected = "a folder without one"
        raise ConfigError("there is a checkpoint already", where=f"--out {out}", expected=expected)
    from raytrec.checkpoint.convert import rewrite

    changes = {table: _change(folder, index, schema, table, kind) for table, kind in wanted.items()}
    new = {table: change.table for table, change in changes.items()}
    schema = schema.model_copy(update={"tables": {**schema.tables, **new}})
    about = {**index["about"], "schema": schema.to_yaml()}
    about["ids"] = dict(about.get("ids", {})) | {t: dict(c.about) for t, c in changes.items() if c.about}
    rewrite(folder, index, out, changes, about, saved.config.run.seed)
    return Converted(out, [change.note for change in changes.values()])


def _parse(tables: Sequence[str], schema: Schema) -> dict[str, str]:
    """Table → kind."""
    found: dict[str, str] = {}
    for text in tables:
        table, equals, kind = text.partition("=")
        if not equals or not (kind in ("managed", "hash") or kind.partition(":")[0] == "resize"):
            raise ConfigError(f"--table {text}", expected=f"TABLE=KIND, where KIND is {TABLE_KINDS}")
        if table not in schema.tables:
            what, where = f"there is no table '{table}'", f"--table {text}"
            raise unknown(what, table, schema.tables, where, kind=SchemaError)
        if table in found:
            raise ConfigError(f"--table names {table} twice", expected="one kind for each table")
        found[table] = kind
    if not found:
        raise ConfigError("no table was given", expected=f"--table TABLE=KIND, where KIND is {TABLE_KINDS}")
    return found


def _change(folder: str, index: dict, schema: Schema, name: str, kind: str) -> TableChange:
    from raytrec.checkpoint.convert import resized, to_hash, to_managed

    table = schema.tables[name]
    if kind == "managed":
        return to_managed(name, table)
    if kind == "hash":
        return to_hash(name, table)
    rows = kind.partition(":")[2].replace("_", "")
    if not rows.isdecimal() or not 0 < int(rows) < 2**62:
        raise ConfigError(f"--table {name}={kind}", expected="resize:ROWS, such as resize:100000")
    return resized(folder, index, name, table, int(rows))
