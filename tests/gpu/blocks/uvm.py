"""11: UVM tables with a GPU cache save the values that lookups return.

Saving takes about as much host memory as the state.
"""

from __future__ import annotations

from here import BlockContext

TABLE_ROWS, DIM, BATCH, STEPS = 500_000, 32, 1024, 60
# Host memory of a save: share of the state size, plus bytes for write buffers.
MAX_SAVE_MEMORY_RATIO, SAVE_MEMORY_SLACK_BYTES = 1.1, 64 << 20


def run(here: BlockContext) -> None:
    here.needs_gpu("FBGEMM has a cache only on GPUs")
    import small
    import torch

    from raytrec.checkpoint.state import LogicalState
    from raytrec.compat.fbgemm import measure_cache_hits
    from raytrec.compat.torchrec_ import iterate_sharded_kernels

    tables = {"t": {"rows": TABLE_ROWS, "dim": DIM}}
    schema = small.make_small_schema(dense=["a"], sparse={"f": {"table": "t"}}, tables=tables)
    config = small.make_small_config(1, {"sharding_type": "table_wise", "compute_kernel": "fused_uvm_caching"})
    with here.group():
        step = small.build_step_on_rank(config, schema, here.device)
        _train(step, here)
        (kernel,) = iterate_sharded_kernels(step.model)
        here.found["cache_hits"] = hits = measure_cache_hits(kernel)
        assert hits, "no row was found in the cache"
        ids = torch.randint(0, TABLE_ROWS, (4096,), device=here.device)
        looked_up = _lookup(kernel, ids)
        state = LogicalState(step.model, step.optimizer)
        tensors = state.tensors()  # flushes the cache
        rows = state.tables["t"].weight.dense()[ids.to(state.tables["t"].weight.device)]
        apart = float((rows.to(looked_up.device) - looked_up).abs().max())
        assert apart == 0, f"flushed rows differ from looked-up rows by {apart:.2g}"
        _check_host_memory(here, tensors)


def _train(step, here: BlockContext) -> None:
    """Train on skewed ids: frequent ids hit the cache and rare ids evict rows."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from raytrec.data.batch import Batch

    generator = torch.Generator().manual_seed(0)

    def batches():
        for _ in range(STEPS):
            ids = (torch.rand(4 * BATCH, generator=generator) ** 4 * (TABLE_ROWS - 1)).long()
            sparse = KeyedJaggedTensor(["f"], ids, lengths=torch.full((BATCH,), 4, dtype=torch.int32))
            labels = torch.randint(0, 2, (BATCH, 1), generator=generator).float()
            dense = torch.randn(BATCH, 1, generator=generator)
            yield Batch(dense, sparse, labels, torch.ones(BATCH), BATCH).pin_memory()

    for _ in step.train(batches(), STEPS):
        pass


def _lookup(kernel, ids):
    """Return the rows that a forward pass looks up, with one id per bag."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    ones = torch.ones(len(ids), dtype=torch.int32, device=ids.device)
    with torch.no_grad():
        return kernel(KeyedJaggedTensor(["f"], ids, lengths=ones))


def _check_host_memory(here: BlockContext, tensors) -> None:
    """Check the RSS of the process; torch's statistics do not include memory page-locked by raytrec."""
    import psutil

    from raytrec.checkpoint.save import CheckpointWriter
    from raytrec.config.training import CheckpointSection

    process = psutil.Process()
    before = process.memory_info().rss
    saver = CheckpointWriter(str(here.folder / "checkpoints"), CheckpointSection(every_s=None))
    saver.save(1, tensors, {})
    saved = saver.collect_outcome()
    assert saved.error is None, str(saved.error)
    more, size = process.memory_info().rss - before, sum(_bytes(value) for value in tensors.values())
    here.found |= {"state_mib": size >> 20, "host_mib": more >> 20, "save_s": saved.seconds}
    assert more <= MAX_SAVE_MEMORY_RATIO * size + SAVE_MEMORY_SLACK_BYTES, (
        f"{more >> 20} MiB of host memory for a copy of {size >> 20} MiB"
    )


def _bytes(value) -> int:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    parts = [s.tensor for s in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
    return sum(part.numel() * part.element_size() for part in parts)
