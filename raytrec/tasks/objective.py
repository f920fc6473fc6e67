"""What is minimised: tasks → losses → the one scalar of a global batch, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from raytrec.common.errors import ConfigError
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.gradients import rank_loss
from raytrec.tasks.global_batch import NOTHING, Whole, compare, total_weights
from raytrec.tasks.losses import BatchLoss, Rows
from raytrec.tasks.options import check_model_learns
from raytrec.tasks.outputs import Outputs, TaskOutputs, Verdict
from raytrec.tasks.task import Task, key_columns, resolve_tasks

OF_MODEL = ""  # in the place of a task's name: the model's own loss, where no task has it


class Objective:
    """The weighted sum of the tasks' losses, each summed or averaged over the global batch (gradients.py).

    Args:
        tasks: at least one.
        reduction: over the rows of the global batch: mean or sum.
        world: number of ranks; 1 for a batch that is all in one process.
        keys: the columns that a batch's keys are of (task.key_columns); default: those of the tasks.
        own_loss: whether the model gives a loss of its own, too (models/__init__.py). It counts for the rows
            of the task whose loss is from_model, with its weights; without such a task, for every row once.

    Attributes:
        compares: whether a loss compares rows of the global batch, so that it needs the logits of all.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        reduction: str = "mean",
        world: int = 1,
        keys: Sequence[str] | None = None,
        own_loss: bool = False,
    ):
        self.tasks, self.reduction, self.world = tuple(tasks), reduction, world
        self.keys = key_columns(tasks) if keys is None else tuple(keys)
        self.compares = any(isinstance(task.loss, BatchLoss) for task in tasks)
        self._asks = self.compares or any(task.divisor == "weights" for task in tasks)
        self.own_loss = own_loss
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
        return cls(tasks, config.train.loss_reduction, world, keys, config.model.own_loss)

    def losses(
        self,
        logits: torch.Tensor,
        labels_BL: torch.Tensor,
        weights_B: torch.Tensor,
        global_rows: int,
        task_weights: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
        whole: Whole | None = None,
        rows: slice = slice(None),
    ) -> dict[str, torch.Tensor]:
        """Task → its part of the scalar that a rank calls backward on (`total`), for some of its rows or all.

        Args:
            logits: float32 [B], or [B, columns]: side by side the columns of each task, one or as many as it
                has classes; then the model's own loss of each row, if it gives one; then, where a loss reads
                vectors, those of the query and of the item.
            labels_BL: float32 [B, labels of the schema].
            weights_B: float32 [B]; 1 for a row and 0 for padding.
            global_rows: rows of the global batch over all ranks, padding not counted.
            task_weights: float32 [B, T], the row's factor in each task; None: weights_B in all of them.
            keys: int64 [B, K] of the first K of the columns `keys` (training reads no slices); None where
                there are none.
            whole: what `whole` says of all rows of this rank, where these are some of them; default: these
                are all, and it is asked (then this is a collective where it is one).
            rows: which of the rank's rows these are.

        Raises:
            ConfigError: the model does not give the columns that the tasks have.
        """
        if whole is None:
            whole = self.whole(logits, labels_BL, weights_B, task_weights, keys)
        parts: dict[str, torch.Tensor] = {}
        weights = self._weights(weights_B, task_weights)
        for task, logits_B, own_B in zip(self.tasks, self._of_tasks(logits), weights, strict=True):
            if task.name in whole.compared:
                losses = whole.compared[task.name].of(logits_B, rows)
                own = losses.new_ones(())
            else:
                labels_B = labels_BL[:, task.column]
                losses, own = task.loss.of_rows(logits_B, labels_B), task.factors(labels_B, own_B)
            divisor = whole.divisors.get(task.name, global_rows)
            parts[task.name] = rank_loss(losses, own, divisor, self.world, self.reduction, task.weight)
        if self.own_loss:
            own = self._of_model(logits, labels_BL, weights_B, weights, global_rows, whole)
            name = OF_MODEL if self._own_task is None else self.tasks[self._own_task].name
            parts[name] = parts[name] + own if name in parts else own
        return parts

    def _of_model(
        self,
        logits: torch.Tensor,
        labels_BL: torch.Tensor,
        weights_B: torch.Tensor,
        weights: Sequence[torch.Tensor],
        global_rows: int,
        whole: Whole,
    ) -> torch.Tensor:
        """What the model's own loss adds; arguments as in `losses`, and the rows' weights in each task."""
        losses_B, weight, divisor = logits[:, sum(self._widths)], 1.0, global_rows
        if self._own_task is not None:
            task = self.tasks[self._own_task]
            labels_B, weight = labels_BL[:, task.column], task.weight
            weights_B = task.factors(labels_B, weights[self._own_task]) * labels_B
            divisor = whole.divisors.get(task.name, global_rows)
        return rank_loss(losses_B, weights_B, divisor, self.world, self.reduction, weight)

    def whole(
        self,
        logits: torch.Tensor,
        labels_BL: torch.Tensor,
        weights_B: torch.Tensor,
        task_weights: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
    ) -> Whole:
        """What `losses` has to know of the global batch, given all rows of this rank; shapes as there.

        A collective where a task divides by weights, or its loss compares rows (`compares`); their gradient
        is computed here, if gradients are enabled.
        """
        if not self._asks:
            return NOTHING
        weights = self._weights(weights_B, task_weights)
        divided = [place for place, task in enumerate(self.tasks) if task.divisor == "weights"]
        divisors, compared = {}, {}
        if divided:
            totals = total_weights([weights[place] for place in divided], self.world)
            divisors = {self.tasks[place].name: total for place, total in zip(divided, totals, strict=True)}
        if self.compares:
            of_tasks = zip(self.tasks, self._of_tasks(logits.detach()), weights, strict=True)
            for task, own, own_B in of_tasks:
                if isinstance(task.loss, BatchLoss):
                    key = self._key(getattr(task, task.loss.by) if task.loss.by else None, keys)
                    counts = self._key(task.item_frequency, keys)
                    mine = Rows(own, labels_BL[:, task.column], own_B, key, counts)
                    factors_B, wanted = task.factors(mine.labels, own_B), torch.is_grad_enabled()
                    compared[task.name] = compare(task.loss, mine, factors_B, self.world, wanted)
        return Whole(divisors, compared)

    def _key(self, column: str | None, keys: torch.Tensor | None) -> torch.Tensor | None:
        """The keys of a column, int64 [B]; None where a task names none."""
        return None if column is None or keys is None else keys[:, self.keys.index(column)]

    def outputs(
        self,
        loss: torch.Tensor,
        logits: torch.Tensor,
        labels_BL: torch.Tensor,
        weights_B: torch.Tensor,
        verdict: Verdict | None = None,
        task_weights: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
        losses: Mapping[str, torch.Tensor] | None = None,
        global_rows: int = 0,
    ) -> Outputs:
        """What the metrics are given of a step; shapes as in `losses`.

        Args:
            losses: what that gave, of all rows of this rank; default: none is wanted.
        """
        loss, logits = loss.detach(), logits.detach()
        parts = {name: part.detach() * (global_rows / self.world) for name, part in (losses or {}).items()}
        if verdict is not None:
            loss, logits, weights_B = (x.masked_fill(verdict.mask, 0) for x in (loss, logits, weights_B))
            parts = {name: part.masked_fill(verdict.mask, 0) for name, part in parts.items()}
            labels_BL = labels_BL.nan_to_num()
            if task_weights is not None:
                task_weights = task_weights.masked_fill(verdict.mask, 0)
        # In training there are none of slices, which come last.
        of_column = {} if keys is None else dict(zip(self.keys, keys.unbind(1), strict=False))
        weights = self._weights(weights_B, task_weights)
        tasks = {}
        for task, given, own_B in zip(self.tasks, self._of_tasks(logits), weights, strict=True):
            logits_B = task.calibrated(given)
            tasks[task.name] = TaskOutputs(
                logits_B, task.loss.predict(logits_B), labels_BL[:, task.column], own_B, of_column
            )
        return Outputs(tasks, weights_B, loss, verdict, parts)

    def predictions(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Task → its predictions, float32 [B] or [B, classes], of what the model gives."""
        return {
            task.name: task.loss.predict(task.calibrated(given))
            for task, given in zip(self.tasks, self._of_tasks(logits), strict=True)
        }

    def _weights(self, weights_B: torch.Tensor, task_weights: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """The weights of each task's rows, [B]."""
        return [weights_B] * len(self.tasks) if task_weights is None else task_weights.unbind(1)

    def _of_tasks(self, logits: torch.Tensor) -> Sequence[torch.Tensor]:
        """What the model gives for each task: [B], [B, classes], or vectors [B, 2·D]."""
        columns, vectors = sum(self._widths), len(self._widths) < len(self.tasks)
        if logits.dim() == 1 and columns == 1 and not vectors and not self.own_loss:
            return (logits,)
        before = columns + self.own_loss
        beside = logits.shape[1] - before if logits.dim() == 2 else -1
        if beside < 0 or beside % 2 or (beside > 0) != vectors:
            raise self._other_shape(logits, before, vectors)
        if before == len(self.tasks) and not vectors and not self.own_loss:
            return logits.unbind(1)
        parts = iter(logits[:, :columns].split(self._widths, 1))
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
