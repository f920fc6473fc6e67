"""One pipelined step: forward, loss, backward, update, overlapped with the next batch's exchange of ids."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import KeyedOptimizer

from raytrec.data.batch import Batch
from raytrec.embeddings.gradients import PieceByPiece, rank_loss
from raytrec.embeddings.pooling import PooledEmbeddings


class Outputs(NamedTuple):
    """What one rank's step hands to the metrics; all detached, float32 [B]."""

    logits: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


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
        model: forward(dense, pooled) → logits [B].
        world: number of ranks.
        reduction: of the loss over the global batch: mean or sum.
        micro_batches: pieces in which the model sees a batch in training.
    """

    def __init__(self, model: nn.Module, world: int, reduction: str = "mean", micro_batches: int = 1):
        super().__init__()
        self.model = model
        self.world, self.reduction, self.micro_batches = world, reduction, micro_batches

    def forward(self, pooled: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, Outputs]:
        labels_B = batch.labels[:, 0]
        if self.training and self.micro_batches > 1:
            loss, logits_B = self._in_pieces(pooled, batch)
        else:
            logits_B = self.model(batch.dense, pooled)
            loss = self._loss(logits_B, labels_B, batch.weights, batch.global_rows)
        return loss, Outputs(logits_B.detach(), labels_B, batch.weights)

    def _loss(self, logits_B, labels_B, weights_B, global_rows: int) -> torch.Tensor:
        losses_B = nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
        return rank_loss(losses_B, weights_B, global_rows, self.world, self.reduction)

    def _in_pieces(self, pooled: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits: list[torch.Tensor] = []

        def loss_of(rows: slice, inputs: list[torch.Tensor]) -> torch.Tensor:
            logits_P = self.model(batch.dense[rows], dict(zip(pooled, inputs, strict=True)))
            logits.append(logits_P.detach())
            return self._loss(logits_P, batch.labels[rows, 0], batch.weights[rows], batch.global_rows)

        size = -(-len(batch.labels) // self.micro_batches)
        pieces = [slice(start, start + size) for start in range(0, len(batch.labels), size)]
        loss = PieceByPiece.apply(loss_of, pieces, len(pooled), *pooled.values(), *self.model.parameters())
        return loss, torch.cat(logits)


class Step:
    """Owns TorchRec's train pipeline, which every forward must pass once it has rewritten the model.

    The pipeline looks two batches ahead, so batches are given to it in segments that it runs empty: between
    two segments no batch is in flight, and the model may be evaluated or saved.
    """

    def __init__(self, model: DistributedModelParallel, optimizer: KeyedOptimizer, device: torch.device):
        self.model = model
        self.optimizer = optimizer
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
