"""Optimizers: tables are updated in backward (fused), dense layers after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from raytrec.compat.torch_ import apply_optimizer_in_backward
from raytrec.config.sections import DenseOptim, EmbeddingOptim
from raytrec.embeddings.bags import Collection, table_of, tables_in
from raytrec.embeddings.per_table import has_fused

CLASSES = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def _settings(config: EmbeddingOptim | DenseOptim) -> dict:
    return {"lr": config.lr} | ({} if config.name == "sgd" else {"eps": config.eps})


def fuse(collections: Iterable[Collection], optimizers: Mapping[str, EmbeddingOptim], device: str) -> None:
    """Marks the tables, before sharding, to be updated in backward, where there is a kernel for that.

    TorchRec (1.8.0, group_tables) then puts tables of one collection, optimizer and learning rate into one
    kernel.

    Args:
        collections: PooledEmbeddings.collections.
        optimizers: of every table (per_table.table_optimizers).
        device: cpu or cuda.
    """
    for collection in collections:
        for table, module in tables_in(collection).items():
            optimizer = optimizers[table]
            if has_fused(optimizer.name, device):
                # No weight decay: constraints.validate_constraints has refused it for these kernels.
                apply_optimizer_in_backward(
                    CLASSES[optimizer.name], module.parameters(), _settings(optimizer)
                )


def combine(
    model: nn.Module, optimizers: Mapping[str, EmbeddingOptim], of_dense: DenseOptim
) -> CombinedOptimizer:
    """One optimizer over everything, after sharding.

    It holds the fused ones, one for each optimizer and learning rate of tables that are not updated in
    backward (data-parallel ones, those with a dense kernel, those of Adam on CPU), and the dense layers' one.
    A dense update of a table by Adam also moves rows that the batch did not touch; the fused one does not.

    Args:
        model: the DistributedModelParallel.
        optimizers: of every table (per_table.table_optimizers).
        of_dense: of the dense layers.
    """
    # A row-wise table with fewer rows than ranks leaves some ranks an empty shard, with nothing to train.
    rest = {n: p for n, p in in_backward_optimizer_filter(model.named_parameters()) if p.numel()}
    parts = [("fused", model.fused_optimizer)]
    every = list(optimizers.values())
    for optimizer in [each for i, each in enumerate(every) if each not in every[:i]]:
        tables = {n: p for n, p in rest.items() if (table := table_of(n)) and optimizers[table] == optimizer}
        if tables:
            parts.append(("tables", _wrap(tables, optimizer)))
    if dense := {name: p for name, p in rest.items() if not table_of(name)}:
        parts.append(("dense", _wrap(dense, of_dense)))
    return CombinedOptimizer(parts)


def _wrap(parameters: dict[str, nn.Parameter], config: EmbeddingOptim | DenseOptim) -> KeyedOptimizerWrapper:
    settings = _settings(config) | {"weight_decay": config.weight_decay}
    return KeyedOptimizerWrapper(parameters, lambda params: CLASSES[config.name](params, **settings))
