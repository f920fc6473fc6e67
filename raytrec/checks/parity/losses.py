"""Compute the loss of a global batch from its definition, in plain torch and without raytrec's objective.

Losses of single rows use torch.nn where available. Losses that compare rows are computed row by row.
ROW_LOSSES and BATCH_LOSSES define each loss of raytrec except from_model; their sources are cited in
raytrec/tasks/losses. A user's loss is its own reference, so parity compares only the summation over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from raytrec.checks.parity.batches import GlobalBatch
from raytrec.common.errors import RunError
from raytrec.tasks.losses import BatchLoss, Loss, Rows, loss
from raytrec.tasks.task import Task, key_columns


def compute_loss(
    tasks: Sequence[Task],
    logits: torch.Tensor,
    batch: GlobalBatch,
    own_loss: bool = False,
    temperatures: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Return the loss of a global batch, a scalar: Σ over tasks of the task's weight · Σ over rows ÷ B.

    Args:
        tasks: Tasks of the run.
        logits: Output of the model, [B] or [B, columns].
        batch: The global batch.
        own_loss: True if the column after the tasks' columns is a loss computed by the model, which is averaged over
            rows and added unless a task uses it (loss: from_model).
        temperatures: Temperature of each task whose loss learns a temperature, in the order of `tasks`.

    Raises:
        RunError: A loss of raytrec has no definition in ROW_LOSSES or BATCH_LOSSES.
    """
    total, first, temperatures = logits.new_zeros(()), 0, iter(temperatures)
    columns = logits if logits.dim() == 2 else logits.unsqueeze(1)
    task_columns = sum(task.outputs for task in tasks if not task.loss.reads_vectors)
    for index, task in enumerate(tasks):
        outputs = columns[:, task_columns + own_loss :]
        if not task.loss.reads_vectors:
            outputs, first = columns[:, first : first + task.outputs], first + task.outputs
        if task.loss.learns_temperature:
            scores = outputs.shape[1] // 2 if task.loss.reads_vectors else outputs.shape[1]
            outputs = torch.cat([outputs[:, :scores] / next(temperatures), outputs[:, scores:]], 1)
        labels = batch.labels[:, task.column]
        weights = labels.new_ones(len(batch)) if batch.weights is None else batch.weights[:, index]
        if task.loss.from_model:
            losses = columns[:, task_columns] * labels
        else:
            group_column = getattr(task.loss, "by", None)
            keys = _select_keys(batch, tasks, getattr(task, group_column) if group_column else None)
            counts = _select_keys(batch, tasks, task.item_frequency)
            losses = _compute_row_losses(task.loss, Rows(outputs, labels, weights, keys, counts))
        losses = losses * weights * torch.where(labels == 1, task.positive_weight, 1.0)
        total = total + task.weight * losses.sum() / len(batch)
    if own_loss and not any(task.loss.from_model for task in tasks):
        total = total + columns[:, task_columns].sum() / len(batch)
    return total


def _select_keys(batch: GlobalBatch, tasks: Sequence[Task], column: str | None) -> torch.Tensor | None:
    if column is None or batch.keys is None:
        return None
    return batch.keys[:, key_columns(tasks).index(column)]


def _compute_row_losses(loss_fn: Loss, rows: Rows) -> torch.Tensor:
    """Return the loss of each row, [n], without weights; logits are [n, columns of the task]."""
    key = next((key for key, kind in loss.parts.items() if kind is type(loss_fn)), None)
    if key in ROW_LOSSES:
        return ROW_LOSSES[key](loss_fn, rows.logits if key == "cross_entropy" else rows.logits.squeeze(1), rows.labels)
    if key in BATCH_LOSSES:
        return torch.stack([BATCH_LOSSES[key](loss_fn, rows, i) for i in range(len(rows.labels))])
    if key:
        raise RunError(
            f"loss {key} has no reference definition for the parity check",
            where=f"{__name__}: ROW_LOSSES, BATCH_LOSSES",
            expected="a function in plain torch for each loss of raytrec/tasks/losses",
            do=f"add '{key}' to BATCH_LOSSES if the loss compares rows, otherwise to ROW_LOSSES",
        )
    rows = rows._replace(logits=rows.logits.squeeze(1))
    if isinstance(loss_fn, BatchLoss):
        return loss_fn.of_batch(rows, slice(0, len(rows.labels)))
    return loss_fn.of_rows(rows.logits, rows.labels)


def _focal(loss_fn: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    p, y = logits.double().sigmoid(), labels.double()
    positive, negative = (1, 1) if loss_fn.alpha is None else (loss_fn.alpha, 1 - loss_fn.alpha)
    terms = positive * y * (1 - p) ** loss_fn.gamma * p.log()
    terms = terms + negative * (1 - y) * p**loss_fn.gamma * (1 - p).log()
    return -terms.to(logits.dtype)


def _bpr(_: Any, rows: Rows, i: int) -> torch.Tensor:
    lower = (rows.labels < rows.labels[i]) & (rows.weights > 0)
    if rows.keys is not None:
        lower &= rows.keys == rows.keys[i]
    if not lower.any():
        return rows.logits.sum() * 0
    differences = rows.logits[i, 0] - rows.logits[lower, 0]
    pair_losses = nn.BCEWithLogitsLoss(reduction="none")(differences, torch.ones_like(differences))
    return (pair_losses * rows.weights[lower]).sum() / rows.weights[lower].sum()


def _in_batch_softmax(loss_fn: Any, rows: Rows, i: int) -> torch.Tensor:
    queries, items = rows.logits.chunk(2, dim=1)
    scores = items @ queries[i] / loss_fn.temperature
    if rows.counts is not None:
        scores = scores - torch.tensor([max(int(n), 1) for n in rows.counts]).log()
    return _cross_entropy(scores, rows, True if rows.keys is None else rows.keys != rows.keys[i], i)


def _listwise_softmax(loss_fn: Any, rows: Rows, i: int) -> torch.Tensor:
    scores = rows.logits[:, 0] / loss_fn.temperature
    return _cross_entropy(scores, rows, True if rows.keys is None else rows.keys == rows.keys[i], i)


def _cross_entropy(scores: torch.Tensor, rows: Rows, is_compared: torch.Tensor | bool, i: int) -> torch.Tensor:
    """Return the loss of row i, whose score is compared with those of rows in `is_compared` with a weight > 0."""
    is_candidate = (rows.weights > 0) & is_compared
    is_candidate[i] = True
    candidates, label = is_candidate.nonzero().squeeze(1), rows.labels[i]
    return label * nn.CrossEntropyLoss()(scores[candidates].unsqueeze(0), (candidates == i).nonzero().squeeze(1))


ROW_LOSSES: dict[str, Callable] = {
    "bce": lambda _, x, y: nn.BCEWithLogitsLoss(reduction="none")(x, y),
    "mse": lambda _, x, y: nn.MSELoss(reduction="none")(x, y),
    "huber": lambda made, x, y: nn.HuberLoss(reduction="none", delta=made.delta)(x, y),
    "poisson": lambda _, x, y: nn.PoissonNLLLoss(reduction="none")(x, y),
    "cross_entropy": lambda _, x, y: nn.CrossEntropyLoss(reduction="none")(x, y.long()),
    "focal": _focal,
}
BATCH_LOSSES: dict[str, Callable] = {
    "bpr": _bpr,
    "in_batch_softmax": _in_batch_softmax,
    "listwise_softmax": _listwise_softmax,
}
