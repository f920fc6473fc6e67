"""Gather the tensors of a sharded model on rank 0, for the parity check.

Tables with managed ids are sorted by id: row i contains the values of id i, or its initial values if the id has
no row. The result equals that of a table without managed ids.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist

from raytrec.checks.parity.batches import GlobalBatch, make_local_batch
from raytrec.checks.parity.reference import Reference
from raytrec.compat.torch_ import Dropout
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.embeddings.constraints import resolve_constraints
from raytrec.embeddings.hashing import compute_initial_values
from raytrec.embeddings.tables import tables
from raytrec.models import build_model
from raytrec.tasks.objective import Objective, add_temperatures
from raytrec.tasks.task import count_logits, needs_vectors


class ShardedRun:
    """Sharded model to compare with a single process (Reference).

    The constructor and the methods `train`, `pooled`, `weights` and `state` are collectives.

    Args:
        build: Function that builds the training step: worker.build.build_step.
        config: Configuration of the run.
        schema: Schema of the run.
        device: Device of this rank.
        bounds: Boundaries of the ranks' rows in a global batch (batches.compute_row_bounds).
    """

    def __init__(self, build: Callable, config: RunConfig, schema: Schema, device: torch.device, bounds: list[int]):
        self.config, self.schema, self.device, self.bounds = config, schema, device, bounds
        self.dtypes = {table: each.dtype for table, each in resolve_constraints(config, schema).items()}
        self.features = resolve_features(schema, config.model)
        self.step, _ = build(config, schema, device)
        _disable_dropout(self.step.model)
        self.kernels = {name: table.kernel for name, table in tables(self.step.model).items()}

    def train(self, batches: list[GlobalBatch]) -> None:
        """Train on global batches; each rank trains its part."""
        local = [self._local(b) for b in batches]
        for _ in self.step.train(iter(local), len(local)):
            pass

    @torch.no_grad()
    def pooled(self, batch: GlobalBatch) -> dict[str, torch.Tensor]:
        """Return the pooled embeddings of the whole batch by feature on rank 0, in host memory; {} on other ranks.

        New managed ids of the batch get rows. Features that the model reads id by id are [B, L, dim].
        """
        rank = dist.get_rank()
        local = self._local(batch).to(self.device)
        if self.step.managed is not None:  # new ids must get rows before the lookup
            self.step.managed.reset_new_rows(self.step.managed.map_and_admit_ids(local, 0))
        out = self.step.model.module.embeddings(local.sparse)
        local_part = {f: v[: self.bounds[rank + 1] - self.bounds[rank]].cpu() for f, v in out.items()}
        parts: list | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(local_part, parts)
        return {f: torch.cat([part[f] for part in parts]) for f in local_part} if parts else {}

    def _local(self, batch: GlobalBatch) -> Batch:
        return make_local_batch(batch, self.schema, self.bounds, dist.get_rank(), self.features)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return each table and dense parameter by name, as a whole tensor in host memory on rank 0.

        If copies of a replicated value differ, the copy that differs most is returned. On ranks other than 0, sharded
        tables are None. The result is stored for `reference` and `copy_weights_to`.
        """
        model = self.step.model.module.head.model
        whole = {name: _select_farthest_copy(p.detach()).cpu() for name, p in model.named_parameters()}
        for table in tables(self.step.model).values():
            if table.weight.replicated:
                whole[table.name] = _select_farthest_copy(table.weight.local[0].values).cpu()
            else:
                values = table.weight.dense(first_only=True)
                whole[table.name] = values if values is None else values.cpu()
        for name in self.schema.managed:
            spec, seed = self.schema.tables[name], self.config.run.seed
            initial = compute_initial_values(seed, name, torch.arange(spec.rows), range(spec.dim), spec.rows)
            whole[name] = self._sort_by_id(name, whole[name], initial)
        self._read = whole
        return whole

    def _sort_by_id(self, table: str, values: torch.Tensor | None, without_row: torch.Tensor) -> torch.Tensor | None:
        """Return a managed table's values sorted by id, and then the fallback rows.

        This is a collective operation: every rank must call it. The result is None if `values` is None.

        Args:
            table: Name of the table.
            values: Values by row, [rows, ...], or None on ranks without them.
            without_row: Values of ids without a row, of the same shape.
        """
        own_rows = self.schema.tables[table].own_rows
        rows = self.step.managed.look_up_rows(table, torch.arange(own_rows)).cpu()
        if values is None:
            return None
        out = without_row.to(values.dtype)
        out[:own_rows][rows < own_rows], out[own_rows:] = values[rows[rows < own_rows]], values[own_rows:]
        return out

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return table → kind of optimizer state → whole tensor in host memory on rank 0, None on other ranks.

        Tables whose optimizer has no state are omitted.
        """
        out: dict[str, dict[str, torch.Tensor]] = {}
        for table in tables(self.step.model, self.step.optimizer).values():
            for kind, parts in sorted(table.state.items()):
                values = parts.dense(first_only=True)
                values = values if values is None else values.cpu()
                if table.name in self.schema.managed:
                    values = self._sort_by_id(table.name, values, torch.zeros(parts.shape))
                out.setdefault(table.name, {})[kind] = values
        return out

    def reference(self) -> Reference | None:
        """Return a reference with the weights last returned by `weights`; None on ranks other than 0."""
        if dist.get_rank():
            return None
        objective = Objective.of(self.config, self.schema)
        section = copy.deepcopy(self.config.model)
        model = build_model(self.schema, section, count_logits(objective.tasks), needs_vectors(objective.tasks))
        add_temperatures(model, objective.tasks)
        _disable_dropout(model)
        tables = {t: self._read[t] for t in self.schema.tables}
        with_ids = section.reads_ids(self.schema)
        single = Reference(self.schema, tables, model.train(), self.features.sequences, objective, with_ids)
        self.copy_weights_to(single)
        return single

    @torch.no_grad()
    def copy_weights_to(self, single_process: Reference) -> None:
        """Copy the weights last returned by `weights` to the reference; call this on rank 0 only."""
        for name, parameter in self.list_parameters(single_process).items():
            parameter.copy_(self._read[name])

    def list_parameters(self, single_process: Reference) -> dict[str, torch.nn.Parameter]:
        """Return the reference's parameters under their names in `weights`."""
        return single_process.tables | dict(single_process.model.named_parameters())


def _disable_dropout(model: torch.nn.Module) -> None:
    """Disable dropout, because each rank draws its masks independently."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0


def _select_farthest_copy(replica: torch.Tensor) -> torch.Tensor:
    """Return, for each value of a replicated tensor, the copy of any rank that differs most from this rank's copy.

    This is a collective operation: every rank must call it. The result equals the tensor if all copies are the same.
    """
    high, low = replica.clone(), replica.clone()
    dist.all_reduce(high, dist.ReduceOp.MAX)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    return torch.where(high - replica > replica - low, high, low)
