"""How TorchRec may shard tables, and with which kernels."""

from __future__ import annotations

from typing import Any, get_args

from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_sharding import USE_ONE_TBE_PER_TABLE
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import Sharding
from raytrec.embeddings.codecs import Codecs, make_codecs
from raytrec.embeddings.constraints import BY_ID_TYPES


class BagSharder(EmbeddingBagCollectionSharder):
    """Offers every way of sharding on every device, and the kernels that train under each.

    TorchRec's own sharder offers no row-wise sharding on CPU, although it runs there, and lets the planner
    choose dense kernels, whose tables the fused optimizers would not train. What a table may have of this is
    in its ParameterConstraints.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(get_args(Sharding))

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return _kernels(sharding_type)


class IdSharder(EmbeddingCollectionSharder):
    """The same for tables that give the vector of each id, which TorchRec shards in fewer ways.

    On CPU each of them has its own lookup (compat.fbgemm_lookups.FusedBagsOfOne).
    """

    def __init__(
        self, fused_params: dict[str, Any] | None, codecs: Codecs | None, device: str, distinct: bool
    ):
        super().__init__({**(fused_params or {}), USE_ONE_TBE_PER_TABLE: device == "cpu"}, codecs, distinct)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(BY_ID_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return _kernels(sharding_type)


def _kernels(sharding_type: str) -> list[str]:
    return ["dense"] if sharding_type == "data_parallel" else ["fused", "fused_uvm", "fused_uvm_caching"]


def sharders(
    fused_params: dict[str, Any] | None = None,
    codecs: Codecs | None = None,
    device: str = "cpu",
    distinct: bool = False,
) -> list[ModuleSharder]:
    """Of all collections of tables.

    Args:
        fused_params: FBGEMM's settings of kernels that update in backward.
        codecs: of what travels between ranks; default: as it is.
        device: cpu or cuda.
        distinct: whether ids that are read one by one are sent once, however often a batch has them.
    """
    return [BagSharder(fused_params, codecs), IdSharder(fused_params, codecs, device, distinct)]


def sharders_for_planning(config: RunConfig, schema: Schema, world: int) -> list[ModuleSharder]:
    """The same for the planner, which counts what is sent."""
    return sharders(codecs=make_codecs(config, [table.dim for table in schema.tables.values()], world))


def describe(plan: ShardingPlan) -> list[dict]:
    """One entry for each table: {table, sharding_type, compute_kernel, ranks}."""
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
