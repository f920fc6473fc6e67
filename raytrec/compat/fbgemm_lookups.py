"""FBGEMM's lookups (1.8.0) as raytrec wants them.

TorchRec (1.8.0) makes them for a sharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed import batched_embedding_kernel
from torchrec.distributed.types import ShardingPlan

from raytrec.compat.fbgemm import InMemory
from raytrec.compat.versions import private, replacing

MAPPED = "raytrec_mapped"  # among a table's settings; tables that have it share no lookup with others


class Files(Protocol):
    """Makes what lookups of marked tables keep (embeddings/mapped.py).

    Attributes:
        share: of the rows of those that are marked by name, how many are in memory, too.
    """

    share: float

    def zeros(self, tables: list[str], count: int, dtype: torch.dtype, more: int = 0) -> torch.Tensor: ...
    def in_memory(self, whole: list[torch.Tensor], rows: int) -> InMemory: ...


class BagsOfOne(nn.Module):
    """FBGEMM's lookup of each id's vector in one table, as sums of bags of one id each: the same vectors and
    updates as by PoolingMode.NONE, which TorchRec asks for.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings | ONE_BAG)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        one_each = torch.arange(len(indices) + 1, dtype=offsets.dtype, device=offsets.device)
        return super().forward(indices, one_each, *rest, **more)


class FusedBagsOfOne(BagsOfOne, SplitTableBatchedEmbeddingBagsCodegen):
    """The lookup of a table that is updated in backward.

    On CPU, PoolingMode.NONE takes 1 µs for every distinct row on the way back, in hash tables inside of hash
    tables; this 0.04 µs.
    """


class DenseBagsOfOne(BagsOfOne, DenseTableBatchedEmbeddingBagsCodegen):
    """The lookup of a table with a dense kernel, for which FBGEMM on CPU takes PoolingMode.NONE for SUM."""


ONE_BAG: dict[str, Any] = {"feature_table_map": [0], "pooling_mode": PoolingMode.SUM}
EACH_ID_KERNELS = {
    SplitTableBatchedEmbeddingBagsCodegen: FusedBagsOfOne,
    DenseTableBatchedEmbeddingBagsCodegen: DenseBagsOfOne,
}


def map_table(weight: nn.Parameter, state: Mapping[str, str], name: str = "") -> None:
    """Marks a table, before sharding, to be in a file. It must be one that is updated in backward.

    TorchRec puts tables of equal settings into one lookup, so that marked ones are among themselves.

    Args:
        state: FBGEMM's name of each kind of optimizer state → what it has a number for: value or row.
        name: of a table whose rows may be in memory, too: it gets a lookup to itself.
    """
    (settings,) = private(weight, "_optimizer_kwargs", "torch")
    settings[MAPPED] = (name, *state.items())


@contextmanager
def own_lookups(files: Files) -> Iterator[None]:
    """A block in which TorchRec makes lookups as follows.

    Those of each id's vector in one table are of bags of one id. Weights and optimizer state of tables that
    are marked (`map_table`) are in memory that `files` makes, which FBGEMM has for a kernel on CPU under the
    name of preallocated_host_buffers. No initial values are drawn: raytrec writes its own.
    """

    def making(theirs: type, own: type) -> Callable[..., nn.Module]:
        def made(*args: Any, **settings: Any) -> nn.Module:
            (specs,) = args or (settings["embedding_specs"],)  # a tuple for each table, of its rows, dim, …
            each_id = settings["pooling_mode"] == PoolingMode.NONE and len(specs) == 1
            kind = own if each_id else theirs
            if (mark := settings.pop(MAPPED, None)) is None:
                return kind(*args, **settings)
            name, *state = mark
            places = int(files.share * specs[0][0]) if name else 0
            settings["preallocated_host_buffers"] = _buffers(specs, settings, dict(state), files, places)
            return _with_places(kind, specs, settings, files, places) if places else kind(*args, **settings)

        return made

    kernels = batched_embedding_kernel
    with ExitStack() as stack:
        for theirs, own in EACH_ID_KERNELS.items():
            stack.enter_context(replacing(kernels, theirs.__name__, making(theirs, own), "torchrec"))
        for base in (kernels.BaseBatchedEmbedding, kernels.BaseBatchedEmbeddingBag):
            stack.enter_context(replacing(base, "init_parameters", lambda kernel: None, "torchrec"))
        yield


def _buffers(
    specs: list[tuple], settings: dict[str, Any], state: Mapping[str, str], files: Files, places: int
) -> dict[str, torch.Tensor] | None:
    """What a fused kernel on CPU keeps: weights, and the state of its optimizer.

    Args:
        places: of rows in memory, behind those of the only table.
    """
    sizes = {"value": sum(rows * dim for rows, dim, *_ in specs), "row": sum(rows for rows, *_ in specs)}
    if not sizes["value"]:
        return None  # shards without a row
    more = {"value": places * specs[0][1], "row": places}
    kinds = {"weights": ("value", settings["weights_precision"].as_dtype())}
    kinds |= {name: (per, torch.float32) for name, per in state.items()}
    tables = list(dict.fromkeys(settings["table_names"]))
    return {name: files.zeros(tables, sizes[per], dtype, more[per]) for name, (per, dtype) in kinds.items()}


def _with_places(
    kind: Callable[..., nn.Module], specs: list[tuple], settings: dict[str, Any], files: Files, places: int
) -> nn.Module:
    """A lookup of one table with more rows behind its own: places of rows that are in memory.

    TorchRec and its optimizers see the table alone, by FBGEMM's embedding_specs; the kernel, which is made
    before these are cut, reads and updates all of it.
    """
    ((rows, *rest),) = specs
    lookup = kind(**settings | {"embedding_specs": [(rows + places, *rest)]})
    whole = private(lookup, "split_embedding_weights", "fbgemm-gpu")()
    (states,) = lookup.split_optimizer_states() or [[]]
    lookup.embedding_specs = specs
    hot = lookup.in_memory = files.in_memory([*whole, *states], rows)
    lookup.flush, lookup.reset_cache_states = hot.flush, hot.purge

    def translate(module: nn.Module, args: tuple, inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        trains = module.training and torch.is_grad_enabled()
        inputs["indices"] = hot.look_up(inputs["indices"], trains=trains)
        return args, inputs

    lookup.register_forward_pre_hook(translate, with_kwargs=True)
    return lookup


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
