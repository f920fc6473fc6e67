"""One pipelined step: forward, loss, backward, update, overlapped with the next batch's exchange of ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from raytrec.config.sections import Schedule
from raytrec.data.batch import Batch
from raytrec.embeddings.gradients import PieceByPiece, rank_loss
from raytrec.embeddings.optim import updates_uncounted
from raytrec.embeddings.pooling import PooledEmbeddings
from raytrec.models.inputs import Sequences
from raytrec.worker.nonfinite import Gate, Verdict
from raytrec.worker.numerics import Numerics
from raytrec.worker.pipeline import pipeline
from raytrec.worker.step_timing import Phases


class Outputs(NamedTuple):
    """What one rank's step hands to the metrics; all detached, float32 [B].

    A step that was left out on all ranks has zero logits and weights.

    Attributes:
        verdict: whether it was; None unless train.on_nan is skip.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    verdict: Verdict | None = None

    @property
    def left_out(self) -> bool:
        """Whether the step was left out on all ranks."""
        return self.verdict is not None and self.verdict.left_out


class LossModel(nn.Module):
    """Tables, model and loss: Batch → (loss to call backward on, Outputs).

    Args:
        embeddings: the tables' lookup and pooling.
        head: the dense model with the loss behind it.
    """

    def __init__(self, embeddings: PooledEmbeddings, head: Head):
        super().__init__()
        self.embeddings = embeddings
        self.head = head

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Outputs]:
        return self.head(self.embeddings(batch.sparse), batch)


class Head(nn.Module):
    """A dense model and the cross-entropy of its logits with the first label (embeddings/gradients.py).

    A module of its own without tables, so that TorchRec's pipeline, which traces the model to find sharded
    modules, takes it as one step.

    Args:
        model: forward(dense, inputs of the sparse features) → logits [B]; see raytrec/models.
        world: number of ranks.
        reduction: of the loss over the global batch: mean or sum.
        micro_batches: pieces in which the model sees a batch in training.
        skip_bad: leave out training steps with a loss that is not finite on any rank.
        sequences: makes the model's inputs of what was looked up; default: they are that.
        bf16: have the model multiply matrices in bfloat16 (autocast), and its logits made float32 again.

    Attributes:
        verdict: whether the last step is left out: no gradient reaches a table, and `nan.SkipBad` keeps the
            optimizers still. None unless `skip_bad`, and before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        world: int,
        reduction: str = "mean",
        micro_batches: int = 1,
        skip_bad: bool = False,
        sequences: Sequences | None = None,
        bf16: bool = False,
    ):
        super().__init__()
        self.model = model
        self.sequences, self.bf16 = sequences, bf16
        self.world, self.reduction, self.micro_batches = world, reduction, micro_batches
        self.skip_bad, self.verdict = skip_bad, None

    def forward(self, pooled: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, Outputs]:
        labels_B = batch.labels[:, 0]
        guarded = self.skip_bad and self.training
        if guarded:
            pooled = {feature: Gate.apply(values, self) for feature, values in pooled.items()}
        if self.training and self.micro_batches > 1:
            loss, logits_B = self._in_pieces(pooled, batch)
        else:
            logits_B = self._logits(batch.dense, self._inputs(pooled, batch))
            loss = self._loss(logits_B, labels_B, batch.weights, batch.global_rows)
        if not guarded:
            return loss, Outputs(logits_B.detach(), labels_B, batch.weights)
        self.verdict = Verdict(loss)
        bad = self.verdict.mask
        logits_B, weights_B = logits_B.detach().masked_fill(bad, 0), batch.weights.masked_fill(bad, 0)
        return loss, Outputs(logits_B, labels_B.nan_to_num(), weights_B, self.verdict)

    def _inputs(self, looked_up: dict[str, torch.Tensor], batch: Batch, rows: slice = slice(None)) -> dict:
        """What the model is given of some rows."""
        return self.sequences(looked_up, batch.sparse, rows) if self.sequences else looked_up

    def _logits(self, dense_BN: torch.Tensor, inputs: dict) -> torch.Tensor:
        if not self.bf16:
            return self.model(dense_BN, inputs)
        with torch.autocast(dense_BN.device.type, torch.bfloat16):
            logits_B = self.model(dense_BN, inputs)
        return logits_B.float()

    def _loss(self, logits_B, labels_B, weights_B, global_rows: int) -> torch.Tensor:
        losses_B = nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
        return rank_loss(losses_B, weights_B, global_rows, self.world, self.reduction)

    def _in_pieces(self, pooled: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits: list[torch.Tensor] = []

        def loss_of(rows: slice, inputs: list[torch.Tensor]) -> torch.Tensor:
            looked_up = dict(zip(pooled, inputs, strict=True))
            logits_P = self._logits(batch.dense[rows], self._inputs(looked_up, batch, rows))
            logits.append(logits_P.detach())
            return self._loss(logits_P, batch.labels[rows, 0], batch.weights[rows], batch.global_rows)

        size = -(-len(batch.labels) // self.micro_batches)
        pieces = [slice(start, start + size) for start in range(0, len(batch.labels), size)]
        loss = PieceByPiece.apply(loss_of, pieces, len(pooled), *pooled.values(), *self.model.parameters())
        return loss, torch.cat(logits)


class Step:
    """Owns TorchRec's train pipeline, which every forward must pass once it has rewritten the model.

    The pipeline looks two batches ahead, so batches are given to it in segments that it runs empty: between
    two segments no batch is in flight, and the model may be evaluated. Between two steps of a segment it may
    be saved: what has begun of the next ones is their exchange of ids, which depends on no weight.

    Attributes:
        trained: steps that the model has been trained; dropout (with seed and rank) and learning rates depend
            on it alone, so that a run that was restored goes on like the one that was saved.
        phases: where the time of training goes; counts only if it was given.

    Args:
        numerics: how steps are computed, in training and evaluation; default: as torch is set.
        prefetch: whether a table of the plan has a cache on the GPUs; see pipeline.pipeline.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: KeyedOptimizer,
        device: torch.device,
        seed: int = 0,
        schedule: Schedule | None = None,
        phases: Phases | None = None,
        numerics: Numerics | None = None,
        prefetch: bool = False,
    ):
        self.model = model
        self.optimizer = optimizer
        self.trained, self._seed, self._schedule = 0, seed, schedule or Schedule()
        self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
        self.phases = phases or Phases(device)
        self._numerics = numerics or nullcontext
        self._pipeline = pipeline(model, optimizer, device, phases, prefetch=prefetch)

    def train(self, batches: Iterator[Batch], steps: int) -> Iterator[Outputs]:
        """Trains on the next `steps` batches, yielding after each."""
        self.model.train()
        self.phases.resume()
        batches = islice(batches, steps)
        while True:
            self._set_out()
            if (outputs := self._progress(batches)) is None:
                return self.phases.pause()
            self.trained += 1
            yield outputs

    def _set_out(self) -> None:
        """What a step depends on beside its batch and the model: learning rates and random numbers."""
        torch.manual_seed(seed_of(self._seed, self.trained, dist.get_rank()))
        factor = self._schedule.factor(self.trained)
        for group, rate in self._rates:  # kernels take it over at zero_grad, with which the pipeline begins
            group["lr"] = rate * factor

    def evaluate(self, batches: Iterator[Batch]) -> Iterator[Outputs]:
        """Forward only, over all batches."""
        self.model.eval()
        with torch.no_grad(), updates_uncounted(self.model):
            while (outputs := self._progress(batches)) is not None:
                yield outputs

    def _progress(self, batches: Iterator[Batch]) -> Outputs | None:
        """One step of the pipeline; None when it has run empty."""
        try:
            with self._numerics():
                return self._pipeline.progress(batches)
        except StopIteration:
            return None


def seed_of(*numbers: int) -> int:
    """One seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
