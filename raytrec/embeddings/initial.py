"""Initial values of tables: the same ones for every plan and world size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import sqrt

import torch
from torch import nn

from raytrec.config.schema import Schema
from raytrec.embeddings.tables import tables

BLOCK_ROWS = 65_536  # rows that share one random stream; a rank makes only the blocks that it holds


def initial_blocks(schema: Schema, table: str, seed: int, rows: range) -> Iterator[tuple[int, torch.Tensor]]:
    """Initial values of these rows, uniform in ±1/√(rows of the table): (first row, float32 [n, dim]) of each
    block, one block in memory at a time.

    They depend on (seed, table, row) alone, so that every plan and world size starts from the same tables.
    """
    spec = schema.tables[table]
    bound = 1 / sqrt(spec.rows)
    for block in range(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)):
        first, last = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, spec.rows)
        digest = hashlib.blake2b(f"{seed}/{table}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
        values = torch.empty(last - first, spec.dim).uniform_(-bound, bound, generator=generator)
        low, high = max(rows.start, first), min(rows.stop, last)
        yield low, values[low - first : high - first]


def initial_rows(schema: Schema, table: str, seed: int, start: int, stop: int) -> torch.Tensor:
    """Initial values of rows [start, stop): float32 [stop - start, dim]."""
    out = torch.empty(stop - start, schema.tables[table].dim)
    for first, values in initial_blocks(schema, table, seed, range(start, stop)):
        out[first - start : first - start + len(values)] = values
    return out


def fill_tables(model: nn.Module, schema: Schema, seed: int) -> None:
    """Writes the initial values into a sharded model's local shards, in place and block by block: a shard may
    be larger than what host memory has left."""
    for table in tables(model).values():
        for shard in table.weight.local:
            for first, values in initial_blocks(schema, table.name, seed, shard.rows):
                at = first - shard.rows.start
                shard.values[at : at + len(values)].copy_(values[:, shard.columns.start : shard.columns.stop])
