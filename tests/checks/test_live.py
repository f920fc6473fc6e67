"""Faults brought into real training loops: the named check finds each within one interval, and says where.

Every fault comes after step 4, and checks follow step 6: of the two batches between, the pipeline has already
exchanged the ids of the first.
"""

from dataclasses import replace

import pytest
from loops import failed, loop
from ranks import on_ranks

ROW_WISE, COPIES = {"sharding": "row_wise"}, {"sharding": "data_parallel"}


def the_one(answers, check, step=6):
    """The text of the check that found it, which is the only one to fail at that step."""
    found = [o for o in failed(answers) if o["step"] == step]
    assert found and {o["check"] for o in found} == {check}, found
    assert [o["step"] for o in failed(answers)][0] == step, "found before it was there"
    return found[0]["text"]


def flip(tensor, bit=0):
    """Changes one bit of the last value."""
    import torch

    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.view(-1)[-1:].view(kind).bitwise_xor_(1 << bit)


def flip_dense(scene):
    if scene.rank == 1:
        flip(scene.state.dense["dense/head.model.top.0.weight/value"])


def flip_adam(scene):
    if scene.rank == 1:
        flip(scene.state.dense["dense/head.model.top.0.weight/exp_avg_sq"])


def flip_copy(scene):
    if scene.rank == 1:
        flip(scene.state.tables["tag"].weight.local[0].values)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "fault,name,dense",
    [
        (flip_dense, "dense/head.model.top.0.weight/value", "sgd"),
        (flip_adam, "dense/head.model.top.0.weight/exp_avg_sq", "adam"),
        (flip_copy, "tables/tag/weight", "sgd"),
    ],
)
def test_a_bit_of_a_replica(world, fault, name, dense):
    answers = on_ranks(world, run, COPIES, fault, {"dense": dense})
    found = failed(answers, "replicas")
    assert found[0]["step"] == 6 and f"{name} on rank 1 is not" in found[0]["text"]


def run(rank, world, plan, fault, settings):
    return loop(rank, world, plan, fault, **settings)
