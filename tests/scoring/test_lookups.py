"""Quantized table rows in files, compared with the quantization of FBGEMM."""

import fbgemm_gpu  # noqa: F401
import pytest
import torch

from raytrec.common.errors import ConfigError
from raytrec.scoring.lookups import PRECISIONS, BlockTable

torch.manual_seed(0)
ROWS = torch.randn(40, 16)
EXTREME_ROWS = {
    "all equal": torch.full((3, 8), 0.7),
    "zeros": torch.zeros(3, 8),
    "tiny": torch.randn(3, 8) * 1e-30,
    "large": torch.randn(3, 8) * 1e4,
    "one step": torch.tensor([[0.0] * 7 + [1.0]]),
}


def quantize_with_fbgemm(rows, precision):
    if precision == "int8":
        return torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(
            torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
        )
    packed = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4)
    return torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(packed, 4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_decoded_rows_are_within_quantization_error(precision):
    form = PRECISIONS[precision]
    stored = form.encode(ROWS)
    assert stored.shape == (40, form.width(16)) and stored.dtype == form.dtype
    off = (form.decode(stored) - ROWS).abs()
    span = ROWS.amax(1, keepdim=True) - ROWS.amin(1, keepdim=True)
    allowed = {"fp32": 0, "fp16": 2e-3, "int8": span / 255 * 0.51, "int4": span / 15 * 0.52 + 2e-3}[precision]
    assert (off <= allowed).all()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantization_matches_fbgemm(precision):
    packed = PRECISIONS[precision].encode(ROWS)
    ours = PRECISIONS[precision].decode(packed)
    torch.testing.assert_close(ours, quantize_with_fbgemm(ROWS, precision), rtol=1e-5, atol=1e-5)
    if precision == "int8":
        theirs = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(packed)
    else:
        theirs = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(packed, 4)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", EXTREME_ROWS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_extreme_rows_stay_finite_and_close(precision, name):
    rows = EXTREME_ROWS[name]
    found = PRECISIONS[precision].decode(PRECISIONS[precision].encode(rows))
    share = {"fp32": 0, "int8": 0.01, "fp16": 1e-3, "int4": 0.1}[precision]
    assert found.isfinite().all()
    assert (found - rows).abs().max() <= share * 2 * rows.abs().max() + 1e-7 * (share > 0)


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_values_beyond_half_precision_are_refused(precision):
    with pytest.raises(ConfigError, match="65,504"):
        PRECISIONS[precision].encode(torch.tensor([[1e6] * 8]))


def test_block_table_reads_rows_across_blocks():
    places = torch.tensor([39, 0, 12, 13, 13, 25, 26, 38, 1])
    for precision in PRECISIONS.values():
        stored = precision.encode(ROWS)
        whole = BlockTable([stored], 40, precision).vectors(places)
        blocks = BlockTable(stored.split(13), 13, precision)
        assert torch.equal(whole, precision.decode(stored)[places])
        assert torch.equal(blocks.vectors(places), whole)
        assert blocks.vectors(places[:0]).shape == (0, 16)
