"""Tables of a checkpoint as files of an export, a band of rows at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import torch

from raytrec.checkpoint.rows import StoredTable
from raytrec.scoring.lookups import PRECISIONS, TablePrecision
from raytrec.scoring.manifest import PrecisionName, TableEntry

FILE_BYTES, PIECE_BYTES = 4 << 30, 32 << 20  # of a file, and of what is in work at a time
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8"}  # of safetensors


def plan_table(name: str, rows: int, dim: int, precision: PrecisionName) -> TableEntry:
    """The files of a table."""
    row_bytes = PRECISIONS[precision].width(dim) * PRECISIONS[precision].dtype.itemsize
    block_rows = max(1, min(rows, FILE_BYTES // row_bytes))
    name = re.sub(r"[^\w-]", "_", name)
    files = [f"tables/{name}-{number:05d}.safetensors" for number in range(-(-rows // block_rows))]
    return TableEntry(precision=precision, block_rows=block_rows, files=files)


def block_bytes(table: StoredTable, entry: TableEntry, number: int) -> Iterator[bytes]:
    """The file of a table's rows from number · block_rows on.

    It is written by hand because the library makes a file of tensors that are in memory; the format is eight
    bytes with the length of a header of JSON, the header, and the values.
    """
    first = number * entry.block_rows
    rows = min(entry.block_rows, table.rows - first)
    precision = PRECISIONS[entry.precision]
    dtype, width = precision.dtype, precision.width(table.dim)
    about = {
        "dtype": NAMES[dtype],
        "shape": [rows, width],
        "data_offsets": [0, rows * width * dtype.itemsize],
    }
    header = json.dumps({"rows": about}).encode()
    header += b" " * (-(len(header) + 8) % 64)  # values begin at a multiple of 64 bytes
    yield len(header).to_bytes(8, "little") + header
    band = max(1, PIECE_BYTES // (4 * table.dim))
    for start in range(first, first + rows, band):
        values = torch.from_numpy(table.read(start, min(start + band, first + rows)))
        yield precision.encode(values).numpy().tobytes()


class CheckpointTable:
    """A table's rows as the export has them, read from the checkpoint: lookups.TableRows.

    Args:
        table: of the checkpoint.
    """

    def __init__(self, table: StoredTable, precision: TablePrecision):
        self._table, self._as_stored = table, rounding(precision)

    def vectors(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Rows: int64 [N] → float32 [N, dim]."""
        used, places_N = rows_N.unique(return_inverse=True)
        return self._as_stored(torch.from_numpy(self._table.take(used.tolist())))[places_N]


def rounding(precision: TablePrecision) -> Callable[[torch.Tensor], torch.Tensor]:
    """What becomes of rows, float32 [n, dim], that are written in a precision and read again."""
    return lambda rows_ND: precision.decode(precision.encode(rows_ND))
