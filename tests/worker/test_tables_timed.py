"""What belongs to tables, to the dense model and to waiting in a step on real ranks, by pauses in it."""

from time import sleep

import pytest
import small
from ranks import on_ranks

STEPS, PAUSE_S = 3, 0.1


def phases_of_steps(rank, world, pause, sharding):
    """Seconds of each phase of some steps on this rank; `pause(rank, step)` slows something down."""
    step = small.build(small.config(world, {"sharding_type": sharding}))
    _, local = small.batches(STEPS + 1, rank, world)
    small.train(step, local[:1])  # sets everything up
    step.phases.take()
    pause(rank, step)
    small.train(step, local[1:])
    return step.phases.take()


def kernels(step):
    from raytrec.compat.torchrec_ import replicated_kernels, sharded_kernels

    return [*sharded_kernels(step.model), *replicated_kernels(step.model)]


def in_lookups(rank, step):
    """In a kernel's forward, and again in its part of backward."""
    kernel = kernels(step)[0].emb_module
    forward = kernel.forward

    def slow(*args, **options):
        sleep(PAUSE_S)
        pooled = forward(*args, **options)
        pooled.grad_fn.register_hook(lambda *_: sleep(PAUSE_S))
        return pooled

    kernel.forward = slow


def in_dense_backward(rank, step):
    """On rank 1 alone, which rank 0 waits for: in the dense layers' all-reduce, as all is data-parallel."""
    if rank == 1:
        head = step.model.module.head
        head.register_full_backward_pre_hook(lambda *_: sleep(PAUSE_S))


@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_lookups_and_their_part_of_backward_belong_to_tables(sharding):
    for seconds in on_ranks(1, phases_of_steps, in_lookups, sharding):
        assert seconds["tables"] > 1.9 * STEPS * PAUSE_S
        assert seconds["forward"] + seconds["backward"] < STEPS * PAUSE_S


def test_waiting_for_the_all_reduce_of_dense_gradients_belongs_to_collectives():
    waiting, slow = on_ranks(2, phases_of_steps, in_dense_backward, "data_parallel")
    assert waiting["collectives"] > 0.8 * STEPS * PAUSE_S > waiting["backward"]
    assert slow["backward"] > 0.9 * STEPS * PAUSE_S > slow["collectives"]
