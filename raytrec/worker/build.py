"""A rank's model: built alike everywhere, then sharded by one plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from raytrec.compat.fbgemm import CACHED, pad_empty_shards
from raytrec.compat.fbgemm_lookups import as_known_to_torchrec, own_lookups
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.averages import DenseAverage
from raytrec.embeddings.clipping import GlobalNormClip
from raytrec.embeddings.codecs import make_codecs, widths_of
from raytrec.embeddings.gradients import require_gradient_division
from raytrec.embeddings.initial import fill_tables
from raytrec.embeddings.mapped import MappedFiles, mark_mapped
from raytrec.embeddings.optim import combine, fuse
from raytrec.embeddings.planner.constraints import table_optimizers
from raytrec.embeddings.planner.footprint import MMAP_KERNEL
from raytrec.embeddings.planner.plan import make_plan, sharders, sharders_for_planning
from raytrec.models.recommender import build_recommender, compile_dense
from raytrec.tasks.objective import Objective
from raytrec.tasks.task import columns_of, needs_vectors
from raytrec.worker.managed import ManagedRows
from raytrec.worker.nonfinite import SkipBad
from raytrec.worker.process import Numerics, prepare_process
from raytrec.worker.step import LossModel, Step
from raytrec.worker.step_timing import Phases


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
    model = _unsharded(config, schema, device, objective)
    optimizers = table_optimizers(config, schema)
    if config.train.compile:
        compile_dense(model.head.model, device)
    fuse(model.embeddings.collections, optimizers, device.type)
    world = dist.get_world_size()
    plan = make_plan(model, sharders_for_planning(config, schema, world), schema, config, device)
    codecs = make_codecs(config, widths_of(plan), world)
    mark_mapped(model.embeddings.collections, plan, optimizers)
    cache = _cache_settings(plan, device)
    with own_lookups(MappedFiles(config).zeros), as_known_to_torchrec(plan, {MMAP_KERNEL: "fused"}):
        sharded = DistributedModelParallel(
            model,
            device=device,
            plan=plan,
            sharders=sharders(cache, codecs),
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
    step = Step(
        sharded,
        optimizer,
        device,
        config.run.seed,
        config.optim.schedule.over(steps),
        Phases(device) if config.tracking.every_steps else None,
        Numerics(config.train, device),
        prefetch=cache is not None,
        managed=managed,
    )
    return step, plan


class _Alone(DataParallelWrapper):
    """Leaves the dense layers of a single rank as they are: nobody else's gradients are to be averaged."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Does nothing."""


def plan_of(config: RunConfig, schema: Schema, device: torch.device) -> ShardingPlan:
    """The plan that `build_step` would use, without making any table; a collective."""
    offered = sharders_for_planning(config, schema, dist.get_world_size())
    return make_plan(_unsharded(config, schema, device), offered, schema, config, device)


def _cache_settings(plan: ShardingPlan, device: torch.device) -> dict[str, Any] | None:
    """FBGEMM's settings where tables are in host memory with a cache on the GPUs: hits are counted, and rows
    brought in ahead of their step and locked until it has been trained. (On CPU there is no cache.)"""
    kernels = {spec.compute_kernel for module in plan.plan.values() for spec in module.values()}
    return CACHED if device.type == "cuda" and "fused_uvm_caching" in kernels else None


def _unsharded(
    config: RunConfig, schema: Schema, device: torch.device, objective: type[Objective] = Objective
) -> LossModel:
    made = objective.of(config, schema, dist.get_world_size())
    columns, vectors = columns_of(made.tasks), needs_vectors(made.tasks)
    recommender = build_recommender(config, schema, device, sum(columns.values()), vectors, columns)
    return LossModel(recommender, made, config.train.micro_batches, config.train.on_nan == "skip")
