"""Conversion of rows from data frames and JSON objects."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from raytrec.common.errors import DataError
from raytrec.scoring.request_rows import ObjectRows, concat_rows, to_table


def test_empty_dataframe_bags_may_have_another_dtype():
    rows = pd.DataFrame({"words": [np.array([]), np.array(["a", "b"], object)], "other": [1, 2]})
    found = to_table(rows, pa.schema({"words": pa.list_(pa.string())}))
    assert found["words"].to_pylist() == [[], ["a", "b"]]


def test_rows_of_several_requests_are_converted_together():
    schema = pa.schema({"id": pa.int64(), "price": pa.float64()})
    first, second = [{"id": 1, "price": 0.5}, {"id": 2, "price": None}], [{"id": 3, "price": 1, "other": "x"}]
    table = concat_rows([ObjectRows(first, schema), ObjectRows(second, schema)[:1]])
    assert table.to_pydict() == {"id": [1, 2, 3], "price": [0.5, None, 1.0]}
    assert table["id"].num_chunks == 1  # one conversion per request would give one chunk each


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ([{"id": 1}, ["id"]], "the rows, row 1"),
        ([{"id": 1}, "id"], "the rows, row 1"),
        ([{"id": 1}, {}], "the rows, column id, row 1"),
        ([{"id": 1}, {"id": 1.5}], "the rows, column id, row 1"),
    ],
)
@pytest.mark.parametrize("names", [["id"], ["id", "other"]])
def test_conversion_error_names_the_invalid_row(rows, where, names):
    given = [row | {"other": 0} if isinstance(row, dict) and row else row for row in rows]
    with pytest.raises(DataError) as caught:
        to_table(given, pa.schema([(name, pa.int64()) for name in names]))
    assert caught.value.parts["where"] == where


def test_text_is_not_a_list_of_characters():
    schema = pa.schema({"tags": pa.list_(pa.string())})
    with pytest.raises(DataError, match="column 'tags' has the invalid value 'red'") as caught:
        to_table([{"tags": ["red"]}, {"tags": "red"}], schema)
    assert caught.value.parts["expected"] == "a list of values, each text"


def test_error_for_other_objects_names_their_type():
    with pytest.raises(DataError, match=r"the rows are not tabular data: int\n"):
        to_table(3, pa.schema({"id": pa.int64()}))
