"""Embedding tables from the schema, and their initial values."""

from __future__ import annotations

import hashlib
from math import sqrt

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from raytrec.schema import Schema

BLOCK_ROWS = 65_536  # rows that share one random stream; a rank makes only the blocks that it holds


def embedding_bags(schema: Schema) -> EmbeddingBagCollection:
    """The tables, without memory (meta device), as TorchRec shards them.

    Every table is declared SUM: TorchRec's sharded mean is wrong or differs under several sharding types, so
    means are divided outside (`pooling.BagMeans`).
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
            )
            for name, table in schema.tables.items()
        ],
    )


def table_of(fqn: str) -> str | None:
    """The table that a parameter or state-dict key belongs to (None: a dense layer's)."""
    parts = fqn.split(".")
    return parts[-2] if len(parts) >= 3 and parts[-3] == "embedding_bags" and parts[-1] == "weight" else None


def initial_rows(schema: Schema, table: str, seed: int, start: int, stop: int) -> torch.Tensor:
    """Initial values of rows [start, stop): float32 [stop - start, dim], uniform in ±1/√rows.

    They depend on (seed, table, row) alone, so that every plan and world size starts from the same tables.
    """
    spec = schema.tables[table]
    bound = 1 / sqrt(spec.rows)
    out = torch.empty(stop - start, spec.dim)
    for block in range(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)):
        first, last = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, spec.rows)
        digest = hashlib.blake2b(f"{seed}/{table}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
        values = torch.empty(last - first, spec.dim).uniform_(-bound, bound, generator=generator)
        low, high = max(start, first), min(stop, last)
        out[low - start : high - start] = values[low - first : high - first]
    return out


@torch.no_grad()
def fill_tables(state: dict[str, torch.Tensor | ShardedTensor], schema: Schema, seed: int) -> None:
    """Writes the initial values into a sharded model's local shards, in place.

    Args:
        state: the sharded model's state_dict(): ShardedTensors for sharded tables, plain tensors for
            data-parallel ones.
    """
    for fqn, value in state.items():
        table = table_of(fqn)
        if table is None:
            continue
        if isinstance(value, ShardedTensor):
            parts = [(s.tensor, s.metadata.shard_offsets) for s in value.local_shards()]
        else:
            parts = [(value, [0, 0])]
        for tensor, (row, column) in parts:
            rows = initial_rows(schema, table, seed, row, row + tensor.shape[0])
            tensor.copy_(rows[:, column : column + tensor.shape[1]])
