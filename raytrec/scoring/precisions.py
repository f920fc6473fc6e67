"""Precisions in which rows of tables are stored in an export.

Rows of tables are stored in files in one of four precisions:

    fp32, fp16     [n, dim]
    int8           uint8 [n, dim + 8]: steps of 0 to 255, then scale and offset, float32
    int4           uint8 [n, dim ÷ 2 + 4]: two steps of 0 to 15 per byte, the first in the low bits, then scale
                   and offset, float16

A value is step · scale + offset. The layouts of int8 and int4 follow FBGEMM's row-wise quantization:
each row contains its own scale and offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from raytrec.common.errors import ConfigError
from raytrec.scoring.manifest import PrecisionName

MAX_FLOAT16 = 65_504  # the largest float16; int4 stores scale and offset in float16
MAX_INT8 = 1e38  # the difference of two values is then a finite float32


@dataclass(frozen=True)
class TablePrecision:
    """Format of a table's rows in files.

    Attributes:
        dtype: dtype of the stored rows.
        bits: Bits of a quantized value; 0: values are not quantized.
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
        """Encode rows for storage.

        Args:
            rows_ND: float32 [n, dim].

        Raises:
            ConfigError: A value is too large for the precision.
        """
        limit = MAX_FLOAT16 if torch.float16 in (self.dtype, self.scale_dtype) else MAX_INT8 if self.bits else inf
        if limit < inf and not bool((rows_ND.abs() <= limit).all()):
            name = next(name for name, each in PRECISIONS.items() if each == self)
            raise ConfigError(
                f"a table contains NaN or values beyond ±{limit:,}",
                where=f"--quantize {name}",
                expected=f"values of at most ±{limit:,}",
                do="use fp32" if self.bits == 8 else "use int8 or fp32",
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
        """Return the values of stored rows: float32 [n, dim]."""
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
