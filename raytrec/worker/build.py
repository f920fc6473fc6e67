"""A rank's model: built, then sharded by one plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from raytrec.checkpoint.state import LogicalState
from raytrec.common.collectives import Peers
from raytrec.compat.fbgemm import CACHED, pad_empty_shards
from raytrec.compat.fbgemm_lookups import as_known_to_torchrec, own_lookups
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import CACHING_KERNEL, MMAP_KERNEL, table_optimizers
from raytrec.embeddings.managed.batches import ManagedBatches
from raytrec.embeddings.mapped import MappedFiles, mark_mapped
from raytrec.embeddings.optim import DenseAverage, GlobalNormClip, combine, fuse
from raytrec.embeddings.sharding import make_codecs, sharders, sharders_for_planning, widths_of
from raytrec.embeddings.tables import fill_tables
from raytrec.models.parts.shared import join_ranks
from raytrec.models.recommender import build_recommender, checkpoint_activations, compile_dense
from raytrec.planning.memory import held, planned
from raytrec.planning.plan import make_plan
from raytrec.planning.step import hot_rows
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
    shares = [share for share, _ in hot_rows(tables, config, schema, world)]
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
        fill_tables(sharded, config.run.seed)
    optimizer = combine(sharded, optimizers, config.optim.dense)
    if config.train.max_grad_norm:
        optimizer = GlobalNormClip(optimizer, sharded, config.train.max_grad_norm)
    if config.train.ema:
        optimizer = DenseAverage(optimizer, sharded, config.train.ema)
    if config.train.on_nan == "skip":
        optimizer = SkipBad(optimizer, model.head)
    managed = None
    if schema.managed:
        live = LogicalState(sharded, optimizer).tables
        managed = ManagedBatches(sharded, live, schema, config.run.seed, device)
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
