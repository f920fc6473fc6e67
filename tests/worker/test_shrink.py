"""Held-out rows decide how much of a model's deep part is kept, on all ranks alike."""

import pytest
import torch
from ranks import on_ranks
from small import SCHEMA, batches, build, config

SECTION = {"name": "wide_deep", "deep_dropout": 0.5, "top_mlp": [6]}


class Held:
    """Batches in the place of a Stream."""

    may_skip = False

    def __init__(self, local, rows):
        self.local, self.dataset = local, type("Data", (), {"rows": rows, "uri": "held"})

    def batches(self):
        return iter(self.local)


def shrunk(rank, world, scale, average):
    """(the factor, the weights before and after) with labels drawn from the linear part plus scale × deep."""
    from raytrec.metrics.selection import Selection
    from raytrec.worker.evaluate import can_shrink, evaluate, evaluate_shrunk, shrink

    settings = config(
        world, {"sharding_type": "row_wise"}, model=SECTION, **({"ema": 0.9} if average else {})
    )
    step = build(settings, SCHEMA)
    weight = step.head.model.logit.weight
    _, local = batches(20, rank, world, "equal", schema=SCHEMA)
    with torch.no_grad():
        torch.manual_seed(0)
        weight.copy_(torch.randn_like(weight) * 20)
        kept = weight.clone()
        weight.mul_(scale)
        for batch, outputs in zip(local, step.evaluate(iter(local)), strict=True):
            (task,) = outputs.tasks.values()
            batch.labels[:, 0] = task.predictions
        weight.copy_(kept)
    selection = Selection.from_config(settings, SCHEMA)
    if not can_shrink(step):
        return None
    held = Held(local, 240)
    figures, _, factor = evaluate_shrunk(step, held, torch.device("cpu"), selection)
    assert torch.equal(weight, kept)
    shrink(step, factor)
    assert evaluate(step, held, torch.device("cpu"), selection)[0]["ne"] == figures["ne"]
    return factor, kept, weight.detach().clone()


@pytest.mark.parametrize(("scale", "expected"), [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0), (3.0, 1.0)])
def test_the_deep_part_is_scaled_as_held_out_rows_want_it(scale, expected):
    for factor, before, after in on_ranks(2, shrunk, scale, False):
        assert factor == expected
        assert torch.equal(after, before * expected)


def test_an_averaged_model_is_left_as_it_is():
    assert on_ranks(1, shrunk, 0.0, True) == [None]


def begun(rank, world):
    """The bias that a new model begins with, and the first loss of a batch."""
    from raytrec.worker.build import begin

    settings = config(world, {"sharding_type": "row_wise"}, model=SECTION)
    step = build(settings, SCHEMA)
    begin(step, settings, SCHEMA, (-3.25,))
    return step.head.model.logit.bias.tolist()


def test_a_new_run_begins_with_the_log_odds():
    assert on_ranks(2, begun) == [[-3.25], [-3.25]]
