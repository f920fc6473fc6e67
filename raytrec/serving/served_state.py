"""State of a replica for `raytrec verify`: stored rows, managed ids and dense weights, as digests or as bytes.

A state has three parts, each with several names (tables or weights). The values of a name are numbered, and a block is
a range of these numbers:

    rows    stored rows of a table (scoring/stored_tables.py), numbered by row
    ids     pairs (id, row), int64, of a table with managed ids, numbered by 2⁶³ + the key (hash) of the id
    dense   values of a weight of a program, PROGRAM/NAME, numbered in row-major order
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from raytrec.common.errors import DataError
from raytrec.common.memory import prefetch_pages
from raytrec.config.base import Section
from raytrec.scoring.scorer import Scorer
from raytrec.scoring.stored_tables import PRECISIONS
from raytrec.serving.bodies import JSON
from raytrec.serving.openapi import Endpoint

MAX_BLOCK_BYTES = 1 << 20  # hashing a block takes about 1 ms, during which the replica serves no other request
NUM_KEYS, PAIR_BYTES = 2**64, 16
REPLICA_HEADER = "X-Replica"
StatePart = Literal["rows", "ids", "dense"]


class BlockQuery(Section):
    """Query parameters of GET /state/block, which select the values [first, end) of a name.

    Attributes:
        part: Part of the state.
        name: Table, or weight as PROGRAM/NAME.
        first: Number of the first value.
        end: Number after the last value.
        values: True to return the bytes instead of their digest.
    """

    part: StatePart
    name: str
    first: int = Field(ge=0)
    end: int = Field(le=NUM_KEYS)
    values: bool = False


def list_endpoints(replica: str) -> list[Endpoint]:
    """Return the endpoints /state and /state/block of the replica with this id."""
    headers = {REPLICA_HEADER: replica}

    async def answer_state(request: Request, scorer: Scorer) -> Response:
        return Response(to_json(describe_state(scorer)), media_type=JSON, headers=headers)

    # The block belongs to the version in the header of the response, because it is selected before any await.
    async def answer_block(request: Request, scorer: Scorer) -> Response:
        try:
            query = BlockQuery.model_validate(dict(request.query_params))
        except ValidationError as error:
            mistake = error.errors()[0]
            where, expected = str(mistake["loc"][0]), "part=rows|ids|dense, name, first, end, and optionally values=1"
            raise DataError(f"invalid {where}: {mistake['msg']}", where=where, expected=expected) from None
        read = find_block(scorer, query)
        is_remote = query.part == "rows" and scorer.lookups.is_remote
        values = await asyncio.to_thread(read) if is_remote else read()
        prefetch_pages(values.data_ptr(), values.nbytes)
        block = to_bytes(values)
        if query.values:
            return Response(block.tobytes(), media_type="application/octet-stream", headers=headers)
        return Response(sha256(block).hexdigest(), media_type="text/plain", headers=headers)

    return [Endpoint("GET", "/state", answer_state), Endpoint("GET", "/state/block", answer_block)]


def describe_state(scorer: Scorer) -> dict[str, Any]:
    """Return the response of /state: version, run, step, and for each part a mapping from name to dtype and shape."""
    run, step, _ = scorer.version.rsplit("-", 2)
    tables, precisions = scorer.manifest.data_schema.tables, scorer.manifest.precisions
    return {
        "version": scorer.version,
        "run": run,
        "step": int(step),
        "rows": {name: {"dtype": precisions[name], "shape": [each.rows, each.dim]} for name, each in tables.items()},
        "ids": {name: {"dtype": "int64", "shape": [len(ids), 2]} for name, ids in scorer.lookups.ids.items()},
        "dense": describe_tensors(scorer.program_weights),
    }


def describe_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return name → {"dtype": torch's name such as float32, "shape": list of sizes}."""
    return {name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": [*t.shape]} for name, t in tensors.items()}


def find_block(scorer: Scorer, query: BlockQuery) -> Callable[[], torch.Tensor]:
    """Return a function that reads a block of the present state: rows, pairs or dense values, [n, …].

    Raises:
        DataError: The part has no such name, the range is empty or exceeds its values, or the block is too large.
    """
    part, name, first, end = query.part, query.name, query.first, query.end
    lookups = scorer.lookups
    names: Mapping[str, Any] = {"rows": lookups.tables, "ids": lookups.ids, "dense": scorer.program_weights}[part]
    if (values := names.get(name)) is None:
        expected = f"a name under {part} in the response of /state"
        raise DataError(f"there is no name '{name}'", where="name", expected=expected)
    if part == "rows":
        table, precision = scorer.manifest.data_schema.tables[name], PRECISIONS[scorer.manifest.precisions[name]]
        count, value_bytes, read_values = table.rows, float(precision.row_bytes(table.dim)), lookups.make_reader(name)
    elif part == "ids":
        count, value_bytes, read_values = NUM_KEYS, max(1, len(values)) * PAIR_BYTES / NUM_KEYS, values.read
    else:
        values = values.flatten()
        count, value_bytes, read_values = len(values), values.itemsize, lambda first, end: values[first:end]
    max_values = max(1, int(MAX_BLOCK_BYTES / value_bytes))
    if not first < end <= min(count, first + max_values):
        expected = f"first < end ≤ {count}, and at most {max_values} values"
        raise DataError(f"invalid range from {first} to {end}", where="first, end", expected=expected)
    return partial(read_values, first, end)


def to_bytes(values: torch.Tensor) -> Any:
    """Return the bytes of a tensor in host memory as a NumPy array, uint8 [n]."""
    return values.contiguous().flatten().view(torch.uint8).numpy()
