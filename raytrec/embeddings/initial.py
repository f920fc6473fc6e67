"""Initial values of tables: the same ones for every plan and world size."""

from __future__ import annotations

import hashlib
from math import sqrt

import torch
from torch import nn

from raytrec.embeddings.tables import tables
from raytrec.schema import Schema

BLOCK_ROWS = 65_536  # rows that share one random stream; a rank makes only the blocks that it holds


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


def fill_tables(model: nn.Module, schema: Schema, seed: int) -> None:
    """Writes the initial values into a sharded model's local shards, in place."""
    for table in tables(model).values():
        for shard in table.weight.local:
            rows = initial_rows(schema, table.name, seed, shard.rows.start, shard.rows.stop)
            shard.values.copy_(rows[:, shard.columns.start : shard.columns.stop])
