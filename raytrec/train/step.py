"""One pipelined step: forward, loss, backward, update, overlapped with the next batch's exchange of ids."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from raytrec.data.batch import Batch
from raytrec.embeddings.gradients import rank_loss


class Outputs(NamedTuple):
    """What one rank's step hands to the metrics; all detached, float32 [B]."""

    logits: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


class LossModel(nn.Module):
    """A model with the loss behind it: Batch → (loss to call backward on, Outputs).

    Args:
        model: forward(dense, sparse) → logits [B].
        world: number of ranks.
    """

    def __init__(self, model: nn.Module, world: int):
        super().__init__()
        self.model = model
        self.loss = BinaryCrossEntropy(world)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Outputs]:
        return self.loss(self.model(batch.dense, batch.sparse), batch)


class BinaryCrossEntropy(nn.Module):
    """The global mean of the cross-entropy between logits and the first label (embeddings/gradients.py)."""

    def __init__(self, world: int):
        super().__init__()
        self.world = world

    def forward(self, logits_B: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Outputs]:
        labels_B = batch.labels[:, 0]
        losses_B = nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
        loss = rank_loss(losses_B, batch.weights, batch.global_rows, self.world)
        return loss, Outputs(logits_B.detach(), labels_B, batch.weights)


class Step:
    """Owns TorchRec's train pipeline, which every forward must pass once it has rewritten the model.

    The pipeline looks two batches ahead, so batches are given to it in segments that it runs empty: between
    two segments no batch is in flight, and the model may be evaluated or saved.
    """

    def __init__(self, model: DistributedModelParallel, optimizer: CombinedOptimizer, device: torch.device):
        self.model = model
        self._pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)

    def train(self, batches: Iterator[Batch], steps: int) -> Iterator[Outputs]:
        """Trains on the next `steps` batches, yielding after each."""
        self.model.train()
        yield from self._run(islice(batches, steps))

    def evaluate(self, batches: Iterator[Batch]) -> Iterator[Outputs]:
        """Forward only, over all batches."""
        self.model.eval()
        with torch.no_grad():
            yield from self._run(batches)

    def _run(self, batches: Iterator[Batch]) -> Iterator[Outputs]:
        while True:
            try:
                outputs = self._pipeline.progress(batches)
            except StopIteration:
                return
            yield outputs
