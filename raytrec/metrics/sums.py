"""The sums of all metrics that add up, over steps and ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raytrec.metrics.registry import SumMetric
from raytrec.metrics.selection import LOSS, Selection

if TYPE_CHECKING:
    import torch

    from raytrec.tasks.outputs import Outputs

ROWS = "rows"
LOSS_OF = "loss of "  # begins the names of the tasks' losses (Outputs.losses)


class Sums:
    """Rows, and what the metrics of all tasks sum up, in float64 on the device: one vector, one all_reduce.

    Args:
        selection: the metrics. Those of one task that have the same function `sums` share what it gives.
        window_steps: figures are over the last so many steps; default: since the last `reduce`.

    Attributes:
        selection: as it was given.
    """

    def __init__(self, selection: Selection, device: torch.device, window_steps: int | None = None):
        self._device, self.selection = device, selection
        self._names: list[str] = []  # of the vector; the functions say them when they are first called
        self._before: dict[str, float] = {}  # what this rank resumes from
        self._vector: torch.Tensor | None = None
        self._steps: deque[torch.Tensor] | None = deque(maxlen=window_steps) if window_steps else None
        self._functions: dict[str, dict[Callable, str]] = {task: {} for task in selection.of}
        for task, metrics in selection.of.items():  # the first metric that has a function gives it its name
            for metric in metrics:
                if issubclass(metric, SumMetric):
                    self._functions[task].setdefault(metric.sums, f"{task}.{metric.name}.")

    def add(self, outputs: Outputs) -> None:
        """Adds a step of this rank; the host waits for nothing."""
        import torch

        found = {ROWS: outputs.rows.sum()}
        found |= {LOSS_OF + task: loss for task, loss in outputs.losses.items()}
        for task, functions in self._functions.items():
            for function, prefix in functions.items():
                given = function(outputs[task])
                found |= {prefix + name: value for name, value in given.items()}
        if self._vector is None:
            before, self._names = self._names, list(found)
            self._vector = self._tensor(self._before)
            self._reorder(before)
        step = torch.stack([value.detach().double() for value in found.values()])
        self._vector += step
        if self._steps is not None:
            self._steps.append(step)

    def total(self) -> dict[str, float]:
        """The sums since the last `reduce` over all ranks, for `resume`; a collective."""
        return dict(zip(self._names, self._over_ranks(self._so_far()).tolist(), strict=True))

    def last_steps(self) -> dict[str, Any] | None:
        """The sums of each step of the window over all ranks, for `resume`; a collective. None without
        window_steps."""
        if self._steps is None:
            return None
        steps = self._over_ranks(self._matrix()).tolist() if self._steps else []
        return {"names": self._names, "steps": steps}

    def resume(self, total: dict[str, float], last_steps: dict[str, Any] | None = None) -> None:
        """Continues from what `total` and `last_steps` gave, with any number of ranks."""
        import torch.distributed as dist

        first = dist.get_rank() == 0
        self._names = list(total)
        self._before = dict(total) if first else {}
        if self._steps is not None and last_steps:
            names, steps = last_steps["names"], last_steps["steps"]
            self._names = self._names or list(names)
            known = (dict(zip(names, step, strict=True)) if first else {} for step in steps)
            self._steps.extend(self._tensor(each) for each in known)

    def reduce(self) -> dict[str, float]:
        """Figures over all ranks since the last call (rows) and over the window, by key (Selection.key); a
        collective. What is counted since the last call starts over then.

        Returns:
            rows; each SumMetric of each task, NaN where it is not defined, and its counts; of training the
            loss of a step, and of each task where that has several parts: means in which steps count by rows.
        """
        sums = dict(zip(self._names, self._over_ranks(self._so_far()).cpu(), strict=True))
        self._before = {}
        if self._vector is not None:
            self._vector.zero_()
        figures: dict[str, float] = {ROWS: round(float(sums[ROWS])) if ROWS in sums else 0}
        if self._steps is not None:
            sums = dict(zip(self._names, self._over_ranks(self._matrix().sum(0)).cpu(), strict=True))
        losses = self._own(sums, LOSS_OF)
        for task, metrics in self.selection.of.items():
            if len(losses) > 1:
                figures[f"{task}.{LOSS}"] = float(losses[task] / sums[ROWS])
            for metric in metrics:
                if issubclass(metric, SumMetric):
                    own = self._own(sums, self._functions[task][metric.sums])
                    given = {metric.name: metric.figure(own), **metric.counts(own)} if own else {}
                    figures |= {self.selection.key(task, n): float(value) for n, value in given.items()}
        if losses:
            figures[LOSS] = float(sum(losses.values()) / sums[ROWS])
        return figures

    def _so_far(self) -> torch.Tensor:
        return self._tensor(self._before) if self._vector is None else self._vector.clone()

    def _over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        dist.all_reduce(sums)
        return sums

    def _matrix(self) -> torch.Tensor:
        """The sums of each step of the window, [steps, names]."""
        import torch

        return torch.stack([*self._steps]) if self._steps else self._tensor({}).unsqueeze(0)

    def _tensor(self, sums: dict[str, float]) -> torch.Tensor:
        """Sums in the order of the names."""
        import torch

        if not sums:  # no copy to a GPU, for which the host would wait
            return torch.zeros(len(self._names), dtype=torch.float64, device=self._device)
        values = [sums.get(name, 0.0) for name in self._names]
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    def _reorder(self, before: list[str]) -> None:
        """Brings the steps that were resumed into the order of the names."""
        if self._steps and before != self._names:
            known = [dict(zip(before, step.tolist(), strict=True)) for step in self._steps]
            self._steps.clear()
            self._steps.extend(self._tensor(each) for each in known)

    @staticmethod
    def _own(sums: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
