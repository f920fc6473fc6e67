"""Rows that are requests: their candidates as rows of one example each. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raytrec.common.errors import DataError
from raytrec.config.schema import scalar
from raytrec.data.arrow import is_list, one_array, unnest
from raytrec.data.columns import Place, first_unlike, rows_of
from raytrec.data.form import Form


@dataclass(frozen=True)
class CandidatePlace(Place):
    """Where the first candidate of a decoded table is.

    Attributes:
        offsets: int32 [rows + 1], from which candidate on each row's are.
    """

    offsets: np.ndarray

    def of(self, column: str, row: int | None = None) -> str:
        """The place of a candidate's value, by the row that it is in."""
        return super().of(column, None if row is None else rows_of(self.offsets)(row))


def candidates_of(table: pa.Table, form: Form, place: Place) -> tuple[pa.Table, CandidatePlace]:
    """What tasks and dense candidates read of the rows, one row for each candidate, and where these are.

    Other columns are of the request, and repeated.

    Raises:
        DataError: the lists of a row have different lengths, or one is null; names file, column and row.
    """
    schema, offsets, found, first = form.schema, None, {}, ""
    extra = [read.column for read in form.plan.columns_of_tasks]
    of_tasks = dict.fromkeys([*form.plan.labels, *schema.of_candidates(schema.dense), *extra])
    lists = dict.fromkeys(
        schema.column_of(name) if name in schema.sparse else name
        for name in schema.candidates
        if form.plan.read_labels or name not in schema.labels
    )
    lists |= {name: None for name in of_tasks if is_list(table[name].type)}
    for name in lists:
        array = one_array(table[name])
        if array.null_count:
            row = pc.index(array.is_null(), True).as_py()
            raise DataError(
                f"column '{name}' has a null in place of a list",
                where=place.of(name, row),
                expected="a value for each candidate; an empty list where a request has none",
                do="correct the data; or skip such rows: data.on_error=skip",
            )
        ends, values = unnest(array)
        offsets, first = (ends, name) if offsets is None else (offsets, first)
        if unlike := first_unlike(ends, offsets):
            row, length, other = unlike
            raise DataError(
                f"'{name}' has {length} values, and '{first}' has {other}",
                where=place.of(name, row),
                expected="one value for each candidate of the row",
                do=f"correct the data, or schema.yaml, candidates: [{scalar(first)}, {scalar(name)}, …]",
            )
        found[name] = values
    rows = pa.array(np.repeat(np.arange(table.num_rows), np.diff(offsets)))
    columns = {name: found[name] if name in found else table[name].take(rows) for name in of_tasks}
    return pa.table(columns), CandidatePlace(place.path, place.group, place.first, offsets)
