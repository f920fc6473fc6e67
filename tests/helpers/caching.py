"""Simulation of FBGEMM's GPU row cache on CPU kernels, which have no cache."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

CACHE_ASSOCIATIVITY = 32  # slots per cache set (fbgemm-gpu 1.8.0, DEFAULT_ASSOC)
STALE_VALUE = 1000.0


class SimulatedCaches:
    """Simulated row caches of the fused kernels of a model.

    Inside `holding`, two thirds of the rows are cached in the layout of the CUDA kernels (fbgemm-gpu 1.8.0,
    lxu_cache.cu), and the shards hold stale values of these rows. Forward and backward must run outside
    `holding`, because the CPU kernels do not read the cache.

    Attributes:
        flushes: number of calls of a kernel's flush().
    """

    def __init__(self, model):
        from raytrec.compat.fbgemm import find_fused_lookup
        from raytrec.compat.torchrec_ import iterate_sharded_kernels

        self.flushes = 0
        self._kernels = [k for k in iterate_sharded_kernels(model) if find_fused_lookup(k) is not None]

    @contextmanager
    def holding(self):
        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.ops.fbgemm, "lxu_cache_lookup", lookup))
            for kernel in self._kernels:
                stack.enter_context(self._cached(kernel.emb_module))
            yield self

    def slots(self):
        """Return the cached rows of each kernel as writable views, [slots, largest dim]."""
        return [kernel.emb_module.lxu_cache_weights for kernel in self._kernels]

    @contextmanager
    def _cached(self, lookup):
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, construct_cache_state

        # .data: hide from autograd the changes that are undone before backward.
        shards = [values.data for values in lookup.split_embedding_weights()]
        rows = [len(shard) for shard in shards]
        layout = construct_cache_state(rows, [EmbeddingLocation.MANAGED_CACHING] * len(rows), lookup.feature_table_map)
        numbers = torch.randperm(sum(rows))[: -(-sum(rows) * 2 // 3)]  # two of three rows are cached
        sets = -(-len(numbers) // CACHE_ASSOCIATIVITY) + 1
        state = torch.full((sets, CACHE_ASSOCIATIVITY), -1)
        state.view(-1)[torch.randperm(sets * CACHE_ASSOCIATIVITY)[: len(numbers)]] = numbers
        weights = torch.full((sets * CACHE_ASSOCIATIVITY, lookup.max_D), torch.nan, dtype=shards[0].dtype)
        starts = torch.tensor([0, *rows]).cumsum(0)

        def places():
            for slot in (state.view(-1) >= 0).nonzero().squeeze(1).tolist():
                number = int(state.view(-1)[slot])
                table = int(torch.searchsorted(starts, number, right=True)) - 1
                yield weights[slot, : shards[table].shape[1]], shards[table][number - starts[table]]

        def write_back():
            for cached, stored in places():
                stored.copy_(cached)

        def flush():
            self.flushes += 1
            write_back()

        with torch.no_grad():
            for cached, stored in places():
                cached.copy_(stored)
                stored.fill_(STALE_VALUE)
        before = {n: getattr(lookup, n) for n in ("lxu_cache_state", "lxu_cache_weights", "cache_hash_size_cumsum")}
        lookup.lxu_cache_state, lookup.lxu_cache_weights = state, weights
        lookup.cache_hash_size_cumsum = torch.tensor(layout.cache_hash_size_cumsum)
        lookup.flush = flush
        try:
            yield
        finally:
            with torch.no_grad():
                write_back()
            del lookup.flush
            for name, value in before.items():
                setattr(lookup, name, value)


def lookup(numbers, state, *_):
    """Return the result of fbgemm::lxu_cache_lookup on CUDA."""
    assert numbers.dtype == torch.int64 and numbers.dim() == 1
    hits = state.view(-1) == numbers.unsqueeze(1)
    return torch.where(hits.any(1), hits.int().argmax(1), -1).int()
