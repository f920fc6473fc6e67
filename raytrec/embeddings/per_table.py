"""What the configuration says of single tables, by name or pattern: their optimizers. No torch."""

from __future__ import annotations

from fnmatch import fnmatchcase

from raytrec.common.errors import ConfigError, did_you_mean
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.sections import EmbeddingOptim


def matching_tables(pattern: str, schema: Schema, where: str) -> list[str]:
    """The tables that a name or a pattern such as 'item*' means.

    Raises:
        ConfigError: there are none; it names `where`.
    """
    tables = [table for table in schema.tables if fnmatchcase(table, pattern)]
    if not tables:
        near = did_you_mean(pattern, list(schema.tables))
        raise ConfigError(
            f"no table is named, or matches, '{pattern}'" + (f"; did you mean '{near}'?" if near else ""),
            where=where,
            expected=f"one of {', '.join(schema.tables)}",
        )
    return tables


def table_optimizers(config: RunConfig, schema: Schema) -> dict[str, EmbeddingOptim]:
    """Table → its optimizer: optim.embeddings, with what the lines of optim.tables that match it override.

    Raises:
        ConfigError: a line that no table matches.
    """
    default = config.optim.embeddings.model_dump()
    values = {table: dict(default) for table in schema.tables}
    for pattern, given in config.optim.tables.items():
        for table in matching_tables(pattern, schema, f"optim.tables.{pattern}"):
            values[table] |= given.model_dump(exclude_none=True)
    return {table: EmbeddingOptim(**of_table) for table, of_table in values.items()}


def has_fused(optimizer: str, device: str) -> bool:
    """Whether FBGEMM updates tables in backward by this optimizer: always, but for adam on CPU.

    Args:
        device: cpu or cuda.
    """
    return not (optimizer == "adam" and device == "cpu")
