"""Lookups in tables, and quantized rows compared with the quantization of FBGEMM."""

import re

import fbgemm_gpu  # noqa: F401
import pytest
import torch
from drawn_lookups import draw_rows, look_up_one_by_one, models
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrec.common.errors import ConfigError
from raytrec.config.features import Features
from raytrec.config.schema import Schema
from raytrec.data.assembler import AssembledTensors, Bags
from raytrec.scoring.lookups import Lookups
from raytrec.scoring.stored_tables import PRECISIONS, RowStack, StackedTable

torch.manual_seed(0)
ROWS = torch.randn(40, 16)
ALL_ROWS = {
    "normal": ROWS,
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


@pytest.mark.parametrize("name", ALL_ROWS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_decoded_rows_are_within_the_quantization_error(precision, name):
    rows, form = ALL_ROWS[name], PRECISIONS[precision]
    stored = form.encode(rows)
    assert stored.shape == (len(rows), form.width(rows.shape[1])) and stored.dtype == form.dtype
    found, span = form.decode(stored), rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
    assert found.isfinite().all()
    # Half precision has 11 bits, also for the scale and the offset of int4.
    half = rows.abs().amax(1, keepdim=True) / 2**11 + 1e-7
    allowed = {"fp32": 0, "fp16": half, "int8": span / 255 * 0.51 + 1e-7, "int4": span / 15 * 0.52 + 2 * half}
    assert ((found - rows).abs() <= allowed[precision]).all()


@pytest.mark.parametrize("precision, value", [("int8", 3e38), ("int4", 7e4), ("fp16", 7e4)])
def test_values_that_would_become_nan_are_refused(precision, value):
    limit = "1e+38" if precision == "int8" else "65,504"
    with pytest.raises(ConfigError, match=re.escape(f"NaN or values beyond ±{limit}")):
        PRECISIONS[precision].encode(torch.tensor([[value, -value]]))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_stacked_lookups_equal_lookups_one_by_one(data):
    features, stored, ids, precision = data.draw(models())
    tables, by_dim = {}, {}
    for name, table in features.schema.tables.items():
        by_dim.setdefault(table.dim, []).append(name)
    for names in by_dim.values():
        stack, first_row = RowStack(torch.cat([stored[name] for name in names]), precision), 0
        for name in names:
            tables[name] = StackedTable(stack, first_row)
            first_row += len(stored[name])
    lookups = Lookups(features, tables, ids)
    for _ in range(2):
        rows, needed = draw_rows(data.draw, features)
        found = lookups(rows, needed)
        expected = look_up_one_by_one(features, stored, ids, precision, rows, needed)
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert torch.equal(found[key], values), key


class CountedRows(RowStack):
    calls = 0

    def vectors(self, rows_N):
        self.calls += 1
        return super().vectors(rows_N)


def test_one_lookup_reads_all_features_with_one_id_per_row():
    sparse = {f"f{i}": {"table": f"t{i}"} for i in range(26)}
    tables = {f"t{i}": {"rows": 3, "dim": 4} for i in range(26)}
    features = Features(Schema.parse({"labels": ["y"], "dense": [], "sparse": sparse, "tables": tables}, "test"), {})
    stack, none = CountedRows(torch.randn(78, 4), PRECISIONS["fp32"]), torch.empty(2, 0)
    lookups = Lookups(features, {f"t{i}": StackedTable(stack, 3 * i) for i in range(26)}, {})
    bags = Bags(features.keys, torch.tensor([2, 0] * 26), None, torch.ones(52, dtype=torch.int32), [2] * 26, 2)
    inputs = lookups(AssembledTensors(none, bags, none, none, None, None, None, None, None), features.keys)
    assert stack.calls == 1 and len(inputs) == 27
    assert torch.equal(inputs["bag", "f25"], stack._stored[[77, 75]])
