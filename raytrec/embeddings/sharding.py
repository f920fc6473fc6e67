"""Configure TorchRec's sharding types, kernels, and codecs of values sent between ranks (plan.qcomms)."""

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
from raytrec.embeddings.constraints import BY_ID_TYPES, REDUCE_SCATTER_TYPES

Codecs = dict[str, QuantizedCommCodecs]


class ScaledCodec(QuantizedCommCodec):
    """FBGEMM's codec for one direction of collectives (plan.qcomms), with a custom scale and group size.

    FBGEMM's codec divides by its scale while values are still fp16, so small gradients are lost despite the scale.
    Its groups of 32 int8 values require that the number of exchanged values is a multiple of 32.

    Args:
        precision: fp32, fp16, bf16 or int8.
        group: Number of int8 values that share a scale; a divisor of the number of columns of every shard.
        factor: Power of two by which values are multiplied during transfer; ignored for fp32.
    """

    def __init__(self, precision: str, group: int, factor: float = 1.0):
        super().__init__(SparseType(precision))
        self.group, self.factor = group, factor if precision != "fp32" else 1.0

    def encode(self, input_tensor: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        """Return the values, multiplied by the factor, in the codec's precision."""
        if self.factor != 1:
            input_tensor = input_tensor * self.factor
        return super().encode(input_tensor, ctx)

    def decode(self, input_tensor: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        """Return the values in fp32, divided by the factor."""
        values = super().decode(input_tensor, ctx)
        return values if self.factor == 1 else values.div_(self.factor)

    def create_context(self) -> QuantizationContext:
        """Return a context with this codec's group size."""
        return QuantizationContext(self.group)


def make_codecs(config: RunConfig, widths: Iterable[int], world: int) -> Codecs | None:
    """Return collective (name of a CommOp) → codecs for plan.qcomms, or None if both precisions are fp32.

    Args:
        config: Configuration of the run.
        widths: Numbers of columns of all shards whose values are sent; may be empty.
        world: Number of ranks.
    """
    qcomms = config.plan.qcomms
    if qcomms.forward_precision == qcomms.backward_precision == "fp32":
        return None
    group = max(1, gcd(*widths))  # so that no group of int8 values spans two rows or two tables
    forward = ScaledCodec(qcomms.forward_precision, group)
    backward = ScaledCodec(qcomms.backward_precision, group, choose_gradient_factor(config, world))
    return {operation.name: QuantizedCommCodecs(forward, backward) for operation in CommOp}


def list_shard_widths(plan: ShardingPlan) -> list[int]:
    """Return the number of columns of each shard of a plan. Data-parallel tables are omitted: they are not sent."""
    return [
        shard.shard_sizes[1]
        for module in plan.plan.values()
        for spec in module.values()
        for shard in (spec.sharding_spec.shards if spec.sharding_spec else ())
    ]


# Largest relative error of one rounding. With int8, the error is relative to the largest magnitude in the group:
# 255 equal steps cover the range from the smallest to the largest value. The limit is half a step plus 2 %,
# because FBGEMM adds 1e-8 to the divisor.
MAX_ROUNDING_ERROR = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 250}
# Magnitude below which values have the same absolute error as a value of this magnitude: fp16 has no smaller
# exponent, and FBGEMM adds the 1e-8 for int8.
MIN_ROUNDED_VALUE = {"fp32": 0.0, "fp16": 2.0**-14, "bf16": 0.0, "int8": 2.0**-12}


@dataclass(frozen=True)
class Rounding:
    """Bound on the rounding error of values sent between ranks.

    Attributes:
        share: Maximum error, as a fraction of the sum of the summands' magnitudes.
        smallest: Minimum magnitude of a summand in this sum; smaller magnitudes count as this value.
    """

    share: float
    smallest: float


def bound_forward_rounding(precision: Precision, sharding: str, world: int, row_parts: int, by_id: bool) -> Rounding:
    """Return the bound on the rounding error of a table's embeddings; 0 for one rank and for data_parallel.

    Args:
        precision: plan.qcomms.forward_precision.
        sharding: Sharding type of the table.
        world: Number of ranks.
        row_parts: Number of row ranges into which the table is cut.
        by_id: True if the table produces one vector per id, so that no sums are computed in transfer.
    """
    if sharding == "data_parallel" or world == 1:
        return Rounding(0.0, 0.0)
    # row_parts partial sums are rounded and added one after another. The error of each rounding is at most a share
    # of the sum of their magnitudes. table_row_wise and grid_shard round once more when they add sums across hosts.
    times = 1 if by_id or sharding not in REDUCE_SCATTER_TYPES else row_parts + (sharding != "row_wise")
    return Rounding((1 + MAX_ROUNDING_ERROR[precision]) ** times - 1, MIN_ROUNDED_VALUE[precision])


def bound_backward_rounding(
    precision: Precision, sharding: str, world: int, row_parts: int, by_id: bool, factor: float
) -> Rounding:
    """Return the bound on the rounding error of the gradients of a table; 0 for one rank and for data_parallel.

    The bound applies to the gradients of a rank's loss as defined in tasks/objective.py, before TorchRec divides
    them by the number of ranks.

    Args:
        precision: plan.qcomms.backward_precision.
        sharding: Sharding type of the table.
        world: Number of ranks.
        row_parts: Number of row ranges into which the table is cut.
        by_id: True if the table produces one vector per id.
        factor: Factor of the gradients during transfer (`choose_gradient_factor`).
    """
    if sharding == "data_parallel" or world == 1:
        return Rounding(0.0, 0.0)
    twice = not by_id and sharding in REDUCE_SCATTER_TYPES and sharding != "row_wise"
    # The first of the two process groups divides by its size before the second one sends.
    smallest = MIN_ROUNDED_VALUE[precision] / factor * (world / row_parts if twice else 1)
    return Rounding((1 + MAX_ROUNDING_ERROR[precision]) ** (2 if twice else 1) - 1, smallest)


def choose_gradient_factor(config: RunConfig, world: int) -> float:
    """Return the factor by which gradients are multiplied during transfer, a power of two.

    A row's gradient is divided by the number of rows in a global batch and multiplied by the number of ranks (see
    tasks/objective.py). Beyond 1e5 rows, fp16 would keep only a few bits of the unscaled gradient.
    """
    return 2.0 ** floor(log2(max(1, config.data.global_batch_size // world)))


class _ShardingTypesMixin:
    """Mixin for TorchRec's sharders that offers the sharding types in `kinds`, with their kernels, on every device.

    TorchRec's sharders do not offer row-wise sharding on CPU, although CPUs support it. They also let the
    planner choose dense kernels, whose tables the fused optimizers would not train. Each table's
    ParameterConstraints narrow the choice.
    """

    kinds: ClassVar[tuple[str, ...]] = get_args(Sharding)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types that the planner may choose from, on any device."""
        return list(self.kinds)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the compute kernels that the planner may choose from under a sharding type, on any device."""
        return ["dense"] if sharding_type == "data_parallel" else ["fused", "fused_uvm", "fused_uvm_caching"]


class BagSharder(_ShardingTypesMixin, EmbeddingBagCollectionSharder):
    """Sharder of tables that produce sums of bags."""


class IdSharder(_ShardingTypesMixin, EmbeddingCollectionSharder):
    """Sharder of tables that produce one vector per id, for which TorchRec supports only BY_ID_TYPES.

    On CPU, each of these tables has a separate lookup (compat.torchrec_.FusedPerIdLookup).
    """

    kinds = BY_ID_TYPES

    def __init__(self, fused_params: dict[str, Any] | None, codecs: Codecs | None, device: str, distinct: bool):
        super().__init__({**(fused_params or {}), USE_ONE_TBE_PER_TABLE: device == "cpu"}, codecs, distinct)


def make_sharders(
    fused_params: dict[str, Any] | None = None,
    codecs: Codecs | None = None,
    device: str = "cpu",
    distinct: bool = False,
) -> list[ModuleSharder]:
    """Return a BagSharder and an IdSharder, which together shard all collections of tables.

    Args:
        fused_params: FBGEMM settings for kernels that update tables in backward.
        codecs: Codecs of values sent between ranks (`make_codecs`); default: values are sent as fp32.
        device: cpu or cuda.
        distinct: True to send each distinct id of a batch only once, for tables that produce one vector per id.
    """
    return [BagSharder(fused_params, codecs), IdSharder(fused_params, codecs, device, distinct)]


def make_planning_sharders(config: RunConfig, schema: Schema, world: int) -> list[ModuleSharder]:
    """Return the sharders for TorchRec's planner, which predicts the bytes sent between ranks from their codecs."""
    return make_sharders(codecs=make_codecs(config, [table.dim for table in schema.tables.values()], world))


def describe_plan(plan: ShardingPlan) -> list[dict]:
    """Return a dict for each table of a plan, with its name (table), sharding_type, compute_kernel and list of ranks.

    Tables of the same module are sorted by name.
    """
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
