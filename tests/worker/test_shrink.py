"""Held-out rows determine the scale of a model's deep part, equally on all ranks."""

import pytest
import torch
from ranks import run_on_ranks
from small import SCHEMA, build_step_on_rank, make_batches, make_small_config

SECTION = {"name": "wide_deep", "deep_dropout": 0.5, "top_mlp": [6]}


class InMemoryStream:
    """Batches in memory, used in place of a Stream."""

    may_skip = False

    def __init__(self, local, rows):
        self.local, self.dataset = local, type("Data", (), {"rows": rows, "uri": "held"})

    def batches(self):
        return iter(self.local)


def run_shrink(rank, world, scale, average):
    """Return (factor, weights before, weights after); labels come from the linear part plus scale × deep part."""
    from raytrec.metrics.selection import Selection
    from raytrec.worker.evaluate import can_shrink, evaluate, evaluate_shrunk, shrink

    settings = make_small_config(world, {"sharding_type": "row_wise"}, model=SECTION, ema=0.9 if average else None)
    step = build_step_on_rank(settings, SCHEMA)
    weight = step.head.model.logit.weight
    _, local = make_batches(20, rank, world, "equal", schema=SCHEMA)
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
    held = InMemoryStream(local, 240)
    figures, _, factor = evaluate_shrunk(step, held, torch.device("cpu"), selection)
    assert torch.equal(weight, kept)
    shrink(step, factor)
    assert evaluate(step, held, torch.device("cpu"), selection)[0]["ne"] == figures["ne"]
    return factor, kept, weight.detach().clone()


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "expected"), [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0), (3.0, 1.0)])
def test_shrink_factor_fits_held_out_rows(scale, expected):
    for factor, before, after in run_on_ranks(2, run_shrink, scale, False):
        assert factor == expected
        assert torch.equal(after, before * expected)


def test_averaged_model_is_not_shrunk():
    assert run_on_ranks(1, run_shrink, 0.0, True) == [None]


def read_initial_bias(rank, world):
    """Return the initial bias of a new model."""
    from raytrec.worker.build import begin

    settings = make_small_config(world, {"sharding_type": "row_wise"}, model=SECTION)
    step = build_step_on_rank(settings, SCHEMA)
    begin(step, settings, SCHEMA, (-3.25,))
    return step.head.model.logit.bias.tolist()


def test_new_run_sets_bias_to_the_log_odds():
    assert run_on_ranks(2, read_initial_bias) == [[-3.25], [-3.25]]
