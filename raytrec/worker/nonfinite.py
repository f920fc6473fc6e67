"""Losses that are NaN or infinite: found, and skipped."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

LATE = 2  # steps that the host may be ahead of a GPU: enough to keep it busy, and few batches are in flight


class Fetch:
    """What a tensor holds now, on its way into host memory.

    On CPU it is there at once. From a GPU it is copied into pinned memory behind the work that the current
    stream has been given so far; work that the stream is given afterwards does not hold it up.

    Args:
        values: of any shape and dtype; on CPU they must not be changed until they have been read.
    """

    def __init__(self, values: torch.Tensor):
        self._values, self._event = values.detach(), None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = pinned.copy_(values.detach(), non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # who waits sleeps: readers need the core
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return at once; from any thread."""
        event = self._event
        return event is None or event.query()

    def wait(self) -> torch.Tensor:
        """The values, in host memory."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


class Known(NamedTuple):
    """What a rank knows of its losses.

    Attributes:
        through: the last step (of a run, from 1) of which it is known, and of all before, whether it was bad.
        bad: the first step whose loss was not a finite number; None: there was none up to `through`.
    """

    through: int
    bad: int | None


class Losses:
    """Whether the losses of this rank's steps were finite, as far as is known.

    On CPU that is known at once. A GPU computes them later than the host asks for them, and nothing waits for
    it unless the host is more than LATE steps ahead; the GPU then still has work for LATE steps.
    """

    def __init__(self) -> None:
        self._coming: deque[tuple[int, Fetch]] = deque()
        self._known = Known(0, None)

    def add(self, step: int, loss: torch.Tensor) -> None:
        """Begins to find out about a step, the one after the last."""
        if not self._coming:
            self._known = self._known._replace(through=step - 1)
        self._coming.append((step, Fetch(~torch.isfinite(loss))))

    def look(self) -> Known:
        """What has become known; all but the last LATE steps are, in any case."""
        while self._coming and (len(self._coming) > LATE or self._coming[0][1].arrived):
            self._read()
        return self._known

    def wait(self) -> Known:
        """The same of all steps; waits for the device."""
        while self._coming:
            self._read()
        return self._known

    @property
    def unfinished(self) -> int | None:
        """The step that the device has not finished, if there is one; from any thread."""
        return next((step for step, bad in list(self._coming) if not bad.arrived), None)

    def _read(self) -> None:
        (step, fetch), first = self._coming[0], self._known.bad
        bad = bool(fetch.wait())
        self._known = Known(step, step if bad and first is None else first)
        self._coming.popleft()  # only now, so that `unfinished` names it while it is waited for


class Verdict:
    """Whether a step is skipped, because the loss of any rank is not finite; making it is a collective.

    The device knows before the host does: gradients are masked by `mask`, so a GPU can be given the backward
    pass at once. When the host asks, it waits for the forward pass, behind which the backward pass is queued.

    Attributes:
        mask: bool scalar on the loss's device.
    """

    def __init__(self, loss: torch.Tensor):
        bad = (~torch.isfinite(loss.detach())).float()
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        self.mask = bad > 0
        self._fetch = Fetch(self.mask)

    @property
    def skipped(self) -> bool:
        """As the host knows it; waits for the forward pass."""
        return bool(self._fetch.wait())


class SkipBad(OptimizerWrapper):
    """Skips training steps whose loss is not finite on any rank: tables, dense layers and state stay.

    Tables that are updated in backward get zero gradients, which change nothing under SGD and Adagrad; under
    fused Adam (on GPUs) their momentum moves on. (A zero loss would not do: 0 × NaN is NaN on the way back.)

    The host decides whether to step, also on GPUs: Adam would still count a step with a gradient of zero
    (torch 2.13.0, optim/adam.py), on which its bias corrections depend, and would decay its momentum.

    Args:
        optimizer: steps everything.
        head: takes (pooled embeddings, batch) and gives (loss, Outputs), which are masked (worker.step.Head).
    """

    def __init__(self, optimizer: KeyedOptimizer, head: nn.Module):
        super().__init__(optimizer)
        self._verdict: Verdict | None = None
        head.register_forward_pre_hook(self._before_head)
        head.register_forward_hook(self._after_head)

    def step(self, closure: Any = None) -> None:
        if self._verdict is None or not self._verdict.skipped:
            super().step(closure)

    def _before_head(self, head: nn.Module, inputs: tuple) -> None:
        if head.training:
            for values in inputs[0].values():
                values.register_hook(lambda gradient: gradient.masked_fill(self._verdict.mask, 0))

    def _after_head(self, head: nn.Module, inputs: tuple, given: tuple) -> tuple | None:
        if not head.training:
            return None
        loss, outputs = given
        self._verdict = Verdict(loss)
        return loss, outputs.masked(self._verdict)
