"""11: tables in host memory with a cache on the GPU: what is saved is what is looked up, and saving locks no
more host memory than the state is large."""

from __future__ import annotations

from here import Here

TABLE_ROWS, DIM, BATCH, STEPS = 500_000, 32, 1024, 60
MOST = 1.1  # locked host memory for a checkpoint, as a share of the state


def run(here: Here) -> None:
    import torch

    from raytrec.checkpoint.state import LogicalState
    from raytrec.embeddings.kernels import sharded_kernels
    from raytrec.tracking.statistics import cache_hits
    from raytrec.train.build import build_step

    here.needs_gpu("FBGEMM keeps a cache on GPUs alone")
    schema, config = _schema(), _config()
    with here.group():
        step, _ = build_step(config, schema, here.device)
        _train(step, here)
        (kernel,) = sharded_kernels(step.model)
        hits = cache_hits(kernel)
        here.found |= hits
        assert hits.get("cache_hit_rate", 0) > 0, f"no row was found in the cache: {hits}"
        ids = torch.randint(0, TABLE_ROWS, (4096,), device=here.device)
        looked_up = _lookup(kernel, ids)
        state = LogicalState(step.model, step.optimizer)
        tensors = state.tensors()  # flushes the cache
        rows = state.tables["t"].weight.dense()[ids.to(state.tables["t"].weight.device)]
        apart = float((rows.to(looked_up.device) - looked_up).abs().max())
        assert apart == 0, f"rows that were flushed differ from those that are looked up by {apart:.2g}"
        _check_locked_memory(here, tensors)


def _schema():
    from raytrec.schema import Schema

    return Schema.parse(
        {
            "labels": ["y"],
            "dense": ["a"],
            "sparse": {"f": {"table": "t"}},
            "tables": {"t": {"rows": TABLE_ROWS, "dim": DIM}},
        },
        "uvm",
    )


def _config():
    from raytrec.config import RunConfig

    return RunConfig.model_validate(
        {
            "data": {"train": "unused/train", "global_batch_size": BATCH},
            "scaling": {"workers": 1},
            "optim": {"embeddings": {"name": "adagrad", "lr": 0.1}},
            "plan": {"tables": {"t": {"sharding": "table_wise", "kernel": "fused_uvm_caching"}}},
        }
    )


def _train(step, here: Here) -> None:
    """Ids that come back, so that a cache helps, and others, so that rows leave it."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from raytrec.data.batch import Batch

    generator = torch.Generator().manual_seed(0)

    def batches():
        for _ in range(STEPS):
            ids = (
                (torch.rand(4 * BATCH, generator=generator) ** 4 * TABLE_ROWS)
                .long()
                .clamp(max=TABLE_ROWS - 1)
            )
            sparse = KeyedJaggedTensor(["f"], ids, lengths=torch.full((BATCH,), 4, dtype=torch.int32))
            labels = torch.randint(0, 2, (BATCH, 1), generator=generator).float()
            batch = Batch(
                torch.randn(BATCH, 1, generator=generator), sparse, labels, torch.ones(BATCH), BATCH
            )
            yield batch.pin_memory()

    for _ in step.train(batches(), STEPS):
        pass


def _lookup(kernel, ids):
    """Rows as a forward gives them, one id a bag."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    with torch.no_grad():
        return kernel(
            KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids), dtype=torch.int32, device=ids.device))
        )


def _check_locked_memory(here: Here, tensors) -> None:
    import torch

    from raytrec.checkpoint.save import Saver
    from raytrec.sections import CheckpointSection

    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    saver = Saver(str(here.folder / "checkpoints"), CheckpointSection(every_s=None))
    saver.save(1, tensors, {})
    saved = saver.taken()
    assert saved.error is None, str(saved.error)
    locked = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) - before
    size = sum(_bytes(value) for value in tensors.values())
    here.found |= {"state_mib": size >> 20, "locked_mib": locked >> 20, "save_s": saved.seconds}
    assert locked <= MOST * size + (16 << 20), (
        f"{locked >> 20} MiB of host memory locked for {size >> 20} MiB"
    )


def _bytes(value) -> int:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    parts = [s.tensor for s in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
    return sum(part.numel() * part.element_size() for part in parts)
