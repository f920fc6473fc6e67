"""Embedding tables from the schema."""

from __future__ import annotations

import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from raytrec.config.schema import Schema


def embedding_bags(schema: Schema, dtypes: dict[str, str] | None = None) -> EmbeddingBagCollection:
    """The tables, without memory (meta device), as TorchRec shards them.

    Every table is declared SUM: TorchRec's sharded mean is wrong or differs under several sharding types, so
    means are divided outside (`pooling.BagMeans`).

    Args:
        dtypes: table → fp32 or fp16; default: all fp32.
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


def table_of(fqn: str) -> str | None:
    """The table that a parameter or state-dict key belongs to (None: a dense layer's)."""
    parts = fqn.split(".")
    return parts[-2] if len(parts) >= 3 and parts[-3] == "embedding_bags" and parts[-1] == "weight" else None
