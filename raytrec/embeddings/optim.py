"""Optimizers: tables are updated in backward (fused), dense layers after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from raytrec.compat.torch_ import apply_optimizer_in_backward
from raytrec.config.tables import DenseOptim, EmbeddingOptim
from raytrec.embeddings.bags import Collection, table_of, tables_in
from raytrec.embeddings.optimizers import optimizer_of


def _settings(config: EmbeddingOptim | DenseOptim) -> dict:
    return {"lr": config.lr} | {key: getattr(config, key) for key in optimizer_of(config.name).settings}


def fuse(collections: Iterable[Collection], optimizers: Mapping[str, EmbeddingOptim], device: str) -> None:
    """Marks the tables, before sharding, to be updated in backward, where there is a kernel for that.

    TorchRec (1.8.0, group_tables) then puts tables of one collection, optimizer and learning rate into one
    kernel.

    Args:
        collections: PooledEmbeddings.collections.
        optimizers: of every table (constraints.table_optimizers).
        device: cpu or cuda.
    """
    for collection in collections:
        for table, module in tables_in(collection).items():
            known = optimizer_of(optimizers[table].name)
            if device in known.devices:
                # No weight decay: validation.check_decay has refused it for these kernels.
                settings = _settings(optimizers[table])
                apply_optimizer_in_backward(known.torch_class(), module.parameters(), settings)


class RunOptimizer(CombinedOptimizer):
    """Every optimizer of a run as one.

    Attributes:
        names: table → the name of its optimizer in the configuration.
    """

    def __init__(self, parts: list[tuple[str, KeyedOptimizer]], names: dict[str, str]):
        super().__init__(parts)
        self.names = names


def combine(model: nn.Module, optimizers: Mapping[str, EmbeddingOptim], of_dense: DenseOptim) -> RunOptimizer:
    """One optimizer over everything, after sharding.

    It holds the fused ones, one for each optimizer and learning rate of tables that are not updated in
    backward (data-parallel ones, those with a dense kernel, those of an optimizer without a kernel), and the
    dense layers' one.

    Args:
        model: the DistributedModelParallel.
        optimizers: of every table (constraints.table_optimizers).
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
    return RunOptimizer(parts, {table: optimizer.name for table, optimizer in optimizers.items()})


def _wrap(parameters: dict[str, nn.Parameter], config: EmbeddingOptim | DenseOptim) -> KeyedOptimizerWrapper:
    settings = _settings(config) | {"weight_decay": config.weight_decay}
    make = optimizer_of(config.name).torch_class()
    return KeyedOptimizerWrapper(parameters, lambda params: make(params, **settings))
