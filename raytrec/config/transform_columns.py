"""The columns that transforms read and write. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from raytrec.common.errors import ConfigError
from raytrec.config.schema import Schema
from raytrec.config.transforms import OnColumns, Sample, Transform


def columns_before(transforms: list[Transform] | tuple[Transform, ...], columns: list[str]) -> list[str]:
    """The columns that files must have, so that `columns` are there after the transforms."""
    needed = dict.fromkeys(columns)
    for transform in reversed(transforms):
        for name in transform.writes:
            needed.pop(name, None)
        needed |= dict.fromkeys(transform.reads)
    return list(needed)


def with_rows(transforms: Iterable[Transform], schema: Schema) -> tuple[Transform, ...]:
    """Transforms that draw from as many ids as the tables have that look them up, where they set no `rows`.

    Raises:
        ConfigError: no feature looks the ids up; or the table's are managed, which no number gives.
    """
    return tuple(
        transform.model_copy(update={"rows": _rows_of(transform, schema)})
        if isinstance(transform, Sample) and not transform.rows and not transform.vocabulary
        else transform
        for transform in transforms
    )


def _rows_of(transform: Sample, schema: Schema) -> int:
    features = [name for name in schema.sparse if schema.column_of(name) == transform.column]
    tables = {schema.sparse[name].table for name in features}
    where = f"data.transforms, do: sample, column: {transform.column}"
    if not tables:
        raise ConfigError(
            f"ids are drawn into {transform.column}, and no feature of the schema reads that column",
            where=where,
            expected="a feature that looks the ids up",
            do=f"add {transform.column}: {{table: TABLE, pooling: sequence}} to the schema; or set rows",
        )
    for table in tables:
        if schema.tables[table].ids:
            raise ConfigError(
                f"ids are drawn for table {table}, whose ids are managed: any numbers or text",
                where=where,
                expected="vocabulary: FILE, a text file or Parquet of the ids to draw from",
                do="write the ids into a file, one in each line; or set rows where the ids are 0 to rows - 1",
            )
    return min(schema.tables[table].rows for table in tables)


def needed_transforms(transforms: tuple[Transform, ...], columns: list[str]) -> tuple[Transform, ...]:
    """Those transforms, and those of their columns, that `columns` are made by; all else can be left undone.

    Which column your function reads for what is not known: it stays if it makes any of them, or
    does not name what it makes.
    """
    needed, kept = set(columns), []
    for transform in reversed(transforms):
        if isinstance(transform, OnColumns):
            pairs = [
                pair for pair in zip(transform.columns, transform.writes, strict=True) if pair[1] in needed
            ]
            if not pairs:
                continue
            if len(pairs) < len(transform.columns):
                read, made = map(list, zip(*pairs, strict=True))
                transform = transform.model_copy(update={"columns": read, "into": made})
        elif transform.writes and not needed & set(transform.writes):
            continue
        needed = (needed - set(transform.writes)) | set(transform.reads)
        kept.append(transform)
    return tuple(reversed(kept))
