"""Initial values of tables: the same ones for every plan and world size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import sqrt

import numpy as np
import torch
from torch import nn

from raytrec.config.schema import Schema
from raytrec.embeddings.hashing import GOLDEN, hash_bits
from raytrec.embeddings.tables import tables

BLOCK_ROWS = 65_536  # rows that share one random stream; a rank makes only the blocks that it holds


def initial_values(seed: int, table: str, ids: torch.Tensor, columns: range, rows: int) -> torch.Tensor:
    """Initial values of the rows of these ids, uniform in ±1/√rows, made on the device of the ids.

    Each is a function of (seed, table, id, column) alone, with the same bits on CPU and GPU: an id starts a
    sequence of splitmix64, and each number of it gives 32 bits to two columns. The first 25 of those, the
    last one set, are a whole number that float32 can hold; only its one multiplication is rounded.

    Args:
        ids: int64 [n], any values; row numbers, where a table's rows are its ids.
        columns: of the table, [start, stop).
        rows: of the whole table; the bound follows from them.

    Returns:
        float32 [n, len(columns)].
    """
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    starts_N = hash_bits(ids + int.from_bytes(digest, "big", signed=True))
    first, last = columns.start // 2, -(-columns.stop // 2)
    outputs_P = torch.arange(first, last, device=ids.device) * GOLDEN
    halves = hash_bits(starts_N.unsqueeze(1) + outputs_P).view(torch.int32)
    halves = halves[:, columns.start - 2 * first : columns.stop - 2 * first]
    scale = float(np.float32(1 / sqrt(rows) / 2**24))
    return (halves >> 7).bitwise_or_(1).to(torch.float32).mul_(scale)


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
