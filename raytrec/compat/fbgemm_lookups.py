"""FBGEMM's lookups (1.8.0) as raytrec wants them.

TorchRec (1.8.0) makes them for a sharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed import batched_embedding_kernel
from torchrec.distributed.types import ShardingPlan

from raytrec.compat.versions import private, replacing

MAPPED = "raytrec_mapped"  # among a table's settings; tables that have it share no lookup with others
# (tables, values, dtype) → zeros [values] in a file.
Zeros = Callable[[list[str], int, torch.dtype], torch.Tensor]


class FusedBagsOfOne(SplitTableBatchedEmbeddingBagsCodegen):
    """FBGEMM's lookup of each id's vector in one table, as sums of bags of one id each: the same vectors and
    updates as by PoolingMode.NONE, which TorchRec asks for.

    On CPU, that takes 1 µs for every distinct row on the way back, in hash tables inside of hash tables; this
    0.04 µs.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings | ONE_BAG)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        return super().forward(indices, _one_each(indices, offsets), *rest, **more)


class DenseBagsOfOne(DenseTableBatchedEmbeddingBagsCodegen):
    """The same of tables with a dense kernel, for which FBGEMM on CPU takes PoolingMode.NONE for SUM."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings | ONE_BAG)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        return super().forward(indices, _one_each(indices, offsets), *rest, **more)


ONE_BAG: dict[str, Any] = {"feature_table_map": [0], "pooling_mode": PoolingMode.SUM}
EACH_ID_KERNELS = {
    SplitTableBatchedEmbeddingBagsCodegen: FusedBagsOfOne,
    DenseTableBatchedEmbeddingBagsCodegen: DenseBagsOfOne,
}


def _one_each(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(indices) + 1, dtype=offsets.dtype, device=offsets.device)


def map_table(weight: nn.Parameter, state: Mapping[str, str]) -> None:
    """Marks a table, before sharding, to be in a file. It must be one that is updated in backward.

    TorchRec puts tables of equal settings into one lookup, so that marked ones are among themselves.

    Args:
        state: FBGEMM's name of each kind of optimizer state → what it has a number for: value or row.
    """
    (settings,) = private(weight, "_optimizer_kwargs", "torch")
    settings[MAPPED] = tuple(state.items())


@contextmanager
def own_lookups(zeros: Zeros) -> Iterator[None]:
    """A block in which TorchRec makes lookups as follows.

    Those of each id's vector in one table are of bags of one id. Weights and optimizer state of tables that
    are marked (`map_table`) are in memory that `zeros` makes, which FBGEMM has for a kernel on CPU under the
    name of preallocated_host_buffers. No initial values are drawn: raytrec writes its own.
    """

    def making(theirs: type, own: type) -> Callable[..., nn.Module]:
        def made(*args: Any, **settings: Any) -> nn.Module:
            (specs,) = args or (settings["embedding_specs"],)  # a tuple for each table, of its rows, dim, …
            state = settings.pop(MAPPED, None)
            if state is not None:
                settings["preallocated_host_buffers"] = _buffers(specs, settings, dict(state), zeros)
            each_id = settings["pooling_mode"] == PoolingMode.NONE and len(specs) == 1
            return (own if each_id else theirs)(*args, **settings)

        return made

    kernels = batched_embedding_kernel
    with ExitStack() as stack:
        for theirs, own in EACH_ID_KERNELS.items():
            stack.enter_context(replacing(kernels, theirs.__name__, making(theirs, own), "torchrec"))
        for base in (kernels.BaseBatchedEmbedding, kernels.BaseBatchedEmbeddingBag):
            stack.enter_context(replacing(base, "init_parameters", lambda kernel: None, "torchrec"))
        yield


def _buffers(
    specs: list[tuple], settings: dict[str, Any], state: Mapping[str, str], zeros: Zeros
) -> dict[str, torch.Tensor] | None:
    """What a fused kernel on CPU keeps: weights, and the state of its optimizer."""
    sizes = {"value": sum(rows * dim for rows, dim, *_ in specs), "row": sum(rows for rows, *_ in specs)}
    if not sizes["value"]:
        return None  # shards without a row
    tables = list(dict.fromkeys(settings["table_names"]))
    buffers = {"weights": zeros(tables, sizes["value"], settings["weights_precision"].as_dtype())}
    return buffers | {name: zeros(tables, sizes[per], torch.float32) for name, per in state.items()}


@contextmanager
def as_known_to_torchrec(plan: ShardingPlan, kernels: dict[str, str]) -> Iterator[None]:
    """A block in which a plan names TorchRec's compute kernels instead of raytrec's.

    Args:
        kernels: raytrec's name → TorchRec's.
    """
    own = [
        (spec, spec.compute_kernel)
        for module in plan.plan.values()
        for spec in module.values()
        if spec.compute_kernel in kernels
    ]
    for spec, name in own:
        spec.compute_kernel = kernels[name]
    try:
        yield
    finally:
        for spec, name in own:
            spec.compute_kernel = name
