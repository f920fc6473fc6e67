"""Score rows with a checkpoint's model in this process, with only the looked-up table rows in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.checkpoint.restore import read_id_rows
from raytrec.checkpoint.rows import StoredTable
from raytrec.checkpoint.storage import load
from raytrec.compat.torch_ import silence_tracing
from raytrec.config.features import resolve_features
from raytrec.config.tasks import TowerName
from raytrec.data.batch import Batch, Collator
from raytrec.data.fragments import Dataset
from raytrec.data.item_reader import read_item
from raytrec.data.order import LaneItem, Part
from raytrec.data.row_slices import Rows
from raytrec.driver.evaluation import Checkpoint
from raytrec.models.recommender import Recommender, build_recommender
from raytrec.tasks.task import count_logits, needs_vectors, resolve_tasks

UsedRows = dict[str, np.ndarray]  # table → indices of looked-up rows, ascending
Rounding = Callable[[torch.Tensor], torch.Tensor]  # table rows, float32 [n, dim] → rows rounded to a precision
HEAD = "head.model."  # prefix of dense parameter names (worker.step.LossModel)


def read_batch(saved: Checkpoint, dataset: Dataset, parts: list[Part]) -> Batch:
    """Read rows as one batch for a checkpoint's model, without padding.

    Args:
        saved: Checkpoint of the model.
        dataset: Dataset that contains the rows; some of the schema's features may be missing.
        parts: Parts of row groups to read; at least one.

    Raises:
        DataError: A part cannot be decoded, a transform fails, or a value violates the schema.
    """
    silence_tracing()
    tables = [read_item(LaneItem(0, 0, (part,), None), dataset.form) for part in parts]
    pieces = [Rows.of(rows) for table in tables for rows in table.combine_chunks().to_batches()]
    rows = sum(len(piece) for piece in pieces)
    return Collator(dataset.form, resolve_features(saved.schema, saved.config.model))(pieces, rows, rows)


def compute_outputs(
    saved: Checkpoint, batch: Batch, tower: TowerName | None = None, as_stored: Rounding | None = None
) -> torch.Tensor:
    """Return the logits of a batch, float32 [rows, logits], or the vectors of a tower, float32 [rows, width].

    Args:
        saved: Checkpoint of the model.
        batch: Rows to score.
        tower: Tower whose vectors are returned; None: logits are returned.
        as_stored: Function that rounds table rows before the lookup; None: no rounding.

    Raises:
        CheckpointError: The checkpoint cannot be read or is damaged.
    """
    used, sparse = _renumber_ids(saved, batch.sparse)
    model = load_model(saved, used, as_stored)
    with torch.no_grad():
        return model(replace(batch, sparse=sparse), tower)


def _renumber_ids(saved: Checkpoint, sparse: KeyedJaggedTensor) -> tuple[UsedRows, KeyedJaggedTensor]:
    """Return the looked-up rows of each table, and the bags with ids replaced by indices among these rows.

    Managed ids are first mapped to the rows of their table.
    """
    keys, schema = sparse.keys(), saved.schema
    table_of = [schema.sparse[key].table for key in keys]
    key_ids = list(sparse.values().split(sparse.length_per_key()))
    for place, table in enumerate(table_of):
        if schema.tables[table].ids:
            find_rows = read_id_rows(saved.folder, saved.index, table, schema.tables[table])
            key_ids[place] = find_rows(key_ids[place])
    parts = [part.numpy() for part in key_ids]
    used = {
        table: np.unique(np.concatenate([p for p, t in zip(parts, table_of, strict=True) if t == table]))
        for table in set(table_of)
    }
    positions = [np.searchsorted(used[table], part) for part, table in zip(parts, table_of, strict=True)]
    ids = torch.from_numpy(np.concatenate(positions)).long()
    lengths, weights = sparse.lengths(), sparse.weights_or_none()
    renumbered = KeyedJaggedTensor(keys, ids, weights, lengths=lengths, stride=sparse.stride())
    return used, renumbered


def load_model(saved: Checkpoint, used: UsedRows, as_stored: Rounding | None = None) -> Recommender:
    """Load a checkpoint's model on CPU in evaluation mode, with tables that contain only the rows in `used`.

    The model computes in float32 regardless of train.matmul, because CPUs without bfloat16 units are slower in
    bfloat16, and onnxruntime does not support bfloat16 matrix products on CPUs. With train.ema, averages of the dense
    weights are loaded if the checkpoint contains them.

    Args:
        saved: Checkpoint of the model.
        used: Table → indices of the rows to load, which become rows 0, 1, … of the model's table. A table without
            such rows gets one row of zeros.
        as_stored: Function that rounds table rows; see `compute_outputs`.

    Raises:
        CheckpointError: The checkpoint cannot be read or is damaged.
    """
    config, schema = saved.config.model_copy(deep=True), saved.schema
    config.train.matmul = "fp32"
    tasks, cpu = resolve_tasks(config.tasks, schema), torch.device("cpu")
    model = build_recommender(config, schema, cpu, count_logits(tasks), needs_vectors(tasks))
    for name, parameter in list(model.embeddings.named_parameters()):  # on device meta
        *path, table, _ = name.split(".")
        weight = torch.zeros(1, parameter.shape[1])
        if table in used and len(used[table]):
            with StoredTable(saved.folder, saved.index, table) as stored:
                values = torch.from_numpy(stored.take(used[table].tolist()))
            weight = as_stored(values) if as_stored else values
        module = model.embeddings.get_submodule(".".join([*path, table]))
        module.weight = nn.Parameter(weight.to(parameter.dtype))
    targets = {}  # with train.ema, the averages are used, as in evaluations
    for name, value in model.model.state_dict().items():
        average = f"dense/{HEAD}{name}/ema"
        has_average = config.train.ema and average in saved.index["tensors"]
        targets[average if has_average else f"dense/{HEAD}{name}/value"] = value
    if targets:
        load(saved.folder, targets)
    return model.eval()
