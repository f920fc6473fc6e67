"""The pipeline for cached tables trains like the plain one, and evaluation has no side effects."""

import pytest
import torch
from ranks import run_on_ranks
from small import assert_same_state, build_step_on_rank, copy_local_state, make_batches, make_small_config, train_step


def run_steps(rank, world, plan):
    """Run four training steps, an evaluation and three training steps."""
    settings = make_small_config(world, plan, "adagrad", max_grad_norm=0.1)
    step = build_step_on_rank(settings, device=torch.device("cuda", rank))
    _, local = make_batches(7, rank, world)
    local = [batch.pin_memory() for batch in local]
    pipeline = step._pipeline
    logits, locks = [], []
    for part in (local[:4], None, local[4:]):
        for outputs in step.evaluate(iter(local)) if part is None else step.train(iter(part), len(part)):
            logits.append(outputs["y"].logits.tolist())
            locks.append([kernel.lock_cache_line for kernel in getattr(pipeline, "_kernels", [])])
    names = {name for name, seconds in step.phases.take().items() if seconds > 0}
    return type(pipeline).__name__, logits, copy_local_state(step), locks, names


@pytest.mark.slow
def test_prefetching_does_not_change_results():
    plans = ({"sharding_type": "row_wise", "compute_kernel": kernel} for kernel in ("fused", "fused_uvm_caching"))
    plain, prefetching = (run_on_ranks(2, run_steps, plan, device="cuda") for plan in plans)
    for (kind, logits, state, _, _), (other, same, others, locks, phases) in zip(plain, prefetching, strict=True):
        assert kind == "TimedPipeline" and other == "TimedPrefetchPipeline"
        assert same == logits
        assert_same_state(state, others)
        # Rows are locked in the cache until backward; an evaluation has no backward pass.
        assert locks == [[True]] * 4 + [[False]] * 7 + [[True]] * 3
        assert phases >= {"data", "copy", "input_exchange", "forward", "backward", "optimizer"}


def record_stream_order(rank, world):
    """Record the order of stream work around steps.

    Return, for each step, whether its prefetch into the cache has finished; and for each prefetch, whether it
    started after the work between steps and after all earlier work.
    """
    from standin import StandInGpu

    gpu = StandInGpu.active
    plan = {"sharding_type": "row_wise", "compute_kernel": "fused_uvm_caching"}
    step = build_step_on_rank(make_small_config(world, plan), device=torch.device("cuda", rank))
    pipeline, kernel, flushed_at = step._pipeline, step._pipeline._kernels[0], [0.0]
    bring, settled, after_flush, after_all = kernel.prefetch, [], [], []

    def slowly(*args, **options):
        after_flush.append(gpu.stream.done_at >= flushed_at[0])
        after_all.append(gpu.stream.done_at >= gpu.default_stream.done_at)
        gpu.work(0.05)
        return bring(*args, **options)

    kernel.prefetch = slowly
    step.model.module.head.register_forward_hook(lambda *_: gpu.work(0.1))
    _, local = make_batches(4, rank, world)
    for outputs in (step.train(iter(local), 4), step.evaluate(iter(local))):
        for _ in outputs:
            settled.append(gpu.default_stream.done_at >= pipeline._prefetch_stream.done_at)
            gpu.work(0.2)  # a flush
            flushed_at[0] = gpu.default_stream.done_at
    return settled, after_flush, after_all[:4], after_all[4:]


def test_cache_prefetch_is_complete_between_steps():
    ((settled, after_flush, training, evaluating),) = run_on_ranks(1, record_stream_order, device="cuda")
    assert settled == [True] * 8
    assert after_flush == [True] * 8
    assert training == [True, False, False, False]  # during forward
    assert evaluating == [True] * 4


def count_updates(rank, world):
    """Return the number of updates counted by FBGEMM, on the device and on the host."""
    step = build_step_on_rank(make_small_config(world, {"sharding_type": "row_wise"}, "rowwise_adagrad"))
    from raytrec.compat.torchrec_ import iterate_sharded_kernels

    kernels = [kernel.emb_module for kernel in iterate_sharded_kernels(step.model)]

    def now():
        return [(int(kernel.iter), int(kernel.iter_cpu)) for kernel in kernels]

    _, local = make_batches(4, rank, world)
    train_step(step, local)
    trained, seen = now(), 0
    for _ in step.evaluate(iter(local)):
        seen += 1
    after = now()
    for _ in step.evaluate(iter(local)):
        break  # an aborted evaluation
    return trained, after, now(), seen


def test_evaluation_does_not_count_updates():
    for trained, after, given_up, seen in run_on_ranks(2, count_updates):
        assert seen == 4
        assert trained == after == given_up == [(4, 4)]


def find_fused_flags(rank, world, device):
    """Return the `fused` flags of the dense optimizer's groups; None means that torch chooses."""
    step = build_step_on_rank(make_small_config(world, {}), device=torch.device(device))
    return {group.get("fused") for group in step.optimizer.param_groups if "foreach" in group}


def test_gpu_dense_layers_use_fused_optimizer():
    assert run_on_ranks(1, find_fused_flags, "cuda:0", device="cuda") == [{True}]
    assert run_on_ranks(1, find_fused_flags, "cpu") == [{None}]
