"""A rank's model: built, then sharded by one plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import KeyedOptimizer

from raytrec.checkpoint.state import LogicalState
from raytrec.common.collectives import Peers
from raytrec.compat.fbgemm import CACHED, pad_empty_shards
from raytrec.compat.fbgemm_lookups import as_known_to_torchrec, own_lookups
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.embeddings.codecs import make_codecs, widths_of
from raytrec.embeddings.constraints import CACHING_KERNEL, MMAP_KERNEL, table_optimizers
from raytrec.embeddings.initial import BLOCK_VALUES, fill_tables, initial_values
from raytrec.embeddings.managed.batches import ManagedBatches
from raytrec.embeddings.mapped import MappedFiles, mark_mapped
from raytrec.embeddings.optim import DenseAverage, GlobalNormClip, combine, fuse
from raytrec.embeddings.sharding import sharders, sharders_for_planning
from raytrec.models.parts.shared import join_ranks
from raytrec.models.recommender import build_recommender, checkpoint_activations, compile_dense
from raytrec.planning.memory import held, planned
from raytrec.planning.plan import make_plan
from raytrec.planning.step import hot_shares
from raytrec.tasks.global_batch import require_gradient_division
from raytrec.tasks.objective import Objective
from raytrec.tasks.task import columns_of, needs_vectors
from raytrec.worker.loop import train_order
from raytrec.worker.nonfinite import SkipBad
from raytrec.worker.process import prepare_process
from raytrec.worker.step import LossModel, Step


def build_step(
    config: RunConfig,
    schema: Schema,
    device: torch.device,
    *,
    fill: bool = True,
    steps: int = 0,
    objective: type[Objective] = Objective,
) -> tuple[Step, ShardingPlan]:
    """Model, plan, optimizers and pipeline of this rank; a collective.

    Initial weights depend on run.seed alone: dense layers are drawn alike on every rank, tables row by row.

    Args:
        fill: whether tables get their initial values; a checkpoint that is read next brings others.
        steps: of the whole run; 0: nothing is trained.
        objective: what becomes of the model's logits.
    """
    require_gradient_division()
    prepare_process(config.train)
    world = dist.get_world_size()
    model = unsharded(config, schema, device, world, objective)
    optimizers = table_optimizers(config, schema)
    if config.train.compile:
        rows = train_order(config).padded_rows(config.data.global_batch_size, 0, dist.get_world_size())
        graph_rows = rows if config.train.compile == "graphs" else None
        compile_dense(model.head.model, model.head.call, device, graph_rows)
    if config.train.activation_checkpointing:
        checkpoint_activations(model.head.model)
    fuse(model.embeddings.collections, optimizers, device.type)
    offered = sharders_for_planning(config, schema, world)
    plan = make_plan(model, offered, schema, config, device)
    codecs = make_codecs(config, widths_of(plan), world)
    tables = held(planned(plan, config, schema, world), config, schema, device.type)
    shares = hot_shares(tables, config, schema, world)
    mark_mapped(model.embeddings.collections, plan, optimizers, any(shares))
    cache = _cache_settings(plan, device)
    files = MappedFiles(config, shares[dist.get_rank()])
    with own_lookups(files), as_known_to_torchrec(plan, {MMAP_KERNEL: "fused"}):
        sharded = DistributedModelParallel(
            model,
            device=device,
            plan=plan,
            sharders=sharders(cache, codecs, device.type, _sends_distinct_ids(config, device, world)),
            data_parallel_wrapper=_Alone() if world == 1 else None,
        )
    pad_empty_shards(sharded)
    if fill:
        fill_tables(sharded, schema, config.run.seed)
    optimizer = combine(sharded, optimizers, config.optim.dense)
    if config.train.max_grad_norm:
        optimizer = GlobalNormClip(optimizer, sharded, config.train.max_grad_norm)
    if config.train.ema:
        optimizer = DenseAverage(optimizer, sharded, config.train.ema)
    if config.train.on_nan == "skip":
        optimizer = SkipBad(optimizer, model.head)
    managed = None
    if schema.managed:
        managed = ManagedRows(sharded, optimizer, schema, config.run.seed, device)
    return Step(sharded, optimizer, device, config, steps, cache is not None, managed), plan


class _Alone(DataParallelWrapper):
    """Leaves the dense layers of a single rank as they are: there are no other gradients to average."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Does nothing."""


def plan_of(config: RunConfig, schema: Schema, device: torch.device) -> ShardingPlan:
    """The plan that `build_step` would use, without making any table; a collective."""
    world = dist.get_world_size()
    offered = sharders_for_planning(config, schema, world)
    return make_plan(unsharded(config, schema, device, world), offered, schema, config, device)


def _sends_distinct_ids(config: RunConfig, device: torch.device, world: int) -> bool:
    """Whether each id that is read by itself is sent to other ranks once a batch, and its gradients as a sum.

    FBGEMM (1.8.0) finds distinct ids on GPUs alone. In fp16 the sum of many gradients may be infinite.
    """
    return device.type == "cuda" and world > 1 and config.plan.qcomms.backward_precision != "fp16"


def _cache_settings(plan: ShardingPlan, device: torch.device) -> dict[str, Any] | None:
    """FBGEMM's settings where tables are in host memory with a cache on the GPUs: hits are counted, and rows
    brought in ahead of their step and locked until it has been trained. (On CPU there is no cache.)"""
    kernels = {spec.compute_kernel for module in plan.plan.values() for spec in module.values()}
    return CACHED if device.type == "cuda" and CACHING_KERNEL in kernels else None


def unsharded(
    config: RunConfig,
    schema: Schema,
    device: torch.device,
    world: int = 1,
    objective: type[Objective] = Objective,
) -> LossModel:
    """Model and objective of a rank among `world`: dense layers on the device, tables on meta."""
    made = objective.of(config, schema, world)
    columns, vectors = columns_of(made.tasks), needs_vectors(made.tasks)
    recommender = build_recommender(config, schema, device, sum(columns.values()), vectors, columns)
    if world > 1:
        join_ranks(recommender.model, Peers(device))
    ranks_items = config.eval.retrieval is not None and objective is Objective
    return LossModel(recommender, made, query_vectors=ranks_items)


class ManagedRows(ManagedBatches):
    """ManagedBatches of a model that is trained; making it is a collective.

    A pipeline takes batches a few steps ahead, and their ids get rows then. A row holds the values of the id
    before it until all earlier steps have been trained: they are replaced when the model is called with the
    batch that has given the row away.

    Args:
        model, optimizer: of build_step.

    Attributes:
        before_writing: called before anything is written to rows of a shard: (table, rows int64 [n], counted
            from the shard's first).
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
        self._shards = {
            name: {shard.rows for part in (table.weight, *table.state.values()) for shard in part.local}
            for name, table in self._tables.items()
        }
        model.register_forward_pre_hook(lambda _, inputs: self.begin_rows(inputs[0]))

    def assign(self, batch: Batch, step: int) -> Batch:
        """See ManagedBatches. It also finds out which of the rows this rank's shards have: here a GPU still
        has the steps before to train, when the model is called it would run dry."""
        batch = super().assign(batch, step)
        new = {name: its for name, its in (batch.new_rows or {}).items() if len(its.rows)}
        within = {
            (name, rows): (its.rows >= rows.start) & (its.rows < rows.stop)
            for name, its in new.items()
            for rows in self._shards[name]
        }
        counts = torch.stack([mask.sum() for mask in within.values()]).tolist() if within else []
        places: dict[str, dict[range, torch.Tensor]] = {name: {} for name in new}
        for ((name, rows), mask), count in zip(within.items(), counts, strict=True):
            places[name][rows] = torch.nonzero_static(mask, size=count).squeeze(1)
        batch.new_rows = {name: its._replace(places=places[name]) for name, its in new.items()}
        return batch

    @torch.no_grad()
    def begin_rows(self, batch: Batch) -> None:
        """Resets the rows of this rank's shards that a batch has given to other ids: to these ids' initial
        values, without optimizer state. Values are made block by block."""
        for name, (rows, ids, places) in (batch.new_rows or {}).items():
            table, spec = self._tables[name], self._schema.tables[name]
            for shard in table.weight.local:
                for its in places[shard.rows].split(max(1, BLOCK_VALUES // len(shard.columns))):
                    its_rows = rows[its] - shard.rows.start
                    values = initial_values(self._seed, name, ids[its], shard.columns, spec.rows)
                    self.before_writing(name, its_rows)
                    shard.write(its_rows, values)
            for parts in table.state.values():
                for shard in parts.local:
                    its_rows = rows[places[shard.rows]] - shard.rows.start
                    shard.write(its_rows, shard.values.new_zeros(len(its_rows), *shard.values.shape[1:]))
