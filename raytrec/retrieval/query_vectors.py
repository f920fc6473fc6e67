"""`raytrec.query_vectors`: the vectors of a few rows, computed in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.errors import DataError
from raytrec.common.storage import absolute
from raytrec.config.evaluation import TowerName
from raytrec.data.order import Item, Part
from raytrec.driver.datasets import open_inputs, part_of_tower
from raytrec.driver.evaluation import resolve_checkpoint


def query_vectors(
    run: str | Path,
    rows: Any,
    *,
    tower: TowerName = "query",
    checkpoint: str | int | None = None,
    allow_code: bool = False,
) -> np.ndarray:
    """The vectors that a run's model gives rows, for `Index.search`. For many rows, `raytrec predict
    --vectors query` has all workers.

    It reads of the checkpoint the rows of tables that these rows look up, and starts neither Ray nor workers.

    Args:
        run: run folder or checkpoint folder.
        rows: a mapping (one row) or a list of them, a pandas.DataFrame, a pyarrow.Table, or the path of
            Parquet; it needs the columns of the tower's features alone.
        tower: query or item.
        checkpoint: of a run, a step, or "best"; default: the newest.
        allow_code: the configuration in there may name code (raytrec/config/trust.py).

    Returns:
        float32 [rows, width].

    Raises:
        RunError: no checkpoint there. ConfigError: the model gives no vectors of query and item. DataError:
            what is wrong with the rows.
    """
    config, schema, folder, index = resolve_checkpoint(run, checkpoint, [], allow_code)
    part = part_of_tower(config, schema, tower, "query_vectors")
    from raytrec.retrieval.local_vectors import read_batch, vectors_of

    with TemporaryDirectory(prefix="raytrec-rows-") as temporary:
        if isinstance(rows, str | Path):
            place = absolute(str(rows))
        else:
            place = f"{temporary}/rows.parquet"
            pq.write_table(_table(rows), place)
        dataset = open_inputs(config, part, place, "rows")
        items = [
            Item(0, 0, (Part(group.path, group.index, 0, group.rows),), None) for group in dataset.groups
        ]
        batch = read_batch(config, schema, dataset, items)
    return vectors_of(config, schema, folder, index, batch, tower)


def _table(rows: Any) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, Mapping):
        rows = [rows]
    try:
        if isinstance(rows, Sequence):
            return pa.Table.from_pylist(list(rows))
        return pa.Table.from_pandas(rows, preserve_index=False)
    except (pa.ArrowException, AttributeError, TypeError) as error:
        raise DataError(
            f"not tabular data: {(str(error).splitlines() or [type(error).__name__])[0]}",
            where="query_vectors",
            expected="mappings of columns to values, a pandas.DataFrame, a pyarrow.Table or a path",
        ) from None
