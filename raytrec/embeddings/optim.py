"""Optimizers: tables are updated in backward (fused), dense layers after it."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from raytrec.compat.torch_ import apply_optimizer_in_backward
from raytrec.config.sections import DenseOptim, EmbeddingOptim, OptimSection
from raytrec.embeddings.bags import table_of

CLASSES = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def is_fused(config: EmbeddingOptim, device: torch.device) -> bool:
    """Whether sharded tables are updated in backward: always, but for Adam on CPU (FBGEMM has none)."""
    return not (config.name == "adam" and device.type == "cpu")


def _settings(config: EmbeddingOptim | DenseOptim) -> dict:
    settings = {"lr": config.lr} | ({} if config.name == "sgd" else {"eps": config.eps})
    # No weight decay for tables: FBGEMM's fused optimizers on CPU take it and ignore it.
    return settings | ({"weight_decay": config.weight_decay} if isinstance(config, DenseOptim) else {})


def fuse(bags: EmbeddingBagCollection, config: EmbeddingOptim) -> None:
    """Marks the tables, before sharding, to be updated in backward."""
    apply_optimizer_in_backward(CLASSES[config.name], bags.parameters(), _settings(config))


def combine(model: nn.Module, config: OptimSection) -> CombinedOptimizer:
    """One optimizer over everything, after sharding.

    It holds the fused one, one of the embeddings' kind for tables that are not updated in backward
    (data-parallel ones, and all under Adam on CPU), and the dense layers' one. A dense update of a table by
    Adam also moves rows that the batch did not touch; the fused one does not.

    Args:
        model: the DistributedModelParallel.
    """
    # A row-wise table with fewer rows than ranks leaves some ranks an empty shard, with nothing to train.
    rest = {n: p for n, p in in_backward_optimizer_filter(model.named_parameters()) if p.numel()}
    tables = {name: p for name, p in rest.items() if table_of(name)}
    dense = {name: p for name, p in rest.items() if not table_of(name)}
    parts = [("fused", model.fused_optimizer)]
    for name, parameters, part in (("tables", tables, config.embeddings), ("dense", dense, config.dense)):
        if parameters:
            parts.append((name, _wrap(parameters, part)))
    return CombinedOptimizer(parts)


def _wrap(parameters: dict[str, nn.Parameter], config: EmbeddingOptim | DenseOptim) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(parameters, lambda params: CLASSES[config.name](params, **_settings(config)))
