"""Rows in the forms in which callers have them."""

import numpy as np
import pandas as pd
import pyarrow as pa

from raytrec.scoring.rows import to_table


def test_empty_bags_of_a_dataframe_may_be_of_another_dtype():
    rows = pd.DataFrame({"words": [np.array([]), np.array(["a", "b"], object)], "other": [1, 2]})
    found = to_table(rows, pa.schema({"words": pa.list_(pa.string())}))
    assert found["words"].to_pylist() == [[], ["a", "b"]]
