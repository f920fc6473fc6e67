"""Tables of an export: the format of their files, and their rows in memory, which can be replaced.

Rows of tables are stored in one of four precisions:

    fp32, fp16     [n, dim]
    int8           uint8 [n, dim + 8]: steps from 0 to 255, followed by scale and offset (float32)
    int4           uint8 [n, dim ÷ 2 + 4]: steps from 0 to 15, two per byte, the first in the low bits, followed by
                   scale and offset (float16)

A value is step · scale + offset. The layouts of int8 and int4 follow FBGEMM's row-wise quantization, in which
each row has its own scale and offset.

The rows of tables with the same dim and precision are concatenated to a stack. A stack is stored in blocks of rows.
Each block is a safetensors file with one tensor, `rows`. The values of full blocks begin and end at page boundaries,
so that all blocks of a stack can be mapped to consecutive addresses.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, inf
from pathlib import Path
from typing import Any

import torch

from raytrec.common.errors import ConfigError, RaytrecError, RunError, convert_os_errors
from raytrec.common.memory import advise_random_access, allow_writing, map_files, prefetch_rows
from raytrec.scoring.manifest import Manifest, PrecisionName, StackEntry

MAX_FLOAT16 = 65_504  # largest float16; limit for int4, which stores scale and offset in float16
MAX_INT8 = 1e38  # limit for int8, with which the difference of two values is a finite float32


@dataclass(frozen=True)
class TablePrecision:
    """Format of a table's rows in files.

    Attributes:
        dtype: dtype of the stored rows.
        bits: Number of bits of a quantized value; 0: values are not quantized.
        scale_dtype: dtype of a quantized row's scale and offset.
    """

    dtype: torch.dtype
    bits: int = 0
    scale_dtype: torch.dtype = torch.float32

    def width(self, dim: int) -> int:
        """Return the number of stored elements of a row of `dim` values."""
        return dim * self.bits // 8 + 2 * self.scale_dtype.itemsize if self.bits else dim

    def row_bytes(self, dim: int) -> int:
        """Return the size in bytes of a stored row of `dim` values."""
        return self.width(dim) * self.dtype.itemsize

    def encode(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Encode rows for storage: float32 [n, dim] → [n, width(dim)].

        Args:
            rows_ND: Values of the rows; for int4, dim must be even.

        Raises:
            ConfigError: A value is NaN or too large for the precision; fp32 accepts all values.
        """
        limit = MAX_FLOAT16 if torch.float16 in (self.dtype, self.scale_dtype) else MAX_INT8 if self.bits else inf
        if limit < inf and not bool((rows_ND.abs() <= limit).all()):
            name = next(name for name, each in PRECISIONS.items() if each == self)
            raise ConfigError(
                f"a table contains NaN or values beyond ±{limit:,}",
                where=f"--quantize {name}",
                expected=f"values from -{limit:,} to {limit:,}",
                do="omit --quantize" if self.bits == 8 else "omit --quantize, or use int8 for finite values",
            )
        if not self.bits:
            return rows_ND.to(self.dtype)
        levels = 2**self.bits - 1
        offsets_N1 = rows_ND.amin(1, keepdim=True).to(self.scale_dtype)
        spans_N1 = rows_ND.amax(1, keepdim=True) - offsets_N1.float()
        scales_N1 = (spans_N1 / levels).to(self.scale_dtype)
        divisors_N1 = scales_N1.float().where(scales_N1 > 0, 1.0)
        steps_ND = ((rows_ND - offsets_N1.float()) / divisors_N1).round().clamp(0, levels).byte()
        if self.bits == 4:
            steps_ND = steps_ND[:, ::2] | steps_ND[:, 1::2] << 4
        return torch.cat([steps_ND, scales_N1.view(torch.uint8), offsets_N1.view(torch.uint8)], 1)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the values of stored rows: [n, width(dim)] → float32 [n, dim]."""
        if not self.bits:
            return stored.float()
        width = stored.shape[1] - 2 * self.scale_dtype.itemsize
        scale_offset_N2 = stored[:, width:].contiguous().view(self.scale_dtype).float()
        steps_ND = stored[:, :width]
        if self.bits == 4:
            steps_ND = torch.stack([steps_ND & 15, steps_ND >> 4], 2).flatten(1)
        return torch.addcmul(scale_offset_N2[:, 1:], steps_ND.float(), scale_offset_N2[:, :1])


PRECISIONS: dict[PrecisionName, TablePrecision] = {
    "fp32": TablePrecision(torch.float32),
    "fp16": TablePrecision(torch.float16),
    "int8": TablePrecision(torch.uint8, bits=8),
    "int4": TablePrecision(torch.uint8, bits=4, scale_dtype=torch.float16),
}


# Lookups of at least MIN_PREFETCHED_ROWS rows prefetch pages, unless a sample of SAMPLED_ROWS rows is in memory.
MIN_PREFETCHED_ROWS, SAMPLED_ROWS = 256, 3


class RowStack:
    """Concatenated stored rows of tables of one dim and precision.

    Args:
        stored: Stored rows of all tables, [n, …], possibly mapped from files.
        precision: Format of the stored rows.
    """

    def __init__(self, stored: torch.Tensor, precision: TablePrecision):
        self._stored, self.precision, self._is_writable = stored, precision, False

    def vectors(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Return the vectors of rows: int64 [N] → float32 [N, dim]."""
        if len(rows_N) >= MIN_PREFETCHED_ROWS:
            prefetch_rows(self._stored, rows_N, SAMPLED_ROWS)
        return self.precision.decode(self.read_rows(rows_N))

    def prepare_writing(self, rows_N: torch.Tensor) -> None:
        """Copy the pages of mapped rows to private memory, so that `write` causes no page faults.

        Raises:
            OSError: The system refuses to make the mapping writable.
        """
        if not self._is_writable:
            allow_writing(self._stored.data_ptr(), self._stored.nbytes)
            self._is_writable = True
        if len(rows_N) >= MIN_PREFETCHED_ROWS:
            prefetch_rows(self._stored, rows_N, SAMPLED_ROWS)
        self.write(rows_N, self.read_rows(rows_N))  # values do not change, so concurrent lookups are not affected

    def write(self, rows_N: torch.Tensor, stored_N: torch.Tensor) -> None:
        """Replace rows, int64 [N], with stored values, [N, …]. Call `prepare_writing` for these rows first."""
        self._stored.index_copy_(0, rows_N, stored_N)

    def read_rows(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Return a copy of stored rows: int64 [N] → [N, …]."""
        return self._stored.index_select(0, rows_N)

    def read(self, first: int, end: int) -> torch.Tensor:
        """Return the stored rows [first, end) as a view, [n, …]."""
        return self._stored[first:end]


@dataclass(frozen=True)
class StackedTable:
    """Table in a stack.

    Attributes:
        stack: Rows of all tables of the stack: a RowStack, or another object with a method `vectors`, for rows in
            another process or in a checkpoint.
        first_row: Index of the table's first row in the stack.
    """

    stack: Any
    first_row: int = 0


@dataclass(frozen=True)
class RowChanges:
    """New values of some rows of a table.

    Attributes:
        rows: Indices of the rows in the table, int64 [n], ascending.
        values: Values, float32 [n, dim].
    """

    rows: torch.Tensor
    values: torch.Tensor


def encode_rows(table: str, changes: RowChanges, precision: TablePrecision) -> torch.Tensor:
    """Return the new values of a table's rows in the format in which the table is stored, [n, …].

    Raises:
        ValueError: The precision cannot represent a value; see `TablePrecision.encode`.
    """
    try:
        return precision.encode(changes.values)
    except RaytrecError as error:
        raise ValueError(f"{error.what.replace('a table', f'table {table}')}; expected: {error.expected}") from None


def encode_changes(
    tables: Mapping[str, StackedTable], changes: Mapping[str, RowChanges]
) -> dict[RowStack, tuple[torch.Tensor, torch.Tensor]]:
    """Return stack → (rows that change, int64 [n], and their new stored values, [n, …]).

    Args:
        tables: Tables by name, in stacks of type RowStack.
        changes: Table → new rows.

    Raises:
        ValueError: The precision of a table cannot represent a value; see `TablePrecision.encode`.
    """
    parts: dict[RowStack, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, each in changes.items():
        stack, first_row = tables[name].stack, tables[name].first_row
        parts.setdefault(stack, []).append((each.rows + first_row, encode_rows(name, each, stack.precision)))
    return {stack: tuple(torch.cat(each) for each in zip(*members, strict=True)) for stack, members in parts.items()}


ALIGNMENT = 1 << 16  # in bytes; a multiple of the page sizes of Linux
MAX_FILE_BYTES = 4 << 30
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8"}  # names of dtypes in safetensors


def choose_block_rows(precision: TablePrecision, dim: int) -> int:
    """Return the number of rows of a full block, whose size in bytes is a multiple of ALIGNMENT."""
    unit = ALIGNMENT // gcd(precision.row_bytes(dim), ALIGNMENT)
    return max(1, MAX_FILE_BYTES // (precision.row_bytes(dim) * unit)) * unit


def make_header(rows: int, precision: TablePrecision, dim: int) -> bytes:
    """Return the first ALIGNMENT bytes of a block's file, which precede the values of its `rows` rows of `dim` values.

    Files are written without the safetensors library, which would need all values in memory. The format consists of
    eight bytes with the length of a JSON header, the header, and the values.
    """
    offsets, shape = [0, rows * precision.row_bytes(dim)], [rows, precision.width(dim)]
    about = {"dtype": DTYPE_NAMES[precision.dtype], "shape": shape, "data_offsets": offsets}
    header = json.dumps({"rows": about}).encode().ljust(ALIGNMENT - 8)
    return len(header).to_bytes(8, "little") + header


def open_tables(folder: Path, manifest: Manifest) -> dict[str, StackedTable]:
    """Map the files of an export's tables into memory, and return the tables by name.

    Raises:
        RunError: A file cannot be mapped, or contains a tensor of another shape or dtype.
    """
    shapes = zip(manifest.stacks, manifest.stack_shapes, strict=True)
    return place_tables(manifest, [_open_stack(folder, each, *shape) for each, shape in shapes])


def place_tables(manifest: Manifest, stacks: Sequence[Any]) -> dict[str, StackedTable]:
    """Return table → its stack and first row; `stacks` contains RowStacks (or the like) in the manifest's order."""
    tables = {}
    for entry, stack in zip(manifest.stacks, stacks, strict=True):
        shapes = [manifest.data_schema.tables[name] for name in entry.tables]
        first_rows = accumulate((table.rows for table in shapes[:-1]), initial=0)
        tables |= {name: StackedTable(stack, first) for name, first in zip(entry.tables, first_rows, strict=True)}
    return tables


def _open_stack(folder: Path, entry: StackEntry, rows: int, dim: int) -> RowStack:
    precision, parts = PRECISIONS[entry.precision], []
    with convert_os_errors(f"{', '.join(entry.files)} cannot be mapped", where=str(folder)):
        for number, name in enumerate(entry.files):
            block_rows = min(entry.block_rows, rows - number * entry.block_rows)
            header, size = make_header(block_rows, precision, dim), block_rows * precision.row_bytes(dim)
            with (folder / name).open("rb") as file:
                intact = file.read(ALIGNMENT) == header and file.seek(0, 2) == ALIGNMENT + size
            if not intact:
                raise RunError(
                    f"{name} does not contain the rows of {', '.join(entry.tables)}",
                    where=str(folder),
                    expected=f"a safetensors file with {precision.dtype} [{block_rows}, {precision.width(dim)}]",
                    do="copy or export the model again",
                )
            parts.append((folder / name, ALIGNMENT, size))
        content = map_files(parts)
    advise_random_access(ctypes.addressof(content), len(content))
    return RowStack(torch.frombuffer(content, dtype=precision.dtype).view(rows, -1), precision)
