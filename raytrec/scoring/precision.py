"""Rows of tables as files have them, in four precisions.

    fp32, fp16     [n, dim]
    int8           uint8 [n, dim + 8]: steps of 0 to 255, then scale and offset, float32
    int4           uint8 [n, dim ÷ 2 + 4]: two steps of 0 to 15 a byte, the first in the low bits, then scale
                   and offset, float16

A value is step · scale + offset. The layouts of int8 and int4 are those of FBGEMM's row-wise quantization:
each row has all that it is read by.
"""

from __future__ import annotations

import torch

from raytrec.common.errors import ConfigError
from raytrec.scoring.manifest import Precision

MOST_HALF = 65_504  # the largest float16; int4 has scale and offset in it
LEVELS = {"int8": 255, "int4": 15}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.uint8, "int4": torch.uint8}
_BESIDE = {"int8": torch.float32, "int4": torch.float16}  # dtype of scale and offset


def stored_width(dim: int, precision: Precision) -> int:
    """How many values of DTYPES a row of a file has."""
    return {"fp32": dim, "fp16": dim, "int8": dim + 8, "int4": dim // 2 + 4}[precision]


def encode_rows(rows_ND: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Rows as a file has them.

    Args:
        rows_ND: float32 [n, dim].

    Raises:
        ConfigError: a value is too large for the precision.
    """
    if precision in ("fp16", "int4") and not bool((rows_ND.abs() <= MOST_HALF).all()):
        raise ConfigError(
            f"a table has values beyond ±{MOST_HALF:,}, or NaN",
            where=f"--quantize {precision}",
            expected="values that float16 holds",
            do="use int8 or fp32",
        )
    if precision not in LEVELS:
        return rows_ND.to(DTYPES[precision])
    beside = _BESIDE[precision]
    offsets_N1 = rows_ND.amin(1, keepdim=True).to(beside)
    spans_N1 = rows_ND.amax(1, keepdim=True) - offsets_N1.float()
    scales_N1 = (spans_N1 / LEVELS[precision]).to(beside)
    divisors_N1 = scales_N1.float().where(scales_N1 > 0, 1.0)
    steps_ND = ((rows_ND - offsets_N1.float()) / divisors_N1).round().clamp(0, LEVELS[precision]).byte()
    if precision == "int4":
        steps_ND = steps_ND[:, ::2] | steps_ND[:, 1::2] << 4
    return torch.cat([steps_ND, scales_N1.view(torch.uint8), offsets_N1.view(torch.uint8)], 1)


def decode_rows(stored: torch.Tensor, precision: Precision) -> torch.Tensor:
    """The reverse: float32 [n, dim]."""
    if precision not in LEVELS:
        return stored.float()
    beside = _BESIDE[precision]
    width = stored.shape[1] - 2 * beside.itemsize
    scale_offset_N2 = stored[:, width:].contiguous().view(beside).float()
    steps_ND = stored[:, :width]
    if precision == "int4":
        steps_ND = torch.stack([steps_ND & 15, steps_ND >> 4], 2).flatten(1)
    return torch.addcmul(scale_offset_N2[:, 1:], steps_ND.float(), scale_offset_N2[:, :1])
