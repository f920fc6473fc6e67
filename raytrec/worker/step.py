"""One pipelined step: forward, loss, backward, update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import KeyedOptimizer

from raytrec.compat.fbgemm import updates_uncounted
from raytrec.compat.torch_ import time_waits
from raytrec.compat.torchrec_ import replicated_kernels, sharded_kernels
from raytrec.compat.torchrec_pipeline import PrefetchPipeline, TimedPipeline, TimedPrefetchPipeline
from raytrec.config.run_config import RunConfig
from raytrec.config.tasks import TowerName
from raytrec.config.training import TrainSection
from raytrec.data.batch import Batch
from raytrec.embeddings.managed.batches import ManagedBatches
from raytrec.embeddings.managed.row_map import RowMap
from raytrec.embeddings.optim import average_of
from raytrec.models.recommender import Recommender
from raytrec.tasks.objective import Objective, total
from raytrec.tasks.outputs import Outputs
from raytrec.worker.step_timing import Phases, time_tables


class LossModel(nn.Module):
    """What is trained: Batch → (loss to call backward on, Outputs).

    Args:
        recommender: the model, whose tables and dense layers these are.
        objective: what is minimised.
        query_vectors: whether evaluations are given the vectors of queries, too; the model retrieves, then.
    """

    def __init__(self, recommender: Recommender, objective: Objective, query_vectors: bool = False):
        super().__init__()
        self.embeddings = recommender.embeddings
        self.head = Head(recommender, objective, query_vectors)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Outputs]:
        return self.head(self.embeddings(batch.sparse), batch)


class Head(nn.Module):
    """A dense model with the objective behind it: (pooled embeddings, Batch) → (loss, Outputs).

    A module without tables, so that TorchRec's pipeline, which traces the model to find sharded modules,
    takes it as one step.

    Args: See LossModel.

    Attributes:
        tower: Tower whose vectors evaluations get in place of the tasks' outputs; None for the tasks'.
    """

    tower: TowerName | None = None

    def __init__(self, recommender: Recommender, objective: Objective, query_vectors: bool = False):
        super().__init__()
        self.model, self.call = recommender.model, recommender.call
        self._objective, self._query_vectors = objective, query_vectors

    def forward(self, pooled: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, Outputs]:
        if self.tower and not self.training:
            vectors = self.call(self.model, batch, pooled, self.tower)
            nothing = vectors.new_zeros(())
            return nothing, Outputs({}, batch.weights, nothing, vectors=vectors)
        logits = self.call(self.model, batch, pooled)
        losses = self._objective.losses(logits, batch, pooled if self.training else None)
        loss = total(losses)
        outputs = self._objective.outputs(loss, logits, batch, losses if self.training else None)
        if self._query_vectors and not self.training:
            outputs = replace(outputs, vectors=self.call(self.model, batch, pooled, "query"))
        return loss, outputs


class Step:
    """Owns TorchRec's train pipeline, which every forward must pass once it has rewritten the model.

    The pipeline looks two batches ahead, so batches are given to it in segments that it runs empty: between
    two segments no batch is in flight, and the model may be evaluated. Between two steps of a segment it may
    be saved: only the exchange of ids of the next ones has begun, which depends on no weight. Only maps
    of managed ids are `ahead` then; to save them, the pipeline is drained.

    Attributes:
        trained: steps that the model has been trained; dropout (with seed and rank) and learning rates depend
            on it alone, so that a restored run continues like the one that was saved.
        drain_every: with managed ids, after so many steps of the run nothing is `ahead`.
        phases: where the time of training goes; counted with tracking.every_steps.

    Args:
        steps: of the whole run; 0: nothing is trained.
        prefetch: whether a table of the plan has a cache on the GPUs; see `_pipeline`.
        managed: where tables have managed ids.
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
    ):
        self.drain_every: int | None = None
        self._draining = False
        self.model, self.optimizer, self._device, self.managed = model, optimizer, device, managed
        self.trained, self._seed, self._schedule = 0, config.run.seed, config.optim.schedule.over(steps)
        self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
        average = average_of(optimizer)
        self._averaged = average.applied if average else nullcontext
        self.phases, self._train = Phases(device), config.train
        timed = self.phases if config.tracking.every_steps else None
        self._pipeline = _pipeline(model, optimizer, device, timed, prefetch, managed is not None)

    @property
    def head(self) -> Head:
        """The part of the model without tables."""
        return self.model.module.head

    @property
    def maps(self) -> dict[str, RowMap]:
        """Table with managed ids → this rank's part of its map."""
        return self.managed.maps if self.managed is not None else {}

    def train(self, batches: Iterator[Batch], steps: int) -> Iterator[Outputs]:
        """Trains on the next `steps` batches, yielding after each."""
        self.model.train()
        self.phases.resume()
        batches, end = islice(batches, steps), self.trained + steps
        segment = self._segment(batches)
        while True:
            self._prepare_step()
            if (outputs := self._progress(segment)) is not None:
                self.trained += 1
                yield outputs
            elif self._draining and self.trained < end:
                segment = self._segment(batches)
            else:
                return self.phases.pause()

    def _segment(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches that the pipeline runs empty of before it takes others."""
        return batches if self.managed is None else self._assigned(batches)

    @property
    def ahead(self) -> bool:
        """Whether the maps of managed ids are ahead of the tables, by the batches in the pipeline."""
        return self.managed is not None and self.managed.steps > self.trained

    def drain(self) -> None:
        """Trains the batches in the pipeline before it takes another one: then nothing is `ahead`."""
        self._draining = True

    def _assigned(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Batches with managed ids replaced by table rows; the first belongs to the next step."""
        self._draining = False
        for step, batch in enumerate(batches, self.trained):
            with self.phases.phase("input_exchange"):
                self.managed.assign(batch, step)
            yield batch
            if self._draining or (self.drain_every and (step + 1) % self.drain_every == 0):
                return self.drain()

    def _prepare_step(self) -> None:
        """Set learning rates and RNG seeds, on which a step depends in addition to batch and model."""
        seed = seed_of(self._seed, self.trained, dist.get_rank())
        # Not torch.manual_seed, which also keeps the seed, with a formatted stack, for every kind of device
        # that has not been set up: 0.4 ms.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        factor = self._schedule.factor(self.trained)
        for group, rate in self._rates:  # kernels read it at zero_grad, with which the pipeline begins
            group["lr"] = rate * factor

    def evaluate(self, batches: Iterator[Batch], tower: TowerName | None = None) -> Iterator[Outputs]:
        """Forward only, over all batches; with train.ema, of the averages of the dense weights.

        Args:
            tower: The tower whose features alone the rows have, so that outputs have its vectors and no
                tasks; None for rows with all features.
        """
        self.model.eval()
        self.head.tower = tower
        if self.managed is not None:
            batches = map(self.managed.find, batches)
        with torch.no_grad(), updates_uncounted(self.model), self._averaged():
            while (outputs := self._progress(batches)) is not None:
                yield outputs

    def _progress(self, batches: Iterator[Batch]) -> Outputs | None:
        """One step of the pipeline; None when it is empty."""
        try:
            with numerics(self._train, self._device):
                return self._pipeline.progress(batches)
        except StopIteration:
            return None


def seed_of(*numbers: int) -> int:
    """One seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def _pipeline(
    model: Any, optimizer: Any, device: torch.device, phases: Phases | None, prefetch: bool, managed: bool
) -> TrainPipelineSparseDist:
    """TorchRec's pipeline, which exchanges the next batch's ids during this batch's forward.

    Where ids are managed, the batch after the next one gets its rows only when this batch's forward has been
    launched: the host waits for them, and a GPU would have nothing left to do.

    Args:
        phases: that the parts' times are added to, and all waits of this process for other ranks; None: they
            are not timed.
        prefetch: whether any rank has a table with a cache, whose rows are brought into it a batch ahead. The
            same on all ranks, whose collectives come in another order with it.
        managed: whether ids are.
    """
    options = {"execute_all_batches": True, "enqueue_batch_after_forward": managed}
    if phases is None:
        untimed = PrefetchPipeline if prefetch else TrainPipelineSparseDist
        return untimed(model, optimizer, device, **options)
    time_waits(phases.waits)
    time_tables([*sharded_kernels(model), *replicated_kernels(model)], phases)
    timed = TimedPrefetchPipeline if prefetch else TimedPipeline
    return timed(model, optimizer, device, phases.phase, lambda: phases.enter("collectives"), **options)


@contextmanager
def numerics(train: TrainSection, device: torch.device) -> Iterator[None]:
    """Set torch's process-wide switches for a step as the configuration asks; restore them afterwards.

    Checks, metrics and other code of this process therefore compute in float32 throughout. (bf16 is not such
    a switch: models.recommender.ModelCall applies it around the dense model.)

    Args:
        train: Section with `matmul` and `deterministic`.
        device: Device of the rank; TF32 is a format of NVIDIA's tensor cores and changes nothing on CPU.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(_tf32(train.matmul == "tf32"))
        if train.deterministic:
            stack.enter_context(_deterministic())
        yield


@contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    # Not torch.backends.cuda.matmul.fp32_precision: once that has been set, torch 2.13.0 raises where its own
    # compiler, or a user's model, asks for the precision by its older name. cuDNN, which has RNNs and
    # convolutions, takes no notice of the first, and uses TF32 by default.
    # The precision from before may be TF32: NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1.
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    torch.backends.cudnn.allow_tf32 = wanted
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn


@contextmanager
def _deterministic() -> Iterator[None]:
    before, filled = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads any
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled
