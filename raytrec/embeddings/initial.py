"""Initial values of tables, which no plan changes."""

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


def initial_blocks(
    schema: Schema,
    table: str,
    seed: int,
    rows: range,
    columns: range | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[int, torch.Tensor]]:
    """Initial values of these rows and columns (default: all columns), made on the device: (first row,
    float32 [n, len(columns)]) of each block, one block in memory at a time."""
    spec = schema.tables[table]
    columns = range(spec.dim) if columns is None else columns
    block = max(1, BLOCK_VALUES // max(1, len(columns)))
    for first in range(rows.start, rows.stop, block):
        ids = torch.arange(first, min(first + block, rows.stop), device=device)
        yield first, initial_values(seed, table, ids, columns, spec.rows)


def fill_tables(model: nn.Module, schema: Schema, seed: int) -> None:
    """Writes the initial values into a sharded model's local shards, in place and block by block, on the
    device of each: no host holds a part of a table for that."""
    for table in tables(model).values():
        for shard in table.weight.local:
            blocks = initial_blocks(schema, table.name, seed, shard.rows, shard.columns, shard.values.device)
            for first, values in blocks:
                at = first - shard.rows.start
                shard.values[at : at + len(values)].copy_(values)
