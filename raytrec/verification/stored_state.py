"""Read the state of a checkpoint in the format of a service, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from raytrec.checkpoint.blocks import DTYPES
from raytrec.checkpoint.restore import read_id_rows
from raytrec.checkpoint.rows import TENSOR_KEY, StoredTable
from raytrec.checkpoint.storage import load
from raytrec.prediction.one_process import HEAD
from raytrec.scoring.stored_tables import PRECISIONS
from raytrec.serving.served_state import MAX_BLOCK_BYTES, NUM_KEYS, PAIR_BYTES, StatePart, describe_tensors, to_bytes


class StoredState:
    """Rows, managed ids and dense weights of a checkpoint, in the format in which a service holds them.

    Args:
        folder: Folder of the checkpoint.
        index: Index of the checkpoint.
        served: State of a replica (`describe_state`), which determines the tables, precisions and programs to read.

    Attributes:
        parts: "rows", "ids" (managed ids) and "dense" → name of a table or weight → dtype and shape, as in the state
            of a replica. Tables that the service does not serve are omitted.

    Raises:
        CheckpointError: A dense weight cannot be read or is damaged.
    """

    def __init__(self, folder: str, index: dict[str, Any], served: dict[str, Any]):
        self._folder, self._index, self._served, tensors = folder, index, served, index["tensors"]
        keys = {}
        for key in tensors:
            if key.startswith(f"dense/{HEAD}") and key.endswith("/value"):
                name, average = key[len("dense/head.") : -len("/value")], key.removesuffix("value") + "ema"
                keys[name] = average if average in tensors else key  # with train.ema, the averages are exported
        values = {key: torch.empty(tensors[key]["shape"], dtype=DTYPES[tensors[key]["dtype"]]) for key in keys.values()}
        if values:
            load(folder, values)
        programs = {name.partition("/")[0] for name in served["dense"]}
        self._weights = {f"{program}/{name}": values[key] for program in programs for name, key in keys.items()}
        tables = {name: tensors.get(TENSOR_KEY.format(name, "weight")) for name in served["rows"]}
        sizes = index["about"].get("ids", {})
        id_maps = {name: {"dtype": "int64", "shape": [each["rows"], 2]} for name, each in sizes.items()}
        self.parts: dict[StatePart, dict[str, Any]] = {
            "rows": {n: served["rows"][n] | {"shape": table["shape"]} for n, table in tables.items() if table},
            # Id maps of other lengths are compared, so that the differing ids are named.
            "ids": {n: served["ids"].get(n, id_maps[n]) for n in id_maps if n in tables},
            "dense": describe_tensors(self._weights),
        }

    def iterate_blocks(self, part: StatePart, name: str) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (first, end, values [n, …] as served) for each block: a range of rows, id keys or flat weights.

        Raises:
            CheckpointError: The rows or ids cannot be read or are damaged.
        """
        if part == "dense":
            values = self._weights[name].flatten()
            for first, end in _split(len(values), values.itemsize):
                yield first, end, values[first:end]
        elif part == "ids":
            ids = read_id_rows(self._folder, self._index, name, None)
            # Keys are distributed evenly; blocks have half the maximum size on average.
            count = 2 * max(1, len(ids), self._served["ids"][name]["shape"][0])
            for first, end in _split(NUM_KEYS, count * PAIR_BYTES / NUM_KEYS):
                yield first, end, ids.read(first, end)
        else:
            precision = PRECISIONS[self.parts["rows"][name]["dtype"]]
            with StoredTable(self._folder, self._index, name) as stored:
                for first, end in _split(stored.rows, precision.row_bytes(stored.dim)):
                    yield first, end, precision.encode(torch.from_numpy(stored.read(first, end)))

    def compare(
        self, part: StatePart, name: str, first: int, values: torch.Tensor, content: bytes
    ) -> tuple[int, float, Iterator[str]]:
        """Compare a block with a replica's bytes for the block; the two must differ.

        Args:
            part: Part of the state: "rows", "ids" or "dense".
            name: Name of the table or weight.
            first: Index of the first row or value of the block.
            values: Values of the block, as yielded by `iterate_blocks`.
            content: Bytes of the replica.

        Returns:
            Number of rows, ids or values that differ, largest absolute difference (0 for ids, infinite if a differing
            value is NaN), and a description of each difference.
        """
        served = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        if part == "ids":
            pairs, stored = dict(served.view(torch.int64).view(-1, 2).tolist()), dict(values.tolist())
            ids = [each for each in stored | pairs if pairs.get(each) != stored.get(each)]
            texts = [{each: f"row {row}" for each, row in rows.items()} for rows in (pairs, stored)]
            rows = ((each, *(of.get(each, "no row") for of in texts)) for each in ids)
            return len(ids), 0.0, (f"id {each} has {row} instead of {expected}" for each, row, expected in rows)
        unit, decode = "value", torch.Tensor.double
        if part == "rows":
            unit, decode = "row", PRECISIONS[self.parts["rows"][name]["dtype"]].decode
        both_NB = [each.view(len(values), -1) for each in (torch.from_numpy(to_bytes(values)), served)]
        places = (both_NB[0] != both_NB[1]).any(1).nonzero().flatten()
        expected_ND, served_ND = (decode(each[places].view(values.dtype)) for each in both_NB)
        largest_N = (expected_ND - served_ND).abs().nan_to_num(nan=torch.inf).amax(1).tolist()
        named = zip(places.tolist(), largest_N, strict=True)
        return len(largest_N), max(largest_N), (f"{unit} {first + place} by {largest:.3g}" for place, largest in named)


def _split(count: int, value_bytes: float) -> Iterator[tuple[int, int]]:
    step = max(1, int(MAX_BLOCK_BYTES / value_bytes))
    return ((first, min(first + step, count)) for first in range(0, count, step))
