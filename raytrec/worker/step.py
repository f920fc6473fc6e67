"""One pipelined step: forward, loss, backward, update, overlapped with the next batch's exchange of ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from raytrec.compat.fbgemm import updates_uncounted
from raytrec.config.evaluation import TowerName
from raytrec.config.tables import Schedule
from raytrec.data.batch import Batch
from raytrec.embeddings.averages import average_of
from raytrec.embeddings.gradients import PieceByPiece
from raytrec.embeddings.managed.row_map import RowMap
from raytrec.models.recommender import ModelCall, Recommender
from raytrec.tasks.global_batch import Whole
from raytrec.tasks.objective import Objective, total
from raytrec.tasks.outputs import Outputs
from raytrec.worker.managed import ManagedRows
from raytrec.worker.nonfinite import Gate, Verdict
from raytrec.worker.pipeline import pipeline
from raytrec.worker.process import Numerics
from raytrec.worker.step_timing import Phases


class LossModel(nn.Module):
    """What is trained: Batch → (loss to call backward on, Outputs).

    Args:
        recommender: the model, whose tables and dense layers these are.
        objective: what is minimised.
        micro_batches: pieces in which the dense model sees a batch in training.
        skip_bad: skip training steps with a loss that is not finite on any rank.
    """

    def __init__(
        self, recommender: Recommender, objective: Objective, micro_batches: int = 1, skip_bad: bool = False
    ):
        super().__init__()
        self.embeddings = recommender.embeddings
        self.head = Head(recommender.model, recommender.call, objective, micro_batches, skip_bad)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Outputs]:
        return self.head(self.embeddings(batch.sparse), batch)


class Head(nn.Module):
    """A dense model with the objective behind it.

    A module of its own without tables, so that TorchRec's pipeline, which traces the model to find sharded
    modules, takes it as one step.

    Args:
        model, call: of the Recommender. The others: of LossModel.

    Attributes:
        tower: whose vectors are given with the outputs of evaluations; None: nobody's.
        vectors_alone: whether nothing else is given of them then: no logits, and so nothing of any task.
        verdict: whether the last step is skipped: no gradient reaches a table, and `nonfinite.SkipBad` keeps
            the optimizers still. None unless `skip_bad`, and before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        call: ModelCall,
        objective: Objective,
        micro_batches: int = 1,
        skip_bad: bool = False,
    ):
        super().__init__()
        self.model, self._call, self._objective = model, call, objective
        self._micro_batches, self._skip_bad = micro_batches, skip_bad
        self.verdict: Verdict | None = None
        self.tower: TowerName | None = None
        self.vectors_alone = False

    def forward(self, pooled: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, Outputs]:
        if self.tower is None:
            return self._loss_and_outputs(pooled, batch)
        dense, side_features = batch.dense, batch.side_features
        vectors = self._call(
            self.model, dense, pooled, batch.sparse, tower=self.tower, side_features=side_features
        )
        if self.vectors_alone:
            nothing = vectors.new_zeros(())
            return nothing, Outputs({}, batch.weights, nothing, vectors=vectors)
        loss, outputs = self._loss_and_outputs(pooled, batch)
        return loss, replace(outputs, vectors=vectors)

    def _loss_and_outputs(
        self, pooled: dict[str, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, Outputs]:
        guarded = self._skip_bad and self.training
        if guarded:
            pooled = {feature: Gate.apply(values, self) for feature, values in pooled.items()}
        if self.training and self._micro_batches > 1:
            loss, losses, logits = self._in_pieces(pooled, batch)
        else:
            losses, logits = self.losses_of_rows(pooled, batch)
            loss = total(losses)
        self.verdict = Verdict(loss) if guarded else None
        labels, weights = batch.labels, batch.weights
        given = loss, logits, labels, weights, self.verdict, batch.task_weights, batch.keys
        outputs = self._objective.outputs(*given, losses if self.training else None, batch.global_rows)
        return loss, outputs

    def losses_of_rows(
        self,
        pooled: dict[str, torch.Tensor],
        batch: Batch,
        rows: slice = slice(None),
        whole: Whole | None = None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Losses of the tasks (Objective.losses) and logits of some rows.

        Args:
            pooled: of these rows; batch: the whole one.
            whole: what the objective says of all rows; default: these are all that it looks at.
        """
        logits = self._call(
            self.model, batch.dense[rows], pooled, batch.sparse, rows, side_features=batch.side_features
        )
        labels, weights = batch.labels[rows], batch.weights[rows]
        task_weights, keys = (None if x is None else x[rows] for x in (batch.task_weights, batch.keys))
        given = logits, labels, weights, batch.global_rows, task_weights, keys, whole, rows
        return self._objective.losses(*given), logits

    def _in_pieces(
        self, pooled: dict[str, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """Loss, losses and logits of all rows."""
        size = -(-len(batch.labels) // self._micro_batches)
        pieces = [slice(start, start + size) for start in range(0, len(batch.labels), size)]
        whole = self._whole(pooled, batch, pieces)
        pieces_of_logits: list[torch.Tensor] = []
        sums: dict[str, torch.Tensor] = {}

        def loss_of(rows: slice, inputs: list[torch.Tensor]) -> torch.Tensor:
            losses, logits = self.losses_of_rows(dict(zip(pooled, inputs, strict=True)), batch, rows, whole)
            pieces_of_logits.append(logits.detach())
            for name, part in losses.items():
                sums[name] = sums[name] + part.detach() if name in sums else part.detach()
            return total(losses)

        loss = PieceByPiece.apply(loss_of, pieces, len(pooled), *pooled.values(), *self.model.parameters())
        return loss, sums, torch.cat(pieces_of_logits)

    def _whole(self, pooled: dict[str, torch.Tensor], batch: Batch, pieces: list[slice]) -> Whole:
        """What the objective says of all rows. Where it compares them, their logits are computed first,
        without a graph, and by the pieces once more, with the same random numbers (dropout)."""
        logits = batch.weights  # which nobody looks at
        if self._objective.compares:
            device = batch.dense.device
            with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                parts = []
                for rows in pieces:
                    inputs = {feature: values[rows] for feature, values in pooled.items()}
                    dense, side_features = batch.dense[rows], batch.side_features
                    parts.append(
                        self._call(self.model, dense, inputs, batch.sparse, rows, side_features=side_features)
                    )
                logits = torch.cat(parts)
        return self._objective.whole(logits, batch.labels, batch.weights, batch.task_weights, batch.keys)


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
        phases: where the time of training goes; counts only if it was given.

    Args:
        numerics: how steps are computed, in training and evaluation; default: as torch is set.
        prefetch: whether a table of the plan has a cache on the GPUs; see pipeline.pipeline.
        managed: where tables have managed ids.
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
        managed: ManagedRows | None = None,
    ):
        self.model = model
        self.optimizer, self._device = optimizer, device
        self.trained, self._seed, self._schedule = 0, seed, schedule or Schedule()
        self.drain_every: int | None = None
        self._draining = False
        self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
        average = average_of(optimizer)
        self._averaged = average.applied if average else nullcontext
        self.phases = phases or Phases(device)
        self._numerics, self.managed = numerics or nullcontext, managed
        self._pipeline = pipeline(model, optimizer, device, phases, prefetch=prefetch)

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
            self._set_out()
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
        """The same, with rows in the place of managed ids; the first of them is that of the next step."""
        self._draining = False
        for step, batch in enumerate(batches, self.trained):
            with self.phases.phase("input_exchange"):
                self.managed.assign(batch, step)
            yield batch
            if self._draining or (self.drain_every and (step + 1) % self.drain_every == 0):
                return self.drain()

    def _set_out(self) -> None:
        """What a step depends on beside its batch and the model: learning rates and random numbers."""
        self._seed_generators(seed_of(self._seed, self.trained, dist.get_rank()))
        factor = self._schedule.factor(self.trained)
        for group, rate in self._rates:  # kernels take it over at zero_grad, with which the pipeline begins
            group["lr"] = rate * factor

    def _seed_generators(self, seed: int) -> None:
        """Those of the host and of this rank's device.

        Not by torch.manual_seed, which also keeps the seed, with a formatted stack, for every kind of device
        that has not been set up: 0.4 ms.
        """
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def evaluate(
        self, batches: Iterator[Batch], tower: TowerName | None = None, vectors_alone: bool = False
    ) -> Iterator[Outputs]:
        """Forward only, over all batches; with train.ema, of the averages of the dense weights.

        Args:
            tower: whose vectors are given, too (Outputs.vectors); the model retrieves, then.
            vectors_alone: give nothing else, of rows that have this tower's features alone.
        """
        self.model.eval()
        if self.managed is not None:
            batches = map(self.managed.find, batches)
        with (
            torch.no_grad(),
            updates_uncounted(self.model),
            self._averaged(),
            self._giving(tower, vectors_alone),
        ):
            while (outputs := self._progress(batches)) is not None:
                yield outputs

    @contextmanager
    def _giving(self, tower: TowerName | None, vectors_alone: bool) -> Iterator[None]:
        head = next(module for module in self.model.modules() if isinstance(module, Head))
        head.tower, head.vectors_alone = tower, vectors_alone
        try:
            yield
        finally:
            head.tower, head.vectors_alone = None, False

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
