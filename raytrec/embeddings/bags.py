"""Embedding tables from the schema."""

from __future__ import annotations

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from raytrec.schema import Schema


def embedding_bags(schema: Schema, dtypes: dict[str, str] | None = None) -> EmbeddingBagCollection:
    """The tables, without memory (meta device), as TorchRec shards them.

    Every table is declared SUM: TorchRec's sharded mean is wrong or differs under several sharding types, so
    means are divided outside (`pooling.BagMeans`).

    Args:
        dtypes: table → fp32, fp16 or bf16; default: all fp32.
    """
    features_of: dict[str, list[str]] = {table: [] for table in schema.tables}
    for feature, spec in schema.sparse.items():
        features_of[spec.table].append(feature)
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        is_weighted=schema.has_weights,
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=features_of[name],
                pooling=PoolingType.SUM,
                data_type=DataType[(dtypes or {}).get(name, "fp32").upper()],
            )
            for name, table in schema.tables.items()
        ],
    )


def pad_empty_kernels(model: nn.Module) -> None:
    """Lets kernels run on a rank where none of their tables has a row (fewer rows than ranks, row-wise).

    FBGEMM (1.8.0) on CPU takes a kernel without weights for one on a GPU, and fails. The values put there
    belong to no table.

    Args:
        model: the DistributedModelParallel.
    """
    for kernel in model.modules():
        if not isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen) or not kernel.use_cpu:
            continue
        if not kernel.weights_host.numel():
            kernel.weights_host = torch.zeros(kernel.max_D, dtype=kernel.weights_host.dtype)


def table_of(fqn: str) -> str | None:
    """The table that a parameter or state-dict key belongs to (None: a dense layer's)."""
    parts = fqn.split(".")
    return parts[-2] if len(parts) >= 3 and parts[-3] == "embedding_bags" and parts[-1] == "weight" else None
