"""Features of a run, resolved from its schema and model, and the columns that transforms read and write.

The reader, model, planner and checks share these features. Does not import torch.

This module decides which sequences a model reads id by id. Such a sequence is one key of a batch. If the model
reads at most L ids, the key contains the L most recent ids of each row, the most recent first. The table of
such a sequence returns the vector of each id (TorchRec's EmbeddingCollection) to all features that read the
table. Bags among these features are summed after the lookup. Tables that candidates look up, with one id each,
also return vectors. All other tables return sums of bags (EmbeddingBagCollection).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from raytrec.common.errors import ConfigError
from raytrec.config.models.base import ModelSection
from raytrec.config.schema import Schema
from raytrec.config.transforms import OnColumns, Sample, Transform


@dataclass(frozen=True)
class Features:
    """Input features of a run, and how a model looks up their ids.

    Attributes:
        schema: Schema of the run, as stored with the data and in the run folder.
        sequences: Sequence feature that the model reads id by id → maximum number of ids.
    """

    schema: Schema
    sequences: Mapping[str, int]

    @property
    def keys(self) -> list[str]:
        """Return the keys of a batch's KeyedJaggedTensor in order, one per feature."""
        return list(self.schema.sparse)

    @cached_property
    def side_features(self) -> dict[str, int]:
        """Return a mapping from sequence to number of side features, for sequences read id by id that have any."""
        counts = {feature: len(self.schema.sparse[feature].side_features) for feature in self.sequences}
        return {feature: count for feature, count in counts.items() if count}

    def is_mean(self, feature: str) -> bool:
        """Return True if the bags of a feature are averaged."""
        by_id = feature in self.sequences or feature in self.schema.candidates
        return self.schema.sparse[feature].pooling != "sum" and not by_id

    @cached_property
    def tables_by_id(self) -> dict[str, list[str]]:
        """Return a mapping from table to all features that read it, for tables that return a vector per id."""
        by_id = [*self.sequences, *self.schema.select_candidate_names(self.schema.sparse)]
        tables = {self.schema.sparse[feature].table for feature in by_id}
        return {table: readers for table, readers in self.schema.features_by_table.items() if table in tables}


def resolve_features(schema: Schema, model: ModelSection | None = None) -> Features:
    """Return the features of a run.

    Args:
        schema: Schema of the run.
        model: The `model` section, which determines the sequences read id by id; default: all sequences are averaged.
    """
    lengths = model.sequence_lengths(schema) if model else {}
    sequences = {f: lengths[f] for f in schema.sparse if f in lengths and schema.sparse[f].pooling == "sequence"}
    return Features(schema, sequences)


def resolve_input_columns(transforms: list[Transform] | tuple[Transform, ...], columns: list[str]) -> list[str]:
    """Return the columns that files must contain so that `columns` exist after the transforms, without duplicates.

    They include the inputs of every transform that no earlier transform writes, even if no column depends on them.
    """
    needed = dict.fromkeys(columns)
    for transform in reversed(transforms):
        for name in transform.writes:
            needed.pop(name, None)
        needed |= dict.fromkeys(transform.reads)
    return list(needed)


def set_draw_rows(transforms: Iterable[Transform], schema: Schema) -> tuple[Transform, ...]:
    """Return the transforms, with `rows` of each `sample` set to the size of the table that looks up its ids.

    A `sample` with `rows` or a vocabulary is not changed. If several tables look up the ids, the smallest size is used.

    Raises:
        ConfigError: No feature looks up the ids, or the table's ids are managed and thus not row numbers.
    """
    return tuple(
        transform.model_copy(update={"rows": _get_table_rows(transform, schema)})
        if isinstance(transform, Sample) and not transform.rows and not transform.vocabulary
        else transform
        for transform in transforms
    )


def _get_table_rows(transform: Sample, schema: Schema) -> int:
    features = [name for name in schema.sparse if schema.get_ids_column(name) == transform.column]
    tables = {schema.sparse[name].table for name in features}
    where = f"data.transforms, do: sample, column: {transform.column}"
    if not tables:
        raise ConfigError(
            f"ids are drawn into {transform.column}, but no feature of the schema reads this column",
            where=where,
            expected="a feature that looks up the ids",
            do=f"add {transform.column}: {{table: TABLE, pooling: sequence}} to sparse in the schema, or set rows",
        )
    for table in tables:
        if schema.tables[table].ids:
            count = "a number as count, and " if transform.count == "all" else ""
            raise ConfigError(
                f"ids are drawn for table {table} as row numbers, but its ids are managed: arbitrary numbers or text",
                where=where,
                expected=f"{count}vocabulary: FILE, a text or Parquet file of the ids to draw from",
                do="write the ids to a file, one per line; or set rows if the ids are 0 to rows - 1",
            )
    return min(schema.tables[table].rows for table in tables)


def select_needed_transforms(transforms: tuple[Transform, ...], columns: list[str]) -> tuple[Transform, ...]:
    """Return the transforms on which `columns` depend, reduced to the needed columns.

    A user-defined function or a `sample` is kept as a whole if it writes a needed column, because the inputs of each
    output are unknown. A function that does not name its outputs is always kept.
    """
    needed, selected = set(columns), []
    for transform in reversed(transforms):
        if isinstance(transform, OnColumns):
            pairs = [pair for pair in zip(transform.columns, transform.writes, strict=True) if pair[1] in needed]
            if not pairs:
                continue
            if len(pairs) < len(transform.columns):
                read, written = map(list, zip(*pairs, strict=True))
                transform = transform.model_copy(update={"columns": read, "into": written})
        elif transform.writes and not needed & set(transform.writes):
            continue
        needed = (needed - set(transform.writes)) | set(transform.reads)
        selected.append(transform)
    return tuple(reversed(selected))
