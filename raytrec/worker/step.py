"""One pipelined training step: forward, loss, backward and update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import KeyedOptimizer

from raytrec.compat.fbgemm import exclude_from_update_counts
from raytrec.compat.torch_ import time_waits
from raytrec.compat.torchrec_ import iterate_replicated_kernels, iterate_sharded_kernels
from raytrec.compat.torchrec_pipeline import PrefetchPipeline, TimedPipeline, TimedPrefetchPipeline
from raytrec.config.run_config import RunConfig
from raytrec.config.tasks import TowerName
from raytrec.data.batch import Batch
from raytrec.embeddings.managed.batches import ManagedBatches
from raytrec.embeddings.managed.row_map import RowMap
from raytrec.embeddings.optim import find_dense_average
from raytrec.models.recommender import Recommender
from raytrec.tasks.objective import TEMPERATURES, Objective, total
from raytrec.tasks.outputs import StepOutputs
from raytrec.worker.process import numerics
from raytrec.worker.step_timing import FlopCounter, PhaseTimer, time_lookups


class LossModel(nn.Module):
    """Module to train, which wraps a recommender and its objective and maps a Batch to (loss, StepOutputs).

    Args:
        recommender: Model with the tables and dense layers.
        objective: Objective to minimize.
        query_vectors: True if evaluations also need query vectors, for models that retrieve items.
    """

    def __init__(self, recommender: Recommender, objective: Objective, query_vectors: bool = False):
        super().__init__()
        self.embeddings = recommender.embeddings
        self.head = Head(recommender, objective, query_vectors)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, StepOutputs]:
        """Return the loss and the outputs for a batch."""
        return self.head(self.embeddings(batch.sparse), batch)


class Head(nn.Module):
    """Dense model and objective, which together map (pooled embeddings, Batch) to (loss, StepOutputs).

    The module contains no tables. TorchRec's pipeline traces the model to find sharded modules, and treats
    this module as a single operation.

    Args:
        recommender: Model with the tables, whose dense layers this module calls.
        objective: Objective to minimize.
        query_vectors: True if evaluations also need query vectors; see LossModel.

    Attributes:
        tower: Tower whose vectors evaluations return instead of the tasks' outputs; None: the tasks' outputs.
    """

    tower: TowerName | None = None

    def __init__(self, recommender: Recommender, objective: Objective, query_vectors: bool = False):
        super().__init__()
        self.model, self.call = recommender.model, recommender.call
        self._objective, self._query_vectors = objective, query_vectors

    def forward(self, pooled: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, StepOutputs]:
        """Return the loss and the outputs for a batch; the loss is 0 if only vectors are computed."""
        if self.tower and not self.training:
            vectors = self.call(self.model, batch, pooled, self.tower)
            zero = vectors.new_zeros(())
            return zero, StepOutputs({}, batch.weights, zero, vectors=vectors)
        logits = self.call(self.model, batch, pooled)
        temperatures = getattr(self.model, TEMPERATURES, None)
        losses = self._objective.losses(logits, batch, pooled if self.training else None, temperatures)
        loss = total(losses)
        outputs = self._objective.outputs(loss, logits, batch, losses if self.training else None)
        if self._query_vectors and not self.training:
            outputs = replace(outputs, vectors=self.call(self.model, batch, pooled, "query"))
        return loss, outputs


class Step:
    """Model with its optimizer and TorchRec's train pipeline, which runs every step and every evaluation.

    The pipeline rewrites the model, so every forward pass must go through the pipeline. The pipeline fetches batches
    up to two steps ahead. Batches are therefore passed in segments, and the pipeline is empty after each segment.
    Between two segments, no batch is in flight, and the model can be evaluated. Between two steps of a segment, the
    model can be saved: only the exchange of the next ids and, with `prefetch`, the fetch of their rows have begun,
    which change no weights. If maps of managed ids are then ahead of the tables (`is_map_ahead`), the pipeline must be
    drained before a save. Every rank must run the same steps and evaluations, which contain collectives.

    Args:
        model: Sharded model.
        optimizer: Optimizer of the model.
        device: Device of the rank.
        config: Configuration of the run.
        steps: Number of steps in the whole run; 0 if nothing is trained.
        prefetch: True if any table in the plan has a GPU cache; rows of such tables are fetched one batch ahead. The
            value must be the same on all ranks, because it changes the order of collectives.
        managed: Maps of managed ids; None if no table has managed ids.
        counts_flops: True to count the operations of a step.

    Attributes:
        trained: Number of steps for which the model has been trained. Learning rates depend only on this
            number, and dropout depends on this number, the seed and the rank. A restored run thus continues exactly.
        drain_every: Number of steps between drains of the pipeline (only with managed ids); None: no regular drains.
        phases: Training time by phase; measured if tracking.every_steps is set.
        flops: Floating-point operations of this rank's matrix products in the second step of the first call of
            `train` that has two steps; None until then, and if `counts_flops` is False.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: KeyedOptimizer,
        device: torch.device,
        config: RunConfig,
        steps: int = 0,
        prefetch: bool = False,
        managed: ManagedBatches | None = None,
        counts_flops: bool = False,
    ):
        self.flops, self._counts_flops = None, counts_flops
        self.drain_every: int | None = None
        self._draining = False
        self.model, self.optimizer, self._device, self.managed = model, optimizer, device, managed
        self.trained, self._seed = 0, config.run.seed
        self._schedule = config.optim.schedule.resolve_decay_steps(steps)
        self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
        average = find_dense_average(optimizer)
        self._averaged = average.use_averages if average else nullcontext
        self.phases, self._train = PhaseTimer(device), config.train
        # TorchRec's pipeline exchanges the ids of the next batch during the forward pass. With managed ids, rows are
        # assigned to the batch after the next one only after the current batch's forward pass has been launched. The
        # host waits for these rows; in the other order, the GPU would be idle.
        options: dict[str, Any] = {"execute_all_batches": True, "enqueue_batch_after_forward": managed is not None}
        kind = PrefetchPipeline if prefetch else TrainPipelineSparseDist
        if config.tracking.every_steps:
            time_waits(self.phases.waits)
            time_lookups([*iterate_sharded_kernels(model), *iterate_replicated_kernels(model)], self.phases)
            kind = TimedPrefetchPipeline if prefetch else TimedPipeline
            options["phase"] = self.phases.phase
            options["before_all_reduce_wait"] = partial(self.phases.enter, "collectives")
        self._pipeline = kind(model, optimizer, device, **options)

    @property
    def head(self) -> Head:
        """Return the part of the model that contains no tables."""
        return self.model.module.head

    @property
    def maps(self) -> dict[str, RowMap]:
        """Return this rank's part of each map from managed ids to rows, by table; {} without managed ids."""
        return self.managed.maps if self.managed is not None else {}

    def train(self, batches: Iterator[Batch], steps: int) -> Iterator[StepOutputs]:
        """Train on the next `steps` batches, or until the iterator ends, and yield the outputs of each step."""
        self.model.train()
        self.phases.resume()
        batches, first, end = islice(batches, steps), self.trained, self.trained + steps
        segment = self._segment(batches)
        while True:
            self._prepare_step()
            is_counted = self._counts_flops and self.flops is None and self.trained == first + 1
            with FlopCounter() if is_counted else nullcontext() as counter:
                outputs = self._run_pipeline_step(segment)
            if outputs is not None:
                self.flops = counter.flops if counter else self.flops
                self.trained += 1
                yield outputs
            elif self._draining and self.trained < end:
                segment = self._segment(batches)
            else:
                return self.phases.pause()

    def _segment(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return an iterator over the batches of a segment; the pipeline is empty after the last batch."""
        return batches if self.managed is None else self._assign_rows(batches)

    @property
    def is_map_ahead(self) -> bool:
        """Return True if the maps of managed ids already include batches that are still in the pipeline."""
        return self.managed is not None and self.managed.steps > self.trained

    def drain(self) -> None:
        """Make the pipeline finish its batches before it takes another one, so that maps and tables match."""
        self._draining = True

    def _assign_rows(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the next steps' batches up to the next drain, with managed ids replaced by table rows."""
        self._draining = False
        for step, batch in enumerate(batches, self.trained):
            with self.phases.phase("input_exchange"):
                self.managed.map_and_admit_ids(batch, step)
            yield batch
            if self._draining or (self.drain_every and (step + 1) % self.drain_every == 0):
                return self.drain()

    def _prepare_step(self) -> None:
        """Set the learning rates and the random seed for the next step."""
        seed = derive_seed(self._seed, self.trained, dist.get_rank())
        # torch.manual_seed takes 0.4 ms, because it stores the seed and a formatted stack for every device
        # type that has not been initialized yet.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        factor = self._schedule.compute_factor(self.trained)
        for group, rate in self._rates:  # kernels read the rate in zero_grad, which the pipeline calls first
            group["lr"] = rate * factor

    def evaluate(self, batches: Iterator[Batch], tower: TowerName | None = None) -> Iterator[StepOutputs]:
        """Yield the outputs of a forward pass over all batches, with averaged dense weights if train.ema is set.

        Args:
            batches: Batches of this rank.
            tower: Tower whose vectors are returned instead of the tasks' outputs, for rows with only the
                features of this tower; None: the tasks' outputs.
        """
        self.model.eval()
        self.head.tower = tower
        if self.managed is not None:
            batches = map(self.managed.map_known_ids, batches)
        with torch.no_grad(), exclude_from_update_counts(self.model), self._averaged():
            while (outputs := self._run_pipeline_step(batches)) is not None:
                yield outputs

    def _run_pipeline_step(self, batches: Iterator[Batch]) -> StepOutputs | None:
        """Run one step of the pipeline; return None if the pipeline is empty."""
        try:
            with numerics(self._train, self._device):
                return self._pipeline.progress(batches)
        except StopIteration:
            return None


def derive_seed(*numbers: int) -> int:
    """Return a seed, at least 0 and less than 2⁶³, that depends on all of the numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
