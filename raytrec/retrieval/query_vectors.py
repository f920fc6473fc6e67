"""`raytrec.query_vectors`: vectors of a few rows, computed in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.checkpoint.managed import stored_rows
from raytrec.checkpoint.restore import load
from raytrec.checkpoint.rows import StoredTable
from raytrec.common.errors import DataError
from raytrec.common.storage import absolute
from raytrec.compat.torch_ import quiet_tracing
from raytrec.config.evaluation import TowerName
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.data.collate import Collator, Rows
from raytrec.data.fragments import Dataset
from raytrec.data.order import Item, Part
from raytrec.data.rows import read_item
from raytrec.driver.datasets import open_inputs, part_of_tower
from raytrec.driver.evaluation import resolve_checkpoint
from raytrec.models.recommender import Recommender, build_recommender
from raytrec.tasks.task import columns_of, needs_vectors, resolve_tasks

Used = dict[str, np.ndarray]  # table → its rows that are looked up, rising
HEAD = "head.model."  # before the names of the dense layers' parameters (worker.step.LossModel)


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

    Example:
        >>> raytrec.query_vectors("runs/films", {"user_id": 3, "history": [1, 2]}).shape
        (1, 16)
    """
    config, schema, folder, index = resolve_checkpoint(run, checkpoint, [], allow_code)
    part = part_of_tower(config, schema, tower, "query_vectors")
    with TemporaryDirectory(prefix="raytrec-rows-") as temporary:
        if isinstance(rows, str | Path):
            place = absolute(str(rows))
        else:
            place = f"{temporary}/rows.parquet"
            pq.write_table(_table(rows), place)
        dataset = open_inputs(config, part, place, "rows")
        parts = [Part(group.path, group.index, 0, group.rows) for group in dataset.groups]
        batch = read_batch(config, schema, dataset, parts)
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


def read_batch(config: RunConfig, schema: Schema, dataset: Dataset, parts: list[Part]) -> Batch:
    """Rows as one batch of a run's.

    Args:
        config, schema: of the run.
        dataset: which the rows are of; it may have some of the schema's features alone.
        parts: the rows.
    """
    quiet_tracing()
    tables = [read_item(Item(0, 0, (part,), None), dataset.form) for part in parts]
    pieces = [Rows.of(rows) for table in tables for rows in table.combine_chunks().to_batches()]
    rows = sum(len(piece) for piece in pieces)
    return Collator(dataset.form, resolve_features(schema, config.model))(pieces, rows, rows)


def vectors_of(
    config: RunConfig, schema: Schema, folder: str, index: dict[str, Any], batch: Batch, tower: TowerName
) -> np.ndarray:
    """One tower's vectors of a batch, float32 [rows, width], as a checkpoint's model gives them.

    Args:
        config, schema: of the checkpoint, `folder`, whose index `index` is.
    """
    used, sparse = _renumbered(batch.sparse, schema, folder, index)
    model = _model(config, schema, folder, index, used)
    with torch.no_grad():
        found = model.embeddings(sparse)
        return model.call(
            model.model, batch.dense, found, sparse, tower=tower, side_features=batch.side_features
        ).numpy()


def _renumbered(
    sparse: KeyedJaggedTensor, schema: Schema, folder: str, index: dict[str, Any]
) -> tuple[Used, KeyedJaggedTensor]:
    """(rows that are looked up, the same with their places among these as ids)."""
    keys = sparse.keys()
    table_of = [schema.sparse[key].table for key in keys]
    of_keys = list(sparse.values().split(sparse.length_per_key()))
    for place, table in enumerate(table_of):
        if schema.tables[table].ids:
            of_keys[place] = stored_rows(folder, index, table, schema.tables[table], of_keys[place])
    parts = [part.numpy() for part in of_keys]
    used = {
        table: np.unique(np.concatenate([p for p, t in zip(parts, table_of, strict=True) if t == table]))
        for table in set(table_of)
    }
    places = [np.searchsorted(used[table], part) for part, table in zip(parts, table_of, strict=True)]
    ids = torch.from_numpy(np.concatenate(places)).long()
    lengths, weights = sparse.lengths(), sparse.weights_or_none()
    renumbered = KeyedJaggedTensor(keys, ids, weights, lengths=lengths, stride=sparse.stride())
    return used, renumbered


def _model(config: RunConfig, schema: Schema, folder: str, index: dict[str, Any], used: Used) -> Recommender:
    """The checkpoint's model, whose tables have the rows that are used, and no others."""
    tasks, cpu = resolve_tasks(config.tasks, schema), torch.device("cpu")
    columns = columns_of(tasks)
    needs = sum(columns.values()), needs_vectors(tasks), columns
    model = build_recommender(config, schema, cpu, *needs)
    few = {
        name: table.model_copy(update={"rows": max(1, len(used.get(name, ())))})
        for name, table in schema.tables.items()
    }
    model.embeddings = build_recommender(
        config, schema.model_copy(update={"tables": few}), cpu, *needs
    ).embeddings
    model.embeddings.to_empty(device=cpu)
    for name, parameter in model.embeddings.named_parameters():
        table = name.split(".")[-2]
        with StoredTable(folder, index, table) as stored:
            rows = used.get(table, np.empty(0, np.int64))
            parameter.data[: len(rows)] = torch.from_numpy(stored.take(rows.tolist()))
    _read_dense(model.model, folder, index, bool(config.train.ema))
    return model.eval()


def _read_dense(model: nn.Module, folder: str, index: dict[str, Any], averaged: bool) -> None:
    """Dense layers as evaluations use them: of train.ema, the averages."""
    wanted = {}
    for name, value in model.state_dict().items():
        average = f"dense/{HEAD}{name}/ema"
        stored = average if averaged and average in index["tensors"] else f"dense/{HEAD}{name}/value"
        wanted[stored] = value
    if wanted:
        load(folder, wanted)
