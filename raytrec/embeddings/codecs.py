"""How plan.qcomms writes what travels between ranks.

FBGEMM's codecs, but for two things. It divides what it has scaled before it leaves fp16 again, so that small
gradients are lost all the same; and its groups of 32 int8 values fit few batches, and few tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

import torch
from fbgemm_gpu.quantize_comm import QuantizationContext, QuantizedCommCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.types import CommOp, QuantizedCommCodecs, ShardingPlan

from raytrec.config.run_config import RunConfig
from raytrec.embeddings.qcomms import gradient_factor

TYPES = {"fp32": SparseType.FP32, "fp16": SparseType.FP16, "bf16": SparseType.BF16, "int8": SparseType.INT8}
Codecs = dict[str, QuantizedCommCodecs]


class Codec(QuantizedCommCodec):
    """Of one direction.

    Args:
        precision: fp32, fp16, bf16 or int8.
        group: int8: how many values share a scale; a divisor of the width of every shard.
        factor: a power of two that values are multiplied with while they travel.
    """

    def __init__(self, precision: str, group: int, factor: float = 1.0):
        super().__init__(TYPES[precision])
        self.group, self.factor = group, factor if precision != "fp32" else 1.0

    def encode(self, input_tensor: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        if self.factor != 1:
            input_tensor = input_tensor * self.factor
        return super().encode(input_tensor, ctx)

    def decode(self, input_tensor: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        values = super().decode(input_tensor, ctx)
        return values if self.factor == 1 else values.div_(self.factor)

    def create_context(self) -> QuantizationContext:
        return QuantizationContext(self.group)


def make_codecs(config: RunConfig, widths: Iterable[int], world: int) -> Codecs | None:
    """TorchRec's `qcomm_codecs_registry`: collective → codecs; None where all is fp32.

    Args:
        widths: of all shards that are sent.
    """
    qcomms = config.plan.qcomms
    if qcomms.forward_precision == qcomms.backward_precision == "fp32":
        return None
    group = max(1, gcd(*widths))  # so that no group of int8 values is of two rows or two tables
    forward = Codec(qcomms.forward_precision, group)
    backward = Codec(qcomms.backward_precision, group, gradient_factor(config, world))
    return {operation.name: QuantizedCommCodecs(forward, backward) for operation in CommOp}


def widths_of(plan: ShardingPlan) -> list[int]:
    """The widths of all shards of a plan; without data-parallel tables, which are not sent."""
    return [
        shard.shard_sizes[1]
        for module in plan.plan.values()
        for spec in module.values()
        for shard in (spec.sharding_spec.shards if spec.sharding_spec else ())
    ]
