"""A transform that adds a column."""

import pyarrow as pa
import pyarrow.compute as pc


def share(table: pa.Table, most: float) -> pa.Table:
    return table.append_column("share", pc.min_element_wise(pc.divide(table["paid"], most), 1.0))
