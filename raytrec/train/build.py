"""A rank's model: built alike everywhere, then sharded by one plan."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from raytrec.config import RunConfig
from raytrec.embeddings.optim import combine, fuse, is_fused
from raytrec.embeddings.plan import BagSharder, make_plan
from raytrec.embeddings.tables import fill_tables
from raytrec.models import build_model
from raytrec.schema import Schema
from raytrec.train.step import LossModel, Step


def build_step(config: RunConfig, schema: Schema, device: torch.device) -> tuple[Step, ShardingPlan]:
    """Model, plan, optimizers and pipeline of this rank; a collective.

    Initial weights depend on run.seed alone: dense layers are drawn alike on every rank, tables row by row.
    """
    torch.manual_seed(config.run.seed)
    model = LossModel(build_model(schema, config.model), dist.get_world_size())
    _to_device(model, device)
    fused = is_fused(config.optim.embeddings, device)
    if fused:
        fuse(model.model.embeddings.bags, config.optim.embeddings)
    sharder = BagSharder(config.plan.sharding)
    batch = -(-config.data.global_batch_size // dist.get_world_size())
    plan = make_plan(model, sharder, schema, config.plan, device, batch=batch, fused=fused)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    fill_tables(sharded.state_dict(), schema, config.run.seed)
    torch.manual_seed(config.run.seed + dist.get_rank())  # dropout differs between ranks
    return Step(sharded, combine(sharded, config.optim), device), plan


def _to_device(model: torch.nn.Module, device: torch.device) -> None:
    """Moves what has memory; the tables have none until they are sharded."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    moved = tensor.data.to(device)
                    tensors[name] = torch.nn.Parameter(moved) if tensors is module._parameters else moved
