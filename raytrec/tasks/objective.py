"""Tasks → losses → each rank's part of the loss of a global batch.

    loss = Σ over the rows of the global batch of the row's loss ÷ rows of the global batch

Of requests with candidates, each candidate is a row here.

A row's loss counts by its weight in the task: 0 where it has no label or a mask excludes it, else its sample
weight. Such rows stay among those that are divided by. Losses of several tasks are multiplied by their
`weight` and added.

TorchRec divides table gradients by the world size (its gradient division stays on) and
DistributedDataParallel averages dense gradients over ranks. So each rank's loss is

    world_size × Σ over its own rows ÷ rows of the global batch

and both kinds of gradient become exactly those of the definition, for equal, unequal and empty parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from raytrec.common.collectives import Peers
from raytrec.common.errors import ConfigError
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.tasks.global_batch import compared_loss
from raytrec.tasks.losses import BatchLoss, Rows
from raytrec.tasks.outputs import Outputs, TaskOutputs
from raytrec.tasks.task import Task, check_model_learns, key_columns, resolve_tasks

OF_MODEL = ""  # in the place of a task's name: the model's own loss, where no task has it, and lookup_l2's


def rank_loss(
    losses_B: torch.Tensor, weights_B: torch.Tensor, rows: int | torch.Tensor, world: int, weight: float = 1.0
) -> torch.Tensor:
    """Return the scalar that one rank calls backward on.

    Args:
        losses_B: Loss of each row, float [B].
        weights_B: Factor of each row, float [B]; 0 for padding.
        rows: Rows of the global batch over all ranks, without padding.
        world: Number of ranks.
        weight: Factor of the task.
    """
    return (losses_B * weights_B).sum() * (weight * world / rows)


class Objective:
    """The weighted sum of the tasks' losses, each averaged over the global batch.

    What a model gives is called logits here: float32 [B], or [B, columns]: side by side the columns of each
    task, one or as many as it has classes; then the model's own loss of each row, if it gives one; then,
    where a loss reads vectors, those of the query and of the item.

    Args:
        tasks: at least one.
        world: number of ranks; 1 for a batch that is all in one process.
        keys: the columns that a batch's keys are of (task.key_columns); default: those of the tasks.
        own_loss: whether the model itself gives a loss, too (models/__init__.py). It counts for the rows of
            the task whose loss is from_model, with its weights; without such a task, for every row once.
        l2_factors: feature → factor of its vectors' squared length (ModelSection.lookup_l2).
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
        """The configuration's.

        Raises:
            ConfigError: as in `resolve_tasks` and `check_model_learns`.
        """
        tasks = resolve_tasks(config.tasks, schema)
        check_model_learns(tasks, config.model)
        keys = key_columns(tasks, config.eval.slices)
        return cls(tasks, world, keys, config.model.own_loss, config.model.l2_factors(schema))

    def losses(
        self, logits: torch.Tensor, batch: Batch, looked_up: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Task → its part of the scalar that a rank calls backward on (`total`).

        A collective where a loss compares rows of the global batch.

        Args:
            looked_up: feature → vectors, float32 [B, dim] or [B, L, dim] (PooledEmbeddings), some of which
                are penalized (lookup_l2); default: none are.

        Raises:
            ConfigError: the model does not give the columns that the tasks have.
        """
        parts: dict[str, torch.Tensor] = {}

        def add(name: str, own: torch.Tensor) -> None:
            parts[name] = parts[name] + own if name in parts else own

        weights = self._weights(batch)
        examples = batch.global_rows if batch.requests is None else self._examples(batch.labels)
        for task, own, own_B in zip(self.tasks, self._of_tasks(logits), weights, strict=True):
            labels_B = batch.labels[:, task.column]
            factors_B = task.factors(labels_B, own_B)
            if isinstance(task.loss, BatchLoss):
                key = self._key(getattr(task, task.loss.by) if task.loss.by else None, batch.keys)
                rows = Rows(own, labels_B, own_B, key, self._key(task.item_frequency, batch.keys))
                losses = compared_loss(task.loss, rows, factors_B, self.world)
                factors_B = losses.new_ones(())
            else:
                losses = task.loss.of_rows(own, labels_B)
            parts[task.name] = rank_loss(losses, factors_B, examples, self.world, task.weight)
        if self.own_loss:
            name = OF_MODEL if self._own_task is None else self.tasks[self._own_task].name
            add(name, self._of_model(logits, batch, weights))
        if looked_up is not None and self.l2_factors:
            lengths_B = self._lengths(looked_up)
            add(OF_MODEL, rank_loss(lengths_B, batch.weights, batch.global_rows, self.world))
        return parts

    def _examples(self, labels: torch.Tensor) -> torch.Tensor:
        """How many candidates the global batch has, at least 1; a collective."""
        own = labels.new_full((), len(labels))
        return Peers(own.device, alone=self.world == 1).sum(own).clamp(min=1)

    def _lengths(self, looked_up: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Half of each row's Σ factor · ‖vector‖², float32 [B]."""
        of_features = (
            factor / 2 * looked_up[feature].float().square().flatten(1).sum(1)
            for feature, factor in self.l2_factors.items()
        )
        return torch.stack(list(of_features)).sum(0)

    def _of_model(self, logits: torch.Tensor, batch: Batch, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the model's own loss adds.

        Args:
            weights: of the rows in each task.
        """
        weights_B, weight = batch.weights, 1.0
        if self._own_task is not None:
            task = self.tasks[self._own_task]
            labels_B, weight = batch.labels[:, task.column], task.weight
            weights_B = task.factors(labels_B, weights[self._own_task]) * labels_B
        return rank_loss(logits[:, sum(self._widths)], weights_B, batch.global_rows, self.world, weight)

    def _key(self, column: str | None, keys: torch.Tensor | None) -> torch.Tensor | None:
        """The keys of a column, int64 [B]; None where a task names none."""
        return None if column is None or keys is None else keys[:, self.keys.index(column)]

    def outputs(
        self,
        loss: torch.Tensor,
        logits: torch.Tensor,
        batch: Batch,
        losses: Mapping[str, torch.Tensor] | None = None,
    ) -> Outputs:
        """What the metrics are given of a step.

        Args:
            loss: the sum of its losses.
            losses: what `losses` gave; default: none are wanted.
        """
        rows_of_rank = batch.global_rows / self.world
        parts = {name: part.detach() * rows_of_rank for name, part in (losses or {}).items()}
        # In training there are no keys of slices, which come last.
        keys = batch.keys if batch.keys is None or batch.requests is None else batch.keys[batch.requests]
        of_column = {} if keys is None else dict(zip(self.keys, keys.unbind(1), strict=False))
        tasks = {}
        of_tasks = zip(self.tasks, self._of_tasks(logits.detach()), self._weights(batch), strict=True)
        for task, given, own_B in of_tasks:
            logits_B = task.calibrated(given)
            predictions = task.loss.predict(logits_B)
            tasks[task.name] = TaskOutputs(
                logits_B, predictions, batch.labels[:, task.column], own_B, of_column
            )
        return Outputs(tasks, batch.weights, loss.detach(), losses=parts)

    def predictions(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Task → what its logits mean in the label's units: float32 [B], or [B, classes]."""
        of_tasks = zip(self.tasks, self._of_tasks(logits), strict=True)
        return {task.name: task.loss.predict(task.calibrated(given)) for task, given in of_tasks}

    def _weights(self, batch: Batch) -> Sequence[torch.Tensor]:
        """The weights of each task's rows, [B]."""
        if batch.task_weights is not None:
            return batch.task_weights.unbind(1)
        each = batch.weights if batch.requests is None else batch.labels.new_ones(len(batch.labels))
        return [each] * len(self.tasks)

    def _of_tasks(self, logits: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each task's part of the model's output: [B], [B, classes], or vectors [B, 2·D]."""
        columns, vectors = sum(self._widths), len(self._widths) < len(self.tasks)
        if logits.dim() == 1 and columns == 1 and not vectors and not self.own_loss:
            return (logits,)
        before = columns + self.own_loss
        beside = logits.shape[1] - before if logits.dim() == 2 else -1
        if beside < 0 or beside % 2 or (beside > 0) != vectors:
            raise self._other_shape(logits, before, vectors)
        if before == len(self.tasks) and not vectors and not self.own_loss:
            return logits.unbind(1)
        # torch.export does not load a split into no parts.
        parts = iter(logits[:, :columns].split(self._widths, 1) if self._widths else ())
        return [
            logits[:, before:] if task.loss.reads_vectors else next(parts).squeeze(1) for task in self.tasks
        ]

    def _other_shape(self, logits: torch.Tensor, columns: int, vectors: bool) -> ConfigError:
        shape = ", ".join(map(str, logits.shape))
        one = "[rows]" if columns == 1 else f"[rows, {columns}]"
        return ConfigError(
            f"the model gives logits of shape [{shape}] for {len(self.tasks)} tasks",
            where="model.name, tasks",
            expected=f"[rows, {columns} + 2 · width of a vector]" if vectors else one,
            do="give the model an output for each entry of tasks, and for each class, or change tasks"
            + ("; its own loss is the column after them" if self.own_loss else ""),
        )


def total(losses: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The scalar that a rank calls backward on: the sum of `Objective.losses`."""
    first, *others = losses.values()
    for part in others:
        first = first + part
    return first


class Scoring(Objective):
    """The tasks' predictions alone. There are no labels, and so no loss; no part of it is a collective."""

    def losses(
        self, logits: torch.Tensor, batch: Batch, looked_up: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """0."""
        return {self.tasks[0].name: logits.new_zeros(())}

    def outputs(
        self,
        loss: torch.Tensor,
        logits: torch.Tensor,
        batch: Batch,
        losses: Mapping[str, torch.Tensor] | None = None,
    ) -> Outputs:
        """Labels are 0, and every row counts in every task."""
        labels = batch.labels.new_zeros(len(batch.labels), 1 + max(task.column for task in self.tasks))
        unlabelled = replace(batch, labels=labels, task_weights=None, keys=None)
        return super().outputs(loss, logits, unlabelled, losses)
