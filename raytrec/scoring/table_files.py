"""Format of the files with an export's table rows, and mapping of the files into memory.

Tables of one dim and precision are stored one after another, as a stack. Each file is a block of the stack's
rows: a safetensors file with one tensor, `rows`. Its values begin and end at page boundaries, so that all blocks
of a stack can be mapped to consecutive addresses.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from itertools import accumulate
from math import gcd
from pathlib import Path
from typing import Any

import torch

from raytrec.common.errors import RunError
from raytrec.common.memory import advise_random_access, map_files
from raytrec.scoring.manifest import Manifest, StackEntry
from raytrec.scoring.precisions import PRECISIONS, TablePrecision
from raytrec.scoring.table_rows import RowStack, StackedTable

ALIGNMENT = 1 << 16  # bytes; a multiple of the page sizes of Linux
MAX_FILE_BYTES = 4 << 30
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8"}  # names of types in safetensors


def choose_block_rows(precision: TablePrecision, dim: int) -> int:
    """Return the number of rows of a full block, whose size is a multiple of ALIGNMENT."""
    unit = ALIGNMENT // gcd(precision.row_bytes(dim), ALIGNMENT)
    return max(1, MAX_FILE_BYTES // (precision.row_bytes(dim) * unit)) * unit


def make_header(rows: int, precision: TablePrecision, dim: int) -> bytes:
    """Return the beginning of a file, before the values of its rows.

    Files are written without the library, which would need all values in memory. The format consists of eight
    bytes with the length of a JSON header, the header, and the values.
    """
    offsets, shape = [0, rows * precision.row_bytes(dim)], [rows, precision.width(dim)]
    about = {"dtype": DTYPE_NAMES[precision.dtype], "shape": shape, "data_offsets": offsets}
    header = json.dumps({"rows": about}).encode().ljust(ALIGNMENT - 8)
    return len(header).to_bytes(8, "little") + header


def open_tables(folder: Path, manifest: Manifest) -> dict[str, StackedTable]:
    """Return the tables of an export, whose files are mapped into memory.

    Raises:
        RunError: A file cannot be mapped, or contains a tensor of another shape or dtype.
    """
    shapes = zip(manifest.stacks, manifest.stack_shapes, strict=True)
    return place_tables(manifest, [_open_stack(folder, each, *shape) for each, shape in shapes])


def place_tables(manifest: Manifest, stacks: Sequence[Any]) -> dict[str, StackedTable]:
    """Return the tables of an export in its stacks, which are in the order of the manifest."""
    tables = {}
    for entry, stack in zip(manifest.stacks, stacks, strict=True):
        shapes = [manifest.data_schema.tables[name] for name in entry.tables]
        first_rows = accumulate((table.rows for table in shapes[:-1]), initial=0)
        tables |= {name: StackedTable(stack, first) for name, first in zip(entry.tables, first_rows, strict=True)}
    return tables


def _open_stack(folder: Path, entry: StackEntry, rows: int, dim: int) -> RowStack:
    precision, parts = PRECISIONS[entry.precision], []
    try:
        for number, name in enumerate(entry.files):
            block_rows = min(entry.block_rows, rows - number * entry.block_rows)
            header, size = make_header(block_rows, precision, dim), block_rows * precision.row_bytes(dim)
            with (folder / name).open("rb") as file:
                intact = file.read(ALIGNMENT) == header and file.seek(0, 2) == ALIGNMENT + size
            if not intact:
                raise RunError(
                    f"{name} does not contain the rows of {', '.join(entry.tables)}",
                    where=str(folder),
                    expected=f"{precision.dtype} [{block_rows}, {precision.width(dim)}]",
                )
            parts.append((folder / name, ALIGNMENT, size))
        content = map_files(parts)
    except OSError as error:
        what = f"{', '.join(entry.files)} cannot be mapped: {error.strerror or error}"
        raise RunError(what, where=str(folder)) from None
    advise_random_access(ctypes.addressof(content), len(content))
    return RowStack(torch.frombuffer(content, dtype=precision.dtype).view(rows, -1), precision)
