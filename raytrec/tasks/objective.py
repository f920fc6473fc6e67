"""Each rank's part of the loss of a global batch, combined from the losses of all tasks.

    loss = Σ over the rows of the global batch of the row's loss ÷ rows of the global batch

If rows are requests with candidates, each candidate counts as a row in this module.

A row's loss is multiplied by the row's weight in the task. The weight is 0 if the row has no label or a mask
excludes the row; otherwise, it is the sample weight. The divisor includes rows with weight 0. The losses of
several tasks are multiplied by the tasks' `weight` and added.

TorchRec divides table gradients by the world size (gradient division stays on), and DistributedDataParallel
averages dense gradients over ranks. Therefore, each rank's loss is

    world_size × Σ over the rank's rows ÷ rows of the global batch

and both kinds of gradients equal the gradient of the loss defined above, even if ranks have different numbers of rows
or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import nn

from raytrec.common.collectives import Peers
from raytrec.common.errors import ConfigError
from raytrec.common.formatting import format_count
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.tasks.global_batch import compute_batch_loss, equalize_rows
from raytrec.tasks.losses import BatchLoss, Rows
from raytrec.tasks.outputs import StepOutputs, TaskOutputs
from raytrec.tasks.task import Task, check_model_learns, key_columns, resolve_tasks

TEMPERATURES = "loss_log_temperatures"  # parameter of the model that `add_temperatures` adds
MODEL_LOSS_KEY = ""  # key, instead of a task name, for lookup_l2 and for a model's own loss that no task uses


def rank_loss(
    losses_B: torch.Tensor, weights_B: torch.Tensor, rows: int | torch.Tensor, world: int, weight: float = 1.0
) -> torch.Tensor:
    """Return one rank's loss (see the module), the scalar on which the rank calls backward.

    Args:
        losses_B: Loss of each row, float [B].
        weights_B: Factor of each row's loss, float [B]; 0 for padding.
        rows: Number of rows in the global batch, or of candidates if rows are requests; without padding.
        world: Number of ranks.
        weight: Factor of the task's loss.
    """
    return (losses_B * weights_B).sum() * (weight * world / rows)


def add_temperatures(model: nn.Module, tasks: Sequence[Task]) -> None:
    """Add a parameter with the logarithm of each learned temperature (initially 0), if any, to a dense model."""
    if count := sum(task.loss.learns_temperature for task in tasks):
        device = next((p.device for p in model.parameters()), None)
        model.register_parameter(TEMPERATURES, nn.Parameter(torch.zeros(count, device=device)))


class Objective:
    """Weighted sum of the tasks' losses, the model's own loss and L2 penalties, averaged over the global batch.

    The model's output, float32 [B] or [B, columns], is called logits here. The first columns are the logits of
    the tasks, with one column per task or class. If the model computes a loss, it is the next column. If a loss
    reads vectors, the last columns are the vectors of query and item.

    Args:
        tasks: Tasks, at least one.
        world: Number of ranks; 1 if the whole batch is in one process.
        keys: Names of the columns of Batch.keys (task.key_columns); default: the columns of the tasks.
        own_loss: True if the model outputs a loss itself (models/__init__.py). The model's loss for a row is
            multiplied by the row's label and weight in the task with loss from_model. Without such a task,
            every row has the factor 1.
        l2_factors: Feature → factor of half the squared norm of its vectors (ModelSection.lookup_l2).
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        world: int = 1,
        keys: Sequence[str] | None = None,
        own_loss: bool = False,
        l2_factors: Mapping[str, float] | None = None,
    ):
        self.tasks, self.world, self.own_loss = tuple(tasks), world, own_loss
        self.l2_factors = dict(l2_factors or {})
        self.keys = key_columns(tasks) if keys is None else tuple(keys)
        self._own_task = next((place for place, task in enumerate(tasks) if task.loss.from_model), None)
        self._widths = [task.outputs for task in tasks if not task.loss.reads_vectors]

    @classmethod
    def of(cls, config: RunConfig, schema: Schema, world: int = 1) -> Objective:
        """Return the objective of a configuration.

        Raises:
            ConfigError: See `resolve_tasks`, `check_model_learns` and ModelSection.l2_factors.
        """
        tasks = resolve_tasks(config.tasks, schema)
        check_model_learns(tasks, config.model)
        keys = key_columns(tasks, config.eval.slices)
        return cls(tasks, world, keys, config.model.own_loss, config.model.l2_factors(schema))

    def losses(
        self,
        logits: torch.Tensor,
        batch: Batch,
        looked_up: Mapping[str, torch.Tensor] | None = None,
        log_temperatures: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return this rank's loss of each task, by name. A rank calls backward on the sum of the losses (`total`).

        Losses that belong to no task have the key MODEL_LOSS_KEY.

        If a loss compares rows of the global batch, or if rows are requests with candidates, this is a collective
        operation, which every rank must call.

        Args:
            logits: Output of the model.
            batch: Batch of this rank.
            looked_up: Feature → vectors that lookup_l2 penalizes, float32 [B, dim] or [B, L, dim]
                (PooledEmbeddings); None: no vectors are penalized.
            log_temperatures: Logarithms of the learned temperatures, in the order of their tasks
                (`add_temperatures`), float32 [n]; None: the logits are not scaled.

        Raises:
            ConfigError: The number of columns of `logits` does not match the tasks.
        """
        parts: dict[str, torch.Tensor] = {}

        def add(name: str, part: torch.Tensor) -> None:
            parts[name] = parts[name] + part if name in parts else part

        weights = self._weights(batch)
        examples = batch.global_rows if batch.requests is None else self._count_examples(batch.labels)
        scales = iter(() if log_temperatures is None else (-log_temperatures).unbind())
        for task, task_logits, weights_B in zip(self.tasks, self._split_logits(logits), weights, strict=True):
            if task.loss.learns_temperature and (scale := next(scales, None)) is not None:
                # A score is the dot product of two vectors, each of which is scaled by the square root of the factor.
                task_logits = task_logits * (scale / 2 if task.loss.reads_vectors else scale).exp()
            labels_B = batch.labels[:, task.column]
            factors_B = task.factors(labels_B, weights_B)
            if isinstance(task.loss, BatchLoss):
                key = self._select_keys(getattr(task, task.loss.by) if task.loss.by else None, batch.keys)
                rows = Rows(task_logits, labels_B, weights_B, key, self._select_keys(task.item_frequency, batch.keys))
                counts = None
                if batch.requests is not None and task.loss.by == "group":
                    rows, counts = rows._replace(keys=batch.requests), batch.candidate_counts.tolist()
                elif batch.requests is not None:
                    rows, factors_B = equalize_rows(rows, factors_B, self.world)
                losses = compute_batch_loss(task.loss, rows, factors_B, self.world, counts)
                factors_B = losses.new_ones(())
            else:
                losses = task.loss.of_rows(task_logits, labels_B)
            parts[task.name] = rank_loss(losses, factors_B, examples, self.world, task.weight)
        if self.own_loss:
            name = MODEL_LOSS_KEY if self._own_task is None else self.tasks[self._own_task].name
            add(name, self._model_loss(logits, batch, weights))
        if looked_up is not None and self.l2_factors:
            # Σ factor ÷ 2 · ‖vector‖² over the penalized vectors of each row.
            squares = [
                factor / 2 * looked_up[f].float().square().flatten(1).sum(1) for f, factor in self.l2_factors.items()
            ]
            norms_B = torch.stack(squares).sum(0)
            add(MODEL_LOSS_KEY, rank_loss(norms_B, batch.weights, batch.global_rows, self.world))
        return parts

    def _count_examples(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the number of candidates in the global batch, at least 1.

        This is a collective operation: every rank must call it.
        """
        count = labels.new_full((), len(labels))
        return Peers(count.device, alone=self.world == 1).sum(count).clamp(min=1)

    def _model_loss(self, logits: torch.Tensor, batch: Batch, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of the model's own loss.

        Args:
            logits: Output of the model.
            batch: Batch of this rank.
            weights: Weights of the rows in each task, [B] each.
        """
        weights_B, weight = batch.weights, 1.0
        if self._own_task is not None:
            task = self.tasks[self._own_task]
            labels_B, weight = batch.labels[:, task.column], task.weight
            weights_B = task.factors(labels_B, weights[self._own_task]) * labels_B
        return rank_loss(logits[:, sum(self._widths)], weights_B, batch.global_rows, self.world, weight)

    def _select_keys(self, column: str | None, keys: torch.Tensor | None) -> torch.Tensor | None:
        """Return the keys of a column, int64 [B]; None if the column is None or the batch has no keys."""
        return None if column is None or keys is None else keys[:, self.keys.index(column)]

    def outputs(
        self, loss: torch.Tensor, logits: torch.Tensor, batch: Batch, losses: Mapping[str, torch.Tensor] | None = None
    ) -> StepOutputs:
        """Return the detached outputs of a step, from which metrics are computed.

        Args:
            loss: This rank's loss in the step (`total`).
            logits: Output of the model.
            batch: Batch of this rank.
            losses: Result of `losses`; None: the outputs contain no task losses.

        Raises:
            ConfigError: The number of columns of `logits` does not match the tasks.
        """
        rows_of_rank = batch.global_rows / self.world
        parts = {name: part.detach() * rows_of_rank for name, part in (losses or {}).items()}
        # Batches in training contain no keys of slices, which are the last columns; hence strict=False below.
        keys = batch.keys if batch.keys is None or batch.requests is None else batch.keys[batch.requests]
        column_keys = {} if keys is None else dict(zip(self.keys, keys.unbind(1), strict=False))
        tasks = {}
        per_task = zip(self.tasks, self._split_logits(logits.detach()), self._weights(batch), strict=True)
        for task, task_logits, weights_B in per_task:
            logits_B = task.calibrate(task_logits)
            predictions = task.loss.predict(logits_B)
            tasks[task.name] = TaskOutputs(logits_B, predictions, batch.labels[:, task.column], weights_B, column_keys)
        return StepOutputs(tasks, batch.weights, loss.detach(), losses=parts)

    def predictions(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the predictions by task, in the label's units, float32 [B] or [B, classes].

        Raises:
            ConfigError: The number of columns of `logits` does not match the tasks.
        """
        per_task = zip(self.tasks, self._split_logits(logits), strict=True)
        return {task.name: task.loss.predict(task.calibrate(task_logits)) for task, task_logits in per_task}

    def _weights(self, batch: Batch) -> Sequence[torch.Tensor]:
        """Return the weights of the rows in each task, float32 [B] each."""
        if batch.task_weights is not None:
            return batch.task_weights.unbind(1)
        row_weights = batch.weights if batch.requests is None else batch.labels.new_ones(len(batch.labels))
        return [row_weights] * len(self.tasks)

    def _split_logits(self, logits: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each task's part of the model's output: [B], [B, classes], or vectors [B, 2·D].

        Raises:
            ConfigError: The number of columns of `logits` does not match the tasks.
        """
        columns, vectors = sum(self._widths), len(self._widths) < len(self.tasks)
        if logits.dim() == 1 and columns == 1 and not vectors and not self.own_loss:
            return (logits,)
        scalars = columns + self.own_loss
        vector_columns = logits.shape[1] - scalars if logits.dim() == 2 else -1
        if vector_columns < 0 or vector_columns % 2 or (vector_columns > 0) != vectors:
            raise self._shape_error(logits, scalars, vectors)
        if scalars == len(self.tasks) and not vectors and not self.own_loss:
            return logits.unbind(1)
        # torch.export cannot load a split into zero parts.
        parts = iter(logits[:, :columns].split(self._widths, 1) if self._widths else ())
        return [logits[:, scalars:] if task.loss.reads_vectors else next(parts).squeeze(1) for task in self.tasks]

    def _shape_error(self, logits: torch.Tensor, columns: int, vectors: bool) -> ConfigError:
        shape = ", ".join(map(str, logits.shape))
        scalar_shape = "[rows] or [rows, 1]" if columns == 1 else f"[rows, {columns}]"
        vector_shape = f"[rows, {f'{columns} + ' * bool(columns)}2 · width of a vector]"
        return ConfigError(
            f"the model returns logits of shape [{shape}] for {format_count(len(self.tasks), 'task')}",
            where="model.name, tasks",
            expected=f"shape {vector_shape if vectors else scalar_shape}",
            do="make the model return one output per task, or per class of a task, or change tasks"
            + ("; the model's own loss is the column after these outputs" if self.own_loss else "")
            + ("; the vectors of query and item are the last columns" if vectors else ""),
        )


def total(losses: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the losses returned by `Objective.losses`, on which a rank calls backward."""
    return reduce(torch.add, losses.values())


class ScoringObjective(Objective):
    """Objective for predictions, which have neither labels nor losses. No method is a collective operation."""

    def losses(self, logits: torch.Tensor, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        """Return a loss of 0 for the first task, because there are no labels."""
        return {self.tasks[0].name: logits.new_zeros(())}

    def outputs(
        self, loss: torch.Tensor, logits: torch.Tensor, batch: Batch, losses: Mapping[str, torch.Tensor] | None = None
    ) -> StepOutputs:
        """Return the outputs of a step, in which all labels are 0, no task ignores a row, and rows have no keys.

        Raises:
            ConfigError: The number of columns of `logits` does not match the tasks.
        """
        labels = batch.labels.new_zeros(len(batch.labels), 1 + max(task.column for task in self.tasks))
        unlabelled = replace(batch, labels=labels, task_weights=None, keys=None)
        return super().outputs(loss, logits, unlabelled, losses)
