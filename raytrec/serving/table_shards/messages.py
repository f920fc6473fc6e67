"""Messages between replicas and table shards: flat little-endian arrays without pickles. Does not import torch.

    request    int64 [MESSAGE_FORMAT, bytes of the key, stacks]
               int64 [stacks, 4]: single rows s, pooled rows p, bags b, 1 if the pooled rows have weights
               the key of the state in UTF-8 (`TableState.key`), padded with spaces to a multiple of 8 bytes
               for each stack int64 rows [s + p], int64 lengths of the bags [b]
               for each stack with weights float32 [p]
    response     for each stack float32 [s + b, dim]: vectors of the single rows, then sums of the bags

A stack contains the tables of one dim, one after another; a bag contains the rows whose vectors are summed for one
feature value. A request has all stacks of the export in the order of its manifest. The rows of a stack are numbered
over all shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytrec.common.errors import RunError

MESSAGE_FORMAT = 1
MAX_STATES = 8  # maximum number of states that a shard keeps, because replicas may be some deltas behind
MAX_VALUE_BYTES = 1 << 30  # maximum size of the vectors that a shard reads for a request
MAX_KEY_BYTES = 1024


class OutdatedStateError(RunError):
    """Error for a request of a state that is older than the states that a shard keeps."""


@dataclass(frozen=True)
class StackRequest:
    """Rows of one stack in a request.

    Attributes:
        rows: int64 [s + p]: s rows whose vectors are requested, then p rows that the shard pools.
        lengths: Number of pooled rows in each bag, at least 1, int64 [b].
        weights: Weight of each pooled row, float32 [p]; None: 1.
    """

    rows: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None = None


def encode_request(key: str, stacks: Sequence[StackRequest]) -> bytes:
    """Return the bytes of a request for rows of these stacks in the state with this key."""
    name = key.encode()
    header = [MESSAGE_FORMAT, len(name), len(stacks)]
    for each in stacks:
        pooled = int(each.lengths.sum())
        header += [len(each.rows) - pooled, pooled, len(each.lengths), each.weights is not None]
    parts: list[Any] = [np.array(header, np.int64), name.ljust(-len(name) % 8 + len(name))]
    parts += [values for each in stacks for values in (each.rows, each.lengths)]
    parts += [each.weights for each in stacks if each.weights is not None]
    return b"".join(parts)


def decode_key(request: memoryview) -> str:
    """Return the key of the state that a request names.

    Raises:
        ValueError: The request is malformed.
    """
    if request.nbytes < 24:
        raise ValueError("the request has no header")
    kind, size, stacks = np.frombuffer(request, np.int64, 3).tolist()
    start = 24 + 32 * stacks
    if kind != MESSAGE_FORMAT or not (0 < size <= MAX_KEY_BYTES and stacks > 0 and start < request.nbytes):
        raise ValueError(f"the request does not begin with a valid header of format {MESSAGE_FORMAT}")
    return bytes(request[start : start + size]).decode()


def decode_request(request: memoryview, shapes: Sequence[tuple[int, int]]) -> list[StackRequest]:
    """Return the requested rows of each stack. Call `decode_key`, which checks the header, before.

    Args:
        request: Bytes of the request.
        shapes: Number of rows and dim of each stack.

    Raises:
        ValueError: The request is malformed, a row is not in its stack, or the vectors exceed MAX_VALUE_BYTES.
    """
    _, name_bytes, count = np.frombuffer(request, np.int64, 3).tolist()
    if count != len(shapes):
        raise ValueError(f"the request has {count} stacks; the export has {len(shapes)}")
    sizes = np.frombuffer(request, np.int64, 4 * count, offset=24).reshape(count, 4).tolist()
    value_bytes = sum((s + p) * 4 * dim for (s, p, *_), (_, dim) in zip(sizes, shapes, strict=True))
    if min(map(min, sizes)) < 0:
        raise ValueError("the header contains a negative size")
    if value_bytes > MAX_VALUE_BYTES:
        raise ValueError(f"the vectors of the request take {value_bytes:,} bytes, more than {MAX_VALUE_BYTES:,}")
    start = 24 + 32 * count + name_bytes + -name_bytes % 8
    numbers = sum(s + p + b for s, p, b, _ in sizes)
    if start + 8 * numbers + sum(4 * p for _, p, _, weighted in sizes if weighted) != request.nbytes:
        raise ValueError("the sizes in the header do not match the size of the request")
    integers, stacks = np.frombuffer(request, np.int64, numbers, offset=start), []
    floats, place = start + 8 * numbers, 0
    for (single, pooled, bags, weighted), (rows_of_stack, _) in zip(sizes, shapes, strict=True):
        rows, place = integers[place : place + single + pooled], place + single + pooled
        lengths, place = integers[place : place + bags], place + bags
        if len(rows) and not (rows.min() >= 0 and rows.max() < rows_of_stack):
            raise ValueError(f"a row is not in the {rows_of_stack:,} rows of its stack")
        if bags > pooled or (bags and not 1 <= lengths.min() <= lengths.max() <= pooled) or lengths.sum() != pooled:
            raise ValueError("the lengths of the bags do not match the number of pooled rows")
        weights = np.frombuffer(request, np.float32, pooled, offset=floats) if weighted else None
        floats += 4 * pooled if weighted else 0
        stacks.append(StackRequest(rows, lengths, weights))
    return stacks
