"""Sums over rows, steps and ranks, from which metrics that need no other rows (SumMetric) are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan

import torch
import torch.distributed as dist

from raytrec.metrics.registry import COUNTED_ROWS, SumMetric
from raytrec.metrics.selection import LOSS, Selection
from raytrec.tasks.outputs import StepOutputs, TaskOutputs

ROWS = "rows"
LOSS_PREFIX = "loss of "  # prefix of the names of the tasks' losses (StepOutputs.losses)
COUNTED_ROWS_PREFIX = "counted rows of "  # prefix of the name of each task's number of rows with nonzero weight
# Pending steps are summed once they reach this number of steps or this number of logits.
MAX_PENDING_STEPS, MAX_PENDING_LOGITS = 8, 1 << 22


class MetricSums:
    """Row counts, losses and metric sums of all tasks: one float64 vector on the device, summed with one all_reduce.

    The rows of MAX_PENDING_STEPS steps (fewer, if they reach MAX_PENDING_LOGITS logits) are stored and summed
    together. For 8 steps, the GPU runs an eighth of the kernels, each with eight times the work.

    Args:
        selection: Metrics of the tasks. Metrics of a task with the same `sums` function share the result.
        device: Device of the vector.

    Attributes:
        selection: Metrics of the tasks.
    """

    def __init__(self, selection: Selection, device: torch.device):
        self._device, self.selection = device, selection
        self._names: list[str] = []  # names of the vector's elements, known after the first sums are computed
        self._resumed: dict[str, float] = {}  # sums of a checkpoint, to which this rank adds (only on rank 0)
        self._vector: torch.Tensor | None = None
        self._pending: list[StepOutputs] = []  # steps that have not been added to the vector
        self._functions: dict[str, dict[Callable, str]] = {task: {} for task in selection.of}
        for task, metrics in selection.of.items():  # the first metric with a function names its sums
            for metric in metrics:
                if issubclass(metric, SumMetric):
                    self._functions[task].setdefault(metric.sums, f"{task}.{metric.name}.")

    def add(self, outputs: StepOutputs) -> None:
        """Add the outputs of one step on this rank to the sums. The outputs are stored until enough steps are pending.

        The host does not wait for the device, except on rank 0 when it first adds to sums from `resume`.
        """
        self._pending.append(replace(outputs, vectors=None))
        values = sum(own.logits.numel() for step in self._pending for own in step.tasks.values())
        if len(self._pending) == MAX_PENDING_STEPS or values >= MAX_PENDING_LOGITS:
            self._flush()

    def _flush(self) -> None:
        """Add the sums of the pending steps to the vector."""
        if not self._pending:
            return
        steps, self._pending = self._pending, []
        sums = {ROWS: torch.cat([outputs.rows for outputs in steps]).sum()}
        for task in steps[0].losses:
            sums[LOSS_PREFIX + task] = torch.stack([outputs.losses[task] for outputs in steps]).double().sum()
        for task, functions in self._functions.items():
            joined = TaskOutputs.joined([outputs[task] for outputs in steps])
            sums[COUNTED_ROWS_PREFIX + task] = (joined.weights > 0).sum()
            for function, prefix in functions.items():
                sums |= {prefix + name: value for name, value in function(joined).items()}
        if self._vector is None:
            self._names = list(sums)
            self._vector = self._tensor(self._resumed)
        self._vector += torch.stack([value.detach().double() for value in sums.values()])

    def total(self) -> dict[str, float]:
        """Return name → sum over all ranks since the last reset, for checkpoints (`resume`). Nothing is reset.

        The sums include those passed to `resume`. Without these and before the first step, the dict is empty. This is
        a collective operation: every rank must call it.
        """
        sums = self._reduce_over_ranks().tolist()
        return dict(zip(self._names, sums, strict=True))

    def resume(self, total: dict[str, float]) -> None:
        """Start from the sums that `total` returned, possibly on another number of ranks.

        Call it before `add`, after torch.distributed has been initialized. Only rank 0 stores the sums.
        """
        self._names = list(total)
        self._resumed = dict(total) if dist.get_rank() == 0 else {}

    def reduce(self) -> dict[str, float]:
        """Return key → metric value or count (see `figures`) over all ranks, and reset the sums.

        This is a collective operation: every rank must call it. The host waits for the device.
        """
        return self.figures(self.take().cpu())

    def take(self) -> torch.Tensor:
        """Return the sums over all ranks, float64 on the device, for `figures`, and reset them.

        This is a collective operation: every rank must call it.
        """
        sums = self._reduce_over_ranks()
        self._resumed = {}
        if self._vector is not None:
            self._vector.zero_()
        return sums

    def figures(self, taken: torch.Tensor) -> dict[str, float]:
        """Return key (Selection.key) → metric value or count.

        Args:
            taken: Result of `take`, in host memory.

        Returns:
            The number of rows ("rows"), the value and counts of each SumMetric of each task, and counted_rows of
            each task in which rows can be excluded. In training, also "loss", the mean loss over steps weighted by
            rows, and, if it is a sum of several losses (StepOutputs.losses), the mean loss of each task. Metrics and
            losses of a task are NaN if they are undefined or if all of its rows are excluded; "loss" omits such
            tasks. Before the first step, the only key is "rows", unless `resume` has set sums.
        """
        sums = dict(zip(self._names, taken, strict=True))
        figures: dict[str, float] = {ROWS: round(float(sums[ROWS])) if ROWS in sums else 0}
        losses, counted = self._select_sums(sums, LOSS_PREFIX), self._select_sums(sums, COUNTED_ROWS_PREFIX)
        empty = {task for task, rows in counted.items() if not rows}
        for task, metrics in self.selection.of.items():
            if len(losses) > 1:
                figures[f"{task}.{LOSS}"] = nan if task in empty else float(losses[task] / sums[ROWS])
            if self.selection.tasks[task].is_weighted and task in counted:
                figures[self.selection.key(task, COUNTED_ROWS)] = round(float(counted[task]))
            for metric in metrics:
                if issubclass(metric, SumMetric):
                    metric_sums = self._select_sums(sums, self._functions[task][metric.sums])
                    if not metric_sums:  # before the first step
                        continue
                    value = nan if task in empty else metric.figure(metric_sums)
                    values = {metric.name: value, **metric.counts(metric_sums)}
                    figures |= {self.selection.key(task, n): float(v) for n, v in values.items()}
        if losses:
            defined = [loss for task, loss in losses.items() if task not in empty]
            figures[LOSS] = float(sum(defined) / sums[ROWS]) if defined else nan
        return figures

    def _reduce_over_ranks(self) -> torch.Tensor:
        """Return the sums since the last reset over all ranks. This is a collective operation."""
        self._flush()
        sums = self._tensor(self._resumed) if self._vector is None else self._vector.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        return sums

    def _tensor(self, sums: dict[str, float]) -> torch.Tensor:
        """Return sums (name → value) as a vector in the order of `_names`; 0 for missing names."""
        if not sums:  # avoids a copy to the GPU, which would block the host
            return torch.zeros(len(self._names), dtype=torch.float64, device=self._device)
        values = [sums.get(name, 0.0) for name in self._names]
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    @staticmethod
    def _select_sums(sums: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
