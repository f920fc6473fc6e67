"""Private names of TorchRec (1.8.0): lookups, which raytrec customizes, and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torch.fx import Proxy
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import batched_embedding_kernel
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.compat.versions import private, replace_private

MAPPED = "raytrec_mapped"  # key in the settings of tables in files; they share no lookup with other tables


def iterate_sharded_kernels(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the kernels of this rank's shards, one per group of tables that FBGEMM looks up at once.

    Kernels of data-parallel tables are not included; see `iterate_replicated_kernels`.
    """
    for lookup in _iterate_lookups(model):
        if not isinstance(lookup, DistributedDataParallel):
            yield from private(lookup, "_emb_modules", "torchrec")


def iterate_replicated_kernels(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the kernels of data-parallel tables, of which every rank holds a complete copy."""
    for lookup in _iterate_lookups(model):
        if isinstance(lookup, DistributedDataParallel):
            yield from private(lookup.module, "_emb_modules", "torchrec")


def _iterate_lookups(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the lookups of each collection, one per sharding type."""
    for module in iterate_sharded_collections(model):
        yield from private(module, "_lookups", "torchrec")


def iterate_sharded_collections(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the sharded collections of tables, with pooled or per-id output."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            yield module


def watch_distinct_ids(model: nn.Module, on_lookup: Callable[[KeyedJaggedTensor], object]) -> None:
    """Call a function at each lookup of a collection that sends only distinct ids (use_index_dedup).

    The function is called once per sharding type, with the ids sent for this type. Ids of a table can be listed under
    any feature that reads the table. A feature is repeated for each column shard.
    """
    for module in iterate_sharded_collections(model):
        if not getattr(module, "_use_index_dedup", False):
            continue

        def look_up(ctx: Any, ids: Any, original: Callable = module.compute_and_output_dist) -> Any:
            for context in ctx.sharding_contexts:
                on_lookup(context.features_before_input_dist)
            return original(ctx, ids)

        module.compute_and_output_dist = look_up


def returns_per_id_vectors(kernel: nn.Module) -> bool:
    """Return True if a kernel returns each id's vector, [N, columns], not sums of bags, [B, Σ columns]."""
    return isinstance(kernel, BaseBatchedEmbedding)


def list_kernel_tables(kernel: nn.Module) -> list[ShardedEmbeddingTable]:
    """Return TorchRec's descriptions of the table shards that a kernel looks up, in the order of its features."""
    return private(kernel, "config", "torchrec").embedding_tables


def get_shard_origin(table: ShardedEmbeddingTable) -> tuple[int, int]:
    """Return (first row, first column) of a rank's shard in its table; (0, 0) for a data-parallel table."""
    if not table.local_metadata:
        return 0, 0
    row, column = table.local_metadata.shard_offsets
    return row, column


def is_pipelined(collection: nn.Module, sparse: Any) -> bool:
    """Return True if TorchRec's pipeline is tracing a collection, or has replaced its forward to send ids early.

    `sparse` is the input of the collection.
    """
    return isinstance(sparse, Proxy) or isinstance(collection.forward, BaseForward)


def iterate_wrappers(optimizer: KeyedOptimizer) -> Iterator[KeyedOptimizer]:
    """Yield an optimizer's wrappers (such as GlobalNormClip) from the outermost, then the inner optimizer."""
    yield optimizer
    while isinstance(optimizer, OptimizerWrapper):
        optimizer = private(optimizer, "_optimizer", "torchrec")
        yield optimizer


def unwrap_optimizer(optimizer: KeyedOptimizer) -> KeyedOptimizer:
    """Return the optimizer inside all wrappers."""
    *_, innermost = iterate_wrappers(optimizer)
    return innermost


def iterate_torch_optimizers(optimizer: KeyedOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers inside TorchRec's unwrapped optimizer; parameters updated in backward have none."""
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from iterate_torch_optimizers(part)
    elif isinstance(optimizer, KeyedOptimizerWrapper):
        yield private(optimizer, "_optimizer", "torchrec")


class PerIdLookup(nn.Module):
    """FBGEMM lookup of each id's vector in one table, computed as the sums of bags with one id each.

    Vectors and updates are the same as with PoolingMode.NONE, which TorchRec requests.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings | ONE_TABLE_SETTINGS)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor, *args: Any, **kw: Any) -> torch.Tensor:
        """Return the vector of each id in `indices`, [N, columns]; `offsets` only determines the dtype of the bags."""
        bag_offsets = torch.arange(len(indices) + 1, dtype=offsets.dtype, device=offsets.device)
        return super().forward(indices, bag_offsets, *args, **kw)


class FusedPerIdLookup(PerIdLookup, SplitTableBatchedEmbeddingBagsCodegen):
    """Per-id lookup of a table that is updated in backward.

    On a CPU, the backward of PoolingMode.NONE uses nested hash tables and takes 1 µs per distinct row. The
    backward of this lookup takes 0.04 µs.
    """


class DensePerIdLookup(PerIdLookup, DenseTableBatchedEmbeddingBagsCodegen):
    """Per-id lookup of a table with a dense kernel, for which FBGEMM on a CPU treats PoolingMode.NONE as SUM."""


ONE_TABLE_SETTINGS: dict[str, Any] = {"feature_table_map": [0], "pooling_mode": PoolingMode.SUM}
PER_ID_LOOKUPS = {
    SplitTableBatchedEmbeddingBagsCodegen: FusedPerIdLookup,
    DenseTableBatchedEmbeddingBagsCodegen: DensePerIdLookup,
}


def map_table(weight: nn.Parameter, state: Mapping[str, str], name: str = "") -> None:
    """Mark a table, before sharding, for storage in a file; the table must be updated in backward.

    TorchRec combines only tables with equal settings into a lookup, so tables in files share no lookup with tables
    in memory.

    Args:
        weight: Weights of the table.
        state: FBGEMM's name of an optimizer state → granularity of the state, "value" or "row".
        name: Name of the table if some of its rows may also be in memory, which gives the table a separate lookup;
            "" if all rows are only in the file.

    Raises:
        RunError: The table has no optimizer that updates it in backward.
    """
    (settings,) = private(weight, "_optimizer_kwargs", "torch")
    settings[MAPPED] = (name, *state.items())


def use_custom_lookups(files: Any) -> AbstractContextManager[None]:
    """Make TorchRec create raytrec's lookups in the block.

    Per-id lookups of one table use bags of one id. Weights and optimizer state of tables in files (`map_table`)
    use memory allocated by `files`, which FBGEMM's CPU kernel receives as preallocated_host_buffers. No initial
    values are drawn, because raytrec writes them later.

    Args:
        files: Factory of memory-mapped files (embeddings.mapped.MappedFileFactory).
    """

    def wrap(plain: type, custom: type) -> Callable[..., nn.Module]:
        def make_lookup(*args: Any, **settings: Any) -> nn.Module:
            (specs,) = args or (settings["embedding_specs"],)  # one tuple (rows, dim, …) per table
            is_per_id = settings["pooling_mode"] == PoolingMode.NONE and len(specs) == 1
            kind = custom if is_per_id else plain
            if (mark := settings.pop(MAPPED, None)) is None:
                return kind(*args, **settings)
            name, *state = mark
            extra = int(files.share * specs[0][0]) if name else 0
            settings["preallocated_host_buffers"] = _make_buffers(specs, settings, dict(state), files, extra)
            if extra:
                return _make_lookup_with_extra_rows(kind, specs, settings, files, extra)
            return kind(*args, **settings)

        return make_lookup

    kernels = batched_embedding_kernel
    lookups = [(kernels, plain.__name__, wrap(plain, custom)) for plain, custom in PER_ID_LOOKUPS.items()]
    bases = (kernels.BaseBatchedEmbedding, kernels.BaseBatchedEmbeddingBag)
    return replace_private("torchrec", *lookups, *((base, "init_parameters", lambda kernel: None) for base in bases))


def _make_buffers(
    specs: list[tuple], settings: dict[str, Any], state: Mapping[str, str], files: Any, extra: int
) -> dict[str, torch.Tensor] | None:
    """Return FBGEMM's name → buffer for the weights and states of a fused CPU kernel; None for shards without rows.

    `extra` is the number of additional rows, after those of the only table, that hold cached rows in memory.
    """
    sizes = {"value": sum(rows * dim for rows, dim, *_ in specs), "row": sum(rows for rows, *_ in specs)}
    if not sizes["value"]:
        return None  # shards without rows
    extras = {"value": extra * specs[0][1], "row": extra}
    kinds = {"weights": ("value", settings["weights_precision"].as_dtype())}
    kinds |= {name: (per, torch.float32) for name, per in state.items()}
    tables = list(dict.fromkeys(settings["table_names"]))
    return {name: files.allocate_zeros(tables, sizes[per], dtype, extras[per]) for name, (per, dtype) in kinds.items()}


def _make_lookup_with_extra_rows(
    kind: Callable[..., nn.Module], specs: list[tuple], settings: dict[str, Any], files: Any, extra: int
) -> nn.Module:
    """Return a lookup of one file-mapped table, with `extra` rows of weights appended as an in-memory cache.

    TorchRec and its optimizers see only the rows of the table, because embedding_specs is reduced to the table
    after the kernel has been created. The kernel itself reads and updates all rows.
    """
    ((rows, *fields),) = specs
    lookup = kind(**settings | {"embedding_specs": [(rows + extra, *fields)]})
    weights = private(lookup, "split_embedding_weights", "fbgemm-gpu")()
    (states,) = lookup.split_optimizer_states() or [[]]
    lookup.embedding_specs = specs
    hot_rows = lookup.resident_rows = files.make_hot_rows([*weights, *states], rows)
    lookup.flush, lookup.reset_cache_states = hot_rows.flush, hot_rows.purge

    def translate(module: nn.Module, args: tuple, inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        trains = module.training and torch.is_grad_enabled()
        inputs["indices"] = hot_rows.look_up(inputs["indices"], trains=trains)
        return args, inputs

    lookup.register_forward_pre_hook(translate, with_kwargs=True)
    return lookup


def substitute_torchrec_kernel(plan: ShardingPlan, custom: str, plain: str) -> AbstractContextManager[None]:
    """Replace raytrec's compute kernel `custom` in a plan with TorchRec's kernel `plain` during the block."""
    specs = [spec for module in plan.plan.values() for spec in module.values() if spec.compute_kernel == custom]
    return replace_private("torchrec", *((spec, "compute_kernel", plain) for spec in specs))
