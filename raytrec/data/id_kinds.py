"""Check that the ids of each feature are text in all files, or numbers in all files. Does not import torch.

Tables that hash or manage ids accept both, but have different rows for the id 5 and the text '5'.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pyarrow as pa

from raytrec.common.errors import DataError
from raytrec.config.schema import Schema
from raytrec.data.arrow import is_text, value_type
from raytrec.data.files.footers import FooterStatistics

IdKinds = Mapping[str, bool]  # sparse feature → True if its ids are text, False if they are numbers


def find_id_kinds(arrow: pa.Schema, schema: Schema, footer: FooterStatistics) -> dict[str, bool]:
    """Return the kinds of ids in a file; features without any value are omitted.

    Args:
        arrow: Columns of the file, after the transforms.
        schema: Schema of the run.
        footer: Statistics of the file.
    """
    columns = {name: schema.get_ids_column(name) for name in schema.sparse}
    types = {name: value_type(arrow.field(column).type) for name, column in columns.items()}
    has_values = {n for n, kind in types.items() if not pa.types.is_null(kind) and not footer.lacks_values(columns[n])}
    return {name: is_text(types[name]) for name in columns if name in has_values}


def compare_id_kinds(
    files: Sequence[tuple[str, int, IdKinds]], trained: IdKinds
) -> tuple[dict[str, bool], dict[str, DataError]]:
    """Return the kinds of ids of a dataset, and file → error for files with another kind.

    Args:
        files: (path or URI, number of rows, kinds of ids) of each file.
        trained: Kinds of ids in the training data, which the files must have; for other features, the kind with the
            most rows is the kind of the dataset.
    """
    rows = defaultdict[str, Counter[bool]](Counter)
    for _, count, found in files:
        for name, kind in found.items():
            rows[name][kind] += count
    kinds = {name: trained.get(name, counts.most_common(1)[0][0]) for name, counts in rows.items()}
    errors = {}
    for uri, _, found in files:
        if name := next((each for each, kind in found.items() if kind != kinds[each]), None):
            texts = ("text", "numbers") if found[name] else ("numbers", "text")
            others = "the training data" if name in trained else "other files"
            errors[uri] = DataError(
                f"the ids of feature '{name}' are {texts[0]}, but {texts[1]} in {others}",
                where=uri,
                expected="ids of one kind, because tables that hash or manage ids have different rows for 5 and '5'",
                do=f"write the file with the type of {others}, or use data.transforms: {{do: cast, …}}",
            )
    return kinds, errors
