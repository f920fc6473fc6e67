"""Initial values of tables, which no plan changes."""

from __future__ import annotations

import hashlib
from math import sqrt

import numpy as np
import torch
from torch import nn

from raytrec.config.schema import Schema
from raytrec.embeddings.hashing import GOLDEN, hash_bits
from raytrec.embeddings.tables import tables

BLOCK_VALUES = 2**19  # made at once: few enough for a processor's cache, enough to keep a GPU busy


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


def fill_tables(model: nn.Module, schema: Schema, seed: int) -> None:
    """Writes the initial values into a sharded model's local shards, in place and block by block, on the
    device of each: no host holds a part of a table for that."""
    for table in tables(model).values():
        spec = schema.tables[table.name]
        for shard in table.weight.local:
            block = max(1, BLOCK_VALUES // max(1, len(shard.columns)))
            for first in range(shard.rows.start, shard.rows.stop, block):
                ids = torch.arange(first, min(first + block, shard.rows.stop), device=shard.values.device)
                at = first - shard.rows.start
                values = initial_values(seed, table.name, ids, shard.columns, spec.rows)
                shard.values[at : at + len(ids)].copy_(values)
