"""A single rank needs no agreement and no averaging; and what seeds a step."""

import loop
import torch
from ranks import on_ranks
from torch.profiler import ProfilerActivity, profile

from raytrec.worker.step import seed_of


def all_reduces(rank, world, folder):
    """all_reduces of ordinary steps; what is drawn at random in the last one, and what its seed gives."""
    made = loop.make(rank, world, 8, ["train.log_every_steps=100", "checkpoint.every_s=null"], folder)
    found = []
    made.observers.begin()
    steps = made.step.train(made.batches, 6)
    for outputs in (next(steps) for _ in range(4)):
        made.progress.count(loop.ROWS, outputs)
        made.observers.after_step(loop.ROWS)
        made.checkpoints.after_step(outputs)
    hook = made.step.model.register_forward_pre_hook(lambda *_: found.append(torch.rand(3).tolist()))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for outputs in steps:
            made.progress.count(loop.ROWS, outputs)
            made.observers.after_step(loop.ROWS)
            made.checkpoints.after_step(outputs)
    hook.remove()
    torch.manual_seed(seed_of(3, made.step.trained - 1, rank))
    drawn = torch.rand(3).tolist()
    names = [event.key for event in profiled.key_averages() for _ in range(event.count)]
    return names.count("c10d::allreduce_"), found[-1], drawn


def test_one_rank_averages_no_gradient_and_agrees_with_itself(tmp_path):
    [(count, drawn, expected)] = on_ranks(1, all_reduces, str(tmp_path))
    assert count == 0
    assert drawn == expected


def test_two_ranks_do_both_at_each_step(tmp_path):
    (count, drawn, expected), (_, other, _) = on_ranks(2, all_reduces, str(tmp_path))
    assert count >= 4
    assert drawn == expected != other
