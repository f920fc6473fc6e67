"""Quantized collectives: raytrec's codecs compared with plain torch and with FBGEMM's codecs."""

import pytest
import torch
from fbgemm_gpu.quantize_comm import QuantizedCommCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from ranks import run_on_ranks
from small import SCHEMA, build_step_on_rank, make_batches, make_small_config

from raytrec.config.tables import QCommsSection
from raytrec.embeddings.sharding import (
    MAX_ROUNDING_ERROR,
    MIN_ROUNDED_VALUE,
    ScaledCodec,
    bound_backward_rounding,
    bound_forward_rounding,
    make_codecs,
)

GROUP = 16
CAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


def send_through_codec(codec, values):
    """Encode and decode values; return the decoded values and the size of the message in bytes."""
    context = codec.create_context()
    wire = codec.encode(values.view(-1), context)
    assert wire.dtype == codec.quantized_dtype
    assert len(wire) == codec.calc_quantized_size(values.numel(), context)
    return codec.decode(wire, context).view(values.shape), wire.nbytes


def round_to_int8(values, group):
    """Round each group's values to 255 equal steps between its minimum and maximum."""
    groups = values.double().view(-1, group)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    steps = ((groups - low) / ((high - low) / 255).clamp(min=1e-300)).round()
    return (low + steps * (high - low) / 255).view(values.shape)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_16_bit_codecs_round_to_nearest(precision):
    values = torch.randn(64, GROUP)
    arrived, size = send_through_codec(ScaledCodec(precision, GROUP), values)
    assert torch.equal(arrived, values.to(CAST[precision]).float())
    assert size == 2 * values.numel()


def test_int8_codec_rounds_to_nearest_of_255_steps():
    values = torch.randn(64, GROUP)
    arrived, size = send_through_codec(ScaledCodec("int8", GROUP), values)
    steps = (values.amax(1) - values.amin(1)) / 255
    assert ((arrived - round_to_int8(values, GROUP)).abs() <= steps.unsqueeze(1) * 1e-3).all()
    assert size == values.numel() * (GROUP + 8) // GROUP
    none, _ = send_through_codec(ScaledCodec("int8", GROUP), values[:0])  # a rank without tables
    assert none.shape == (0, GROUP)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("factor", [1.0, 2.0**16])
def test_rounding_error_stays_within_the_stated_bound(precision, factor):
    """Values of many magnitudes, including very small values."""
    sizes = 10.0 ** torch.arange(-12, 0).repeat_interleave(500)
    values = torch.randn(len(sizes), GROUP) * sizes.unsqueeze(1)
    arrived, _ = send_through_codec(ScaledCodec(precision, GROUP, factor), values)
    largest = values.abs().amax(1, keepdim=True) if precision == "int8" else values.abs()
    bound = MAX_ROUNDING_ERROR[precision] * largest.clamp(min=MIN_ROUNDED_VALUE[precision] / factor)
    assert ((arrived - values).abs() <= bound * (1 + 1e-6)).all()
    assert ((arrived - values).abs() > bound / 3).any(), "the bound is too loose"


def test_scaled_codec_keeps_gradients_lost_by_fbgemm():
    """FBGEMM (1.8.0) divides by its loss_scale while the values are still fp16."""
    gradients = torch.randn(100, GROUP) * 1e-9
    ours, _ = send_through_codec(ScaledCodec("fp16", GROUP, 2.0**20), gradients)
    theirs, _ = send_through_codec(QuantizedCommCodec(SparseType.FP16, loss_scale=2.0**20), gradients)
    worst = (gradients.abs() * 2.0**-10).clamp(min=1e-13)
    assert ((ours - gradients).abs() <= worst).all()
    assert not theirs.any()


def test_fbgemm_int8_codec_rejects_some_batch_sizes():
    """FBGEMM's groups always have 32 values, so 3 rows of 16 values are not a multiple of the group size."""
    theirs = QuantizedCommCodec(SparseType.INT8)
    with pytest.raises(RuntimeError, match=r"not a multiple of row dim|invalid for input of size"):
        send_through_codec(theirs, torch.randn(3, 16))
    send_through_codec(ScaledCodec("int8", GROUP), torch.randn(3, 16))


def test_fp32_direction_is_not_quantized():
    given = make_small_config(2, {})
    given.data.global_batch_size = 2048
    assert make_codecs(given, [16], 2) is None
    given.plan.qcomms = QCommsSection(backward_precision="bf16")
    for codecs in make_codecs(given, [16, 24], 2).values():
        values = torch.randn(5, 8)
        arrived, _ = send_through_codec(codecs.forward, values)
        assert torch.equal(arrived, values)
        assert codecs.backward.factor == 2.0**10  # 1024 rows per rank
        assert codecs.backward.group == 8


def test_rounding_bound_counts_all_roundings():
    def of(sharding, parts=4, by_id=False, world=4):
        one = bound_forward_rounding("bf16", sharding, world, parts, by_id)
        back = bound_backward_rounding("fp16", sharding, world, parts, by_id, 8.0)
        return round(one.share / MAX_ROUNDING_ERROR["bf16"]), round(back.share / MAX_ROUNDING_ERROR["fp16"])

    assert of("table_wise", 1) == of("column_wise", 1) == of("table_column_wise", 1) == (1, 1)
    assert of("row_wise") == (4, 1) and of("row_wise", by_id=True) == (1, 1)
    assert of("table_row_wise", 2) == of("grid_shard", 2) == (3, 2)
    assert of("data_parallel") == of("row_wise", 1, world=1) == (0, 0)
    assert bound_backward_rounding("fp16", "row_wise", 4, 4, False, 8.0).smallest == 2.0**-17


def compute_pooled(rank, world, sharding, precision):
    """Return the pooled embeddings of this rank's rows, unquantized and quantized."""
    schema = SCHEMA.model_copy(deep=True)
    for table in schema.tables.values():
        table.dim = GROUP
    local = make_batches(1, rank, world, schema=schema)[1][0]
    out = []
    for forward in ("fp32", precision):
        settings = make_small_config(world, {"sharding_type": sharding})
        settings.plan.qcomms = QCommsSection(forward_precision=forward)
        step = build_step_on_rank(settings, schema)
        with torch.no_grad():
            found = step.model.module.embeddings(local.sparse)
        out.append({name: values.float() for name, values in found.items()})
    return out


@pytest.mark.parametrize(
    ("sharding", "precision"), [("table_wise", "fp16"), ("column_wise", "bf16"), ("table_wise", "int8")]
)
def test_complete_sums_are_rounded_only_once(sharding, precision):
    for plain, quantized in run_on_ranks(2, compute_pooled, sharding, precision):
        user = plain["user"]  # a sum; means are divided after the exchange
        assert not torch.equal(quantized["user"], user)
        if precision == "int8":
            error = (quantized["user"] - round_to_int8(user, GROUP)).abs().max()
            assert error < 1e-3 * user.abs().max()
        else:
            assert torch.equal(quantized["user"], user.to(CAST[precision]).float())
