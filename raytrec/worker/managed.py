"""Managed ids of a run: which rows ids have, and rows that begin anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from raytrec.checkpoint.state import LogicalState
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.embeddings.managed.batches import ManagedBatches
from raytrec.embeddings.managed.begin_rows import begin_rows


class ManagedRows(ManagedBatches):
    """ManagedBatches of a model that is trained; making it is a collective.

    A pipeline takes batches a few steps ahead. Their ids get rows then; what these rows hold is of the ids
    before them until all earlier steps have been trained: it is replaced when the model is called with the
    batch that has given them away.

    Args:
        model, optimizer: of build.build_step.

    Attributes:
        before_writing: as `before` of begin_rows.begin_rows.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: KeyedOptimizer,
        schema: Schema,
        seed: int,
        device: torch.device,
    ):
        super().__init__(schema, seed, device)
        self.before_writing: Callable[[str, torch.Tensor], None] = lambda table, rows: None
        self._tables, self._schema, self._seed = LogicalState(model, optimizer).tables, schema, seed
        model.register_forward_pre_hook(self._before_forward)

    def begin_rows(self, batch: Batch) -> None:
        """Rows that a batch has given to ids begin anew."""
        begin_rows(batch.new_rows or {}, self._tables, self._schema, self._seed, self.before_writing)

    def _before_forward(self, model: Any, inputs: tuple[Batch, ...]) -> None:
        self.begin_rows(inputs[0])
