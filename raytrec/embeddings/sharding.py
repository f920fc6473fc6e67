"""How TorchRec shards tables: ways, kernels, and codecs of values that travel between ranks (plan.qcomms)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, gcd, log2
from typing import Any, ClassVar, get_args

import torch
from fbgemm_gpu.quantize_comm import QuantizationContext, QuantizedCommCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_sharding import USE_ONE_TBE_PER_TABLE
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import CommOp, ModuleSharder, QuantizedCommCodecs, ShardingPlan

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import Precision, Sharding
from raytrec.embeddings.constraints import BY_ID_TYPES, SUMMED_TYPES

TYPES = {"fp32": SparseType.FP32, "fp16": SparseType.FP16, "bf16": SparseType.BF16, "int8": SparseType.INT8}
Codecs = dict[str, QuantizedCommCodecs]


class Codec(QuantizedCommCodec):
    """FBGEMM's codec of one direction of collectives (plan.qcomms), with two changes.

    FBGEMM divides by its scale before values leave fp16, so that small gradients are lost all the same; and
    its groups of 32 int8 values fit few batches, and few tables.

    Args:
        precision: fp32, fp16, bf16 or int8.
        group: Number of int8 values that share a scale; a divisor of the width of every shard.
        factor: Power of two that values are multiplied with while they travel.
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
    """Return the codecs by collective (TorchRec's `qcomm_codecs_registry`), or None if all is fp32.

    Args:
        widths: Widths of all shards that are sent.
    """
    qcomms = config.plan.qcomms
    if qcomms.forward_precision == qcomms.backward_precision == "fp32":
        return None
    group = max(1, gcd(*widths))  # so that no group of int8 values is of two rows or two tables
    forward = Codec(qcomms.forward_precision, group)
    backward = Codec(qcomms.backward_precision, group, gradient_factor(config, world))
    return {operation.name: QuantizedCommCodecs(forward, backward) for operation in CommOp}


def widths_of(plan: ShardingPlan) -> list[int]:
    """Return the widths of all shards of a plan, without data-parallel tables, which are not sent."""
    return [
        shard.shard_sizes[1]
        for module in plan.plan.values()
        for spec in module.values()
        for shard in (spec.sharding_spec.shards if spec.sharding_spec else ())
    ]


# What one rounding changes of a value at most, as a share of it; with int8, as a share of the largest in its
# group, whose values are 255 equal steps apart from its smallest to its largest (the limit is half a step and
# 2 % more, for FBGEMM adds 1e-8 to what it divides by).
UNIT = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 250}
# Values below this lose as much as this one: fp16 has no smaller exponent, int8 that 1e-8.
SMALLEST = {"fp32": 0.0, "fp16": 2.0**-14, "bf16": 0.0, "int8": 2.0**-12}


@dataclass(frozen=True)
class Rounding:
    """How much of values may be lost on their way between ranks.

    Attributes:
        share: of the sizes of what is added up.
        smallest: sizes below this count as this.
    """

    share: float
    smallest: float


def forward_rounding(
    precision: Precision, sharding: str, world: int, row_parts: int, by_id: bool
) -> Rounding:
    """Of the embeddings of a table.

    Args:
        row_parts: into how many ranges of rows it is cut.
        by_id: whether it gives the vector of each id: no sums, then, that are added up on the way.
    """
    if sharding == "data_parallel" or world == 1:
        return Rounding(0.0, 0.0)
    # row_parts numbers are rounded and added one after the other: that many roundings of at most the sum of
    # their sizes. From the hosts' sums of table_row_wise and grid_shard one more, across hosts.
    times = 1 if by_id or sharding not in SUMMED_TYPES else row_parts + (sharding != "row_wise")
    return Rounding((1 + UNIT[precision]) ** times - 1, SMALLEST[precision])


def backward_rounding(
    precision: Precision, sharding: str, world: int, row_parts: int, by_id: bool, factor: float
) -> Rounding:
    """Of the gradients that reach a table; of a rank's loss, not of its part of the global one.

    Args:
        factor: see `gradient_factor`. The others: see `forward_rounding`.
    """
    if sharding == "data_parallel" or world == 1:
        return Rounding(0.0, 0.0)
    twice = not by_id and sharding in SUMMED_TYPES and sharding != "row_wise"
    # The first of two groups divides by its size before the second sends.
    smallest = SMALLEST[precision] / factor * (world / row_parts if twice else 1)
    return Rounding((1 + UNIT[precision]) ** (2 if twice else 1) - 1, smallest)


def gradient_factor(config: RunConfig, world: int) -> float:
    """What gradients are multiplied with while they travel: a power of two, so that nothing is rounded by it.

    A row's gradient is divided by the rows of a batch (and multiplied by the number of ranks, see
    tasks/objective.py): beyond 1e5 rows, fp16 would keep a few bits of it.
    """
    return 2.0 ** floor(log2(max(1, config.data.global_batch_size // world)))


class _Offers:
    """Offers ways of sharding on every device, and the kernels that train under each.

    TorchRec's sharders offer no row-wise sharding on CPU, although it runs there, and let the planner choose
    dense kernels, whose tables the fused optimizers would not train. A table's ParameterConstraints narrow
    this down.
    """

    kinds: ClassVar[tuple[str, ...]] = get_args(Sharding)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(self.kinds)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["dense"] if sharding_type == "data_parallel" else ["fused", "fused_uvm", "fused_uvm_caching"]


class BagSharder(_Offers, EmbeddingBagCollectionSharder):
    """Shards tables that give sums of bags."""


class IdSharder(_Offers, EmbeddingCollectionSharder):
    """Shards tables that give the vector of each id, in fewer ways.

    On CPU each of them has its own lookup (compat.fbgemm_lookups.FusedBagsOfOne).
    """

    kinds = BY_ID_TYPES

    def __init__(
        self, fused_params: dict[str, Any] | None, codecs: Codecs | None, device: str, distinct: bool
    ):
        super().__init__({**(fused_params or {}), USE_ONE_TBE_PER_TABLE: device == "cpu"}, codecs, distinct)


def sharders(
    fused_params: dict[str, Any] | None = None,
    codecs: Codecs | None = None,
    device: str = "cpu",
    distinct: bool = False,
) -> list[ModuleSharder]:
    """Return the sharders of all collections of tables.

    Args:
        fused_params: FBGEMM's settings of kernels that update in backward.
        codecs: Codecs of values that travel between ranks; default: values travel in fp32.
        device: cpu or cuda.
        distinct: True if each distinct id of a batch is sent once, for tables that give each id's vector.
    """
    return [BagSharder(fused_params, codecs), IdSharder(fused_params, codecs, device, distinct)]


def sharders_for_planning(config: RunConfig, schema: Schema, world: int) -> list[ModuleSharder]:
    """Return the sharders for the planner, which counts the bytes that are sent."""
    return sharders(codecs=make_codecs(config, [table.dim for table in schema.tables.values()], world))


def describe(plan: ShardingPlan) -> list[dict]:
    """Return {table, sharding_type, compute_kernel, ranks} for each table of a plan."""
    return [
        {
            "table": table,
            "sharding_type": spec.sharding_type,
            "compute_kernel": spec.compute_kernel,
            "ranks": spec.ranks,
        }
        for module in plan.plan.values()
        for table, spec in sorted(module.items())
    ]
