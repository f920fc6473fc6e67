"""A checkpoint's model in this process, whose tables have only the rows that are looked up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.checkpoint.managed import stored_rows
from raytrec.checkpoint.restore import load
from raytrec.checkpoint.rows import StoredTable
from raytrec.compat.torch_ import quiet_tracing
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tasks import TowerName
from raytrec.data.batch import Batch, Collator
from raytrec.data.fragments import Dataset
from raytrec.data.order import Item, Part
from raytrec.data.pieces import Rows
from raytrec.data.rows import read_item
from raytrec.models.recommender import Recommender, build_recommender
from raytrec.tasks.task import columns_of, needs_vectors, resolve_tasks

Used = dict[str, np.ndarray]  # table → its rows that are looked up, rising
HEAD = "head.model."  # before the names of the dense layers' parameters (worker.step.LossModel)


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


def outputs_of(
    config: RunConfig,
    schema: Schema,
    folder: str,
    index: dict[str, Any],
    batch: Batch,
    tower: TowerName | None = None,
    as_stored: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """A batch's logits, as a checkpoint's model gives them; or one tower's vectors, float32 [rows, width].

    Args:
        config, schema: of the checkpoint, `folder`, whose index `index` is.
        as_stored: what becomes of tables' rows, float32 [n, dim], before they are looked up.
    """
    used, sparse = _renumbered(batch.sparse, schema, folder, index)
    model = load_model(config, schema, folder, index, used, as_stored)
    with torch.no_grad():
        return model(replace(batch, sparse=sparse), tower)


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


def load_model(
    config: RunConfig,
    schema: Schema,
    folder: str,
    index: dict[str, Any],
    used: Used,
    as_stored: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Recommender:
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
            values = torch.from_numpy(stored.take(rows.tolist()))
            parameter.data[: len(rows)] = as_stored(values) if as_stored and len(rows) else values
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
