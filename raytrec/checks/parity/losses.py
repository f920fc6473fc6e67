"""Compute the loss of a global batch from its definition, in plain torch and without raytrec's objective.

Losses of single rows use torch.nn where available. Losses that compare rows are computed row by row.
ROW_LOSSES and BATCH_LOSSES define each loss of raytrec. A user's loss is its own reference, so parity compares
only the summation over rows.
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
    """Return the loss of a global batch.

    Args:
        tasks: Tasks of the run.
        logits: Output of the model, [B] or [B, columns].
        batch: The global batch.
        own_loss: True if the column after the tasks' columns is a loss computed by the model.
        temperatures: Temperature of each task whose loss learns a temperature, in the order of `tasks`.
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
        labels, weights = batch.labels[:, task.column], _select_weights(batch, index)
        group_column = getattr(task.loss, "by", None)
        keys = _select_keys(batch, tasks, getattr(task, group_column) if group_column else None)
        counts = _select_keys(batch, tasks, task.item_frequency)
        losses = _compute_row_losses(task.loss, outputs, labels, weights, keys, counts)
        losses = losses * weights * torch.where(labels == 1, task.positive_weight, 1.0)
        total = total + task.weight * losses.sum() / len(batch)
    return total + _compute_model_loss(tasks, columns[:, first], batch) if own_loss else total


def _compute_model_loss(tasks: Sequence[Task], losses: torch.Tensor, batch: GlobalBatch) -> torch.Tensor:
    """Return the contribution of the model's own loss to the global loss.

    Args:
        tasks: Tasks of the run.
        losses: Column of the model's output that contains its loss, [B].
        batch: The global batch.
    """
    model_tasks = [(index, task) for index, task in enumerate(tasks) if task.loss.from_model]
    if not model_tasks:
        return losses.sum() / len(batch)
    ((index, task),) = model_tasks
    labels, weights = batch.labels[:, task.column], _select_weights(batch, index)
    losses = losses * labels * weights * torch.where(labels == 1, task.positive_weight, 1.0)
    return task.weight * losses.sum() / len(batch)


def _select_weights(rows: GlobalBatch, place: int) -> torch.Tensor:
    return rows.labels.new_ones(len(rows)) if rows.weights is None else rows.weights[:, place]


def _select_keys(rows: GlobalBatch, tasks: Sequence[Task], column: str | None) -> torch.Tensor | None:
    if column is None or rows.keys is None:
        return None
    return rows.keys[:, key_columns(tasks).index(column)]


def _compute_row_losses(
    loss_fn: Loss, logits: torch.Tensor, labels: torch.Tensor, weights, keys, counts
) -> torch.Tensor:
    """Return the loss of each row, [n], from logits [n, columns of the task]."""
    key = next((key for key, kind in loss.parts.items() if kind is type(loss_fn)), None)
    if key in ROW_LOSSES:
        return ROW_LOSSES[key](loss_fn, logits if key == "cross_entropy" else logits.squeeze(1), labels)
    if key in BATCH_LOSSES:
        return torch.stack(
            [BATCH_LOSSES[key](loss_fn, logits, labels, weights, keys, counts, i) for i in range(len(labels))]
        )
    if key:
        raise RunError(
            f"loss {key} has no reference definition for the parity check",
            where=f"{__name__}: ROW_LOSSES, BATCH_LOSSES",
            expected="a function in plain torch for each loss of raytrec/tasks/losses",
            do=f"add '{key}' to BATCH_LOSSES if the loss compares rows, otherwise to ROW_LOSSES",
        )
    logits = logits.squeeze(1)
    if isinstance(loss_fn, BatchLoss):
        return loss_fn.of_batch(Rows(logits, labels, weights, keys, counts), slice(0, len(labels)))
    return loss_fn.of_rows(logits, labels)


def _focal(loss_fn: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    p, y = logits.double().sigmoid(), labels.double()
    positive, negative = (1, 1) if loss_fn.alpha is None else (loss_fn.alpha, 1 - loss_fn.alpha)
    terms = positive * y * (1 - p) ** loss_fn.gamma * p.log()
    terms = terms + negative * (1 - y) * p**loss_fn.gamma * (1 - p).log()
    return -terms.to(logits.dtype)


def _bpr(_: Any, logits: torch.Tensor, labels: torch.Tensor, weights, keys, counts, i: int) -> torch.Tensor:
    lower = (labels < labels[i]) & (weights > 0)
    if keys is not None:
        lower &= keys == keys[i]
    if not lower.any():
        return logits.sum() * 0
    differences = logits[i, 0] - logits[lower, 0]
    pair_losses = nn.BCEWithLogitsLoss(reduction="none")(differences, torch.ones_like(differences))
    return (pair_losses * weights[lower]).sum() / weights[lower].sum()


def _in_batch_softmax(loss_fn: Any, pairs: torch.Tensor, labels: torch.Tensor, weights, keys, counts, i: int):
    query, item = pairs[i, : pairs.shape[1] // 2], pairs[:, pairs.shape[1] // 2 :]
    scores = item @ query / loss_fn.temperature
    if counts is not None:
        scores = scores - torch.tensor([max(int(n), 1) for n in counts]).log()
    return _cross_entropy(scores, labels, weights > 0 if keys is None else (weights > 0) & (keys != keys[i]), i)


def _listwise_softmax(loss_fn: Any, logits: torch.Tensor, labels: torch.Tensor, weights, keys, counts, i: int):
    scores = logits[:, 0] / loss_fn.temperature
    return _cross_entropy(scores, labels, weights > 0 if keys is None else (weights > 0) & (keys == keys[i]), i)


def _cross_entropy(scores: torch.Tensor, labels: torch.Tensor, is_candidate: torch.Tensor, i: int) -> torch.Tensor:
    is_candidate[i] = True
    candidates = is_candidate.nonzero().squeeze(1)
    return labels[i] * nn.CrossEntropyLoss()(scores[candidates].unsqueeze(0), (candidates == i).nonzero().squeeze(1))


ROW_LOSSES: dict[str, Callable] = {
    "bce": lambda _, x, y: nn.BCEWithLogitsLoss(reduction="none")(x, y),
    "mse": lambda _, x, y: nn.MSELoss(reduction="none")(x, y),
    "huber": lambda made, x, y: nn.HuberLoss(reduction="none", delta=made.delta)(x, y),
    "poisson": lambda _, x, y: nn.PoissonNLLLoss(reduction="none")(x, y),
    "cross_entropy": lambda _, x, y: nn.CrossEntropyLoss(reduction="none")(x, y.long()),
    "focal": _focal,
    "from_model": lambda _, x, y: torch.zeros_like(x),  # _compute_model_loss adds the model's own loss
}
BATCH_LOSSES: dict[str, Callable] = {
    "bpr": _bpr,
    "in_batch_softmax": _in_batch_softmax,
    "listwise_softmax": _listwise_softmax,
}
