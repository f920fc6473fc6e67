"""Loss of a global batch from its definition, in plain torch and independent of raytrec's objective.

Losses of single rows are those of torch.nn. Losses that compare rows are computed row by row. Each loss of
raytrec has its definition in OF_ROWS or BATCH_LOSSES. A user's loss is its own definition: parity then
compares only the summation over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from raytrec.checks.parity.batches import GlobalBatch
from raytrec.common.errors import RunError
from raytrec.tasks.losses import BatchLoss, Loss, Rows, loss
from raytrec.tasks.task import Task, key_columns


def compute_loss(
    tasks: Sequence[Task], logits: torch.Tensor, batch: GlobalBatch, own_loss: bool = False
) -> torch.Tensor:
    """Return the loss of a global batch.

    Args:
        tasks: Tasks of the run.
        logits: Output of the model, [B] or [B, columns].
        batch: The global batch.
        own_loss: True if the column after those of the tasks is a loss computed by the model.
    """
    total, first = logits.new_zeros(()), 0
    columns = logits if logits.dim() == 2 else logits.unsqueeze(1)
    beside = sum(task.outputs for task in tasks if not task.loss.reads_vectors)
    for place, task in enumerate(tasks):
        own = columns[:, beside + own_loss :]
        if not task.loss.reads_vectors:
            own, first = columns[:, first : first + task.outputs], first + task.outputs
        labels, weights = batch.labels[:, task.column], _select_weights(batch, place)
        by = getattr(task.loss, "by", None)
        keys = _select_keys(batch, tasks, getattr(task, by) if by else None)
        counts = _select_keys(batch, tasks, task.item_frequency)
        losses = _compute_row_losses(task.loss, own, labels, weights, keys, counts)
        losses = losses * weights * torch.where(labels == 1, task.positive_weight, 1.0)
        total = total + task.weight * losses.sum() / len(batch)
    return total + _compute_model_loss(tasks, columns[:, first], batch) if own_loss else total


def _compute_model_loss(tasks: Sequence[Task], losses: torch.Tensor, batch: GlobalBatch) -> torch.Tensor:
    """Return the loss computed by the model.

    Args:
        tasks: Tasks of the run.
        losses: Column of the model's output with its loss, [B].
        batch: The global batch.
    """
    mine = [(place, task) for place, task in enumerate(tasks) if task.loss.from_model]
    if not mine:
        return losses.sum() / len(batch)
    ((place, task),) = mine
    labels, weights = batch.labels[:, task.column], _select_weights(batch, place)
    losses = losses * labels * weights * torch.where(labels == 1, task.positive_weight, 1.0)
    return task.weight * losses.sum() / len(batch)


def _select_weights(rows: GlobalBatch, place: int) -> torch.Tensor:
    return rows.labels.new_ones(len(rows)) if rows.weights is None else rows.weights[:, place]


def _select_keys(rows: GlobalBatch, tasks: Sequence[Task], column: str | None) -> torch.Tensor | None:
    if column is None or rows.keys is None:
        return None
    return rows.keys[:, key_columns(tasks).index(column)]


def _compute_row_losses(
    made: Loss, own: torch.Tensor, labels: torch.Tensor, weights, keys, counts
) -> torch.Tensor:
    """Return the loss of each row, [n]; `own` is [n, columns of the task]."""
    name = next((name for name, kind in loss.parts.items() if kind is type(made)), None)
    if name in OF_ROWS:
        return OF_ROWS[name](made, own if name == "cross_entropy" else own.squeeze(1), labels)
    if name in BATCH_LOSSES:
        return torch.stack(
            [BATCH_LOSSES[name](made, own, labels, weights, keys, counts, i) for i in range(len(labels))]
        )
    if name:
        raise RunError(
            f"loss {name} has no reference definition for the parity check",
            where=f"{__name__}.OF_ROWS, BATCH_LOSSES",
            expected="a function in plain torch for each loss of raytrec/tasks/losses",
            do=f"add '{name}' to BATCH_LOSSES if the loss compares rows, otherwise to OF_ROWS",
        )
    own = own.squeeze(1)
    if isinstance(made, BatchLoss):
        return made.of_batch(Rows(own, labels, weights, keys, counts), slice(0, len(labels)))
    return made.of_rows(own, labels)


def _focal(made: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    p, y = logits.double().sigmoid(), labels.double()
    positive, negative = (1, 1) if made.alpha is None else (made.alpha, 1 - made.alpha)
    terms = positive * y * (1 - p) ** made.gamma * p.log()
    terms = terms + negative * (1 - y) * p**made.gamma * (1 - p).log()
    return -terms.to(logits.dtype)


def _bpr(_: Any, own: torch.Tensor, labels: torch.Tensor, weights, keys, counts, i: int) -> torch.Tensor:
    lower = (labels < labels[i]) & (weights > 0)
    if keys is not None:
        lower &= keys == keys[i]
    if not lower.any():
        return own.sum() * 0
    apart = own[i, 0] - own[lower, 0]
    each = nn.BCEWithLogitsLoss(reduction="none")(apart, torch.ones_like(apart))
    return (each * weights[lower]).sum() / weights[lower].sum()


def _in_batch_softmax(made: Any, own: torch.Tensor, labels: torch.Tensor, weights, keys, counts, i: int):
    query, item = own[i, : own.shape[1] // 2], own[:, own.shape[1] // 2 :]
    held = weights > 0
    if keys is not None:
        held = held & (keys != keys[i])
    held[i] = True
    places = held.nonzero().squeeze(1)
    scores = item[places] @ query / made.temperature
    if counts is not None:
        scores = scores - torch.tensor([max(int(n), 1) for n in counts[places]]).log()
    return labels[i] * nn.CrossEntropyLoss()(scores.unsqueeze(0), (places == i).nonzero().squeeze(1))


OF_ROWS: dict[str, Callable] = {
    "bce": lambda _, x, y: nn.BCEWithLogitsLoss(reduction="none")(x, y),
    "mse": lambda _, x, y: nn.MSELoss(reduction="none")(x, y),
    "huber": lambda made, x, y: nn.HuberLoss(reduction="none", delta=made.delta)(x, y),
    "poisson": lambda _, x, y: nn.PoissonNLLLoss(reduction="none")(x, y),
    "cross_entropy": lambda _, x, y: nn.CrossEntropyLoss(reduction="none")(x, y.long()),
    "focal": _focal,
    "from_model": lambda _, x, y: torch.zeros_like(x),  # _compute_model_loss adds the model's own loss
}
BATCH_LOSSES: dict[str, Callable] = {"bpr": _bpr, "in_batch_softmax": _in_batch_softmax}
