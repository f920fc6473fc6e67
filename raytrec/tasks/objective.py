"""What is minimised: tasks → losses → the one scalar of a global batch, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raytrec.common.errors import ConfigError
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.gradients import rank_loss
from raytrec.tasks.outputs import Outputs, TaskOutputs, Verdict
from raytrec.tasks.task import Task, key_columns, resolve_tasks


class Objective:
    """The weighted sum of the tasks' losses, each summed or averaged over the global batch (gradients.py).

    Args:
        tasks: at least one.
        reduction: over the rows of the global batch: mean or sum.
        world: number of ranks; 1 for a batch that is all in one process.
        keys: the columns that a batch's keys are of (task.key_columns); default: those of the tasks.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        reduction: str = "mean",
        world: int = 1,
        keys: Sequence[str] | None = None,
    ):
        self.tasks, self.reduction, self.world = tuple(tasks), reduction, world
        self.keys = key_columns(tasks) if keys is None else tuple(keys)

    @classmethod
    def of(cls, config: RunConfig, schema: Schema, world: int = 1) -> Objective:
        """The configuration's.

        Raises:
            ConfigError: as in `resolve_tasks`.
        """
        return cls(resolve_tasks(config.tasks, schema), config.train.loss_reduction, world)

    def loss(
        self,
        logits: torch.Tensor,
        labels_BL: torch.Tensor,
        weights_B: torch.Tensor,
        global_rows: int,
        task_weights: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The scalar that a rank calls backward on, for some of its rows or all.

        Args:
            logits: float32 [B], or [B, T] with a column for each task.
            labels_BL: float32 [B, labels of the schema].
            weights_B: float32 [B]; 1 for a row and 0 for padding.
            global_rows: rows of the global batch over all ranks, padding not counted.
            task_weights: float32 [B, T], the row's factor in each task; None: weights_B in all of them.
            keys: int64 [B, K] of the columns `keys`; None where no task has any.

        Raises:
            ConfigError: the model does not give one logit for each task.
        """
        total = None
        weights = self._weights(weights_B, task_weights)
        for task, logits_B, own_B in zip(self.tasks, self._of_tasks(logits), weights, strict=True):
            losses_B = task.loss.of_rows(logits_B, labels_BL[:, task.column])
            part = rank_loss(losses_B, own_B, global_rows, self.world, self.reduction, task.weight)
            total = part if total is None else total + part
        return total

    def outputs(
        self,
        loss: torch.Tensor,
        logits: torch.Tensor,
        labels_BL: torch.Tensor,
        weights_B: torch.Tensor,
        verdict: Verdict | None = None,
        task_weights: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
    ) -> Outputs:
        """What the metrics are given of a step; shapes as in `loss`."""
        loss, logits = loss.detach(), logits.detach()
        if verdict is not None:
            loss, logits, weights_B = (x.masked_fill(verdict.mask, 0) for x in (loss, logits, weights_B))
            labels_BL = labels_BL.nan_to_num()
            if task_weights is not None:
                task_weights = task_weights.masked_fill(verdict.mask, 0)
        of_column = {} if keys is None else dict(zip(self.keys, keys.unbind(1), strict=True))
        weights = self._weights(weights_B, task_weights)
        tasks = {
            task.name: TaskOutputs(
                logits_B, task.predict(logits_B), labels_BL[:, task.column], own_B, of_column
            )
            for task, logits_B, own_B in zip(self.tasks, self._of_tasks(logits), weights, strict=True)
        }
        return Outputs(tasks, weights_B, loss, verdict)

    def _weights(self, weights_B: torch.Tensor, task_weights: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """The weights of each task's rows, [B]."""
        return [weights_B] * len(self.tasks) if task_weights is None else task_weights.unbind(1)

    def _of_tasks(self, logits: torch.Tensor) -> Sequence[torch.Tensor]:
        """The logits of each task, [B]."""
        count = len(self.tasks)
        if logits.dim() == 1 and count == 1:
            return (logits,)
        if logits.dim() == 2 and logits.shape[1] == count:
            return logits.unbind(1)
        raise ConfigError(
            f"the model gives logits of shape [{', '.join(map(str, logits.shape))}] for {count} tasks",
            where="model.name, tasks",
            expected="[rows]" if count == 1 else f"[rows, {count}]",
            do="give the model an output for each entry of tasks, or change tasks",
        )
