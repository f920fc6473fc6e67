"""Tests that both sides of `make bench-sequences` (raytrec, plain torch) train the same model."""

import hstu_rank
import pytest
from next_item import ML1M, build_plain, build_raytrec
from ranks import run_on_ranks


def train_both_sides(rank, world, shape):
    """Return the losses of the first 6 steps, [raytrec, plain torch], from equal weights without dropout."""
    import torch

    from raytrec.embeddings.tables import tables

    (ours, batches), (plain, padded) = build_raytrec(shape, 0, 1), build_plain(shape)
    dense = ours.head.model.state_dict()
    with torch.no_grad():
        (table,) = tables(ours.model).values()
        plain.model.items.weight[:-1] = table.weight.dense()
        plain.model.positions.weight.copy_(dense.pop("positions"))
        own = [v for name, v in plain.model.named_parameters() if name not in TABLE_PARAMETERS]
        order = (
            sasrec_parameter_names(shape["blocks"])
            if shape["model"] == "sasrec"
            else hstu_parameter_names(shape["blocks"])
        )
        for name, weight in zip(order, own, strict=True):
            weight.copy_(dense.pop(name))
    assert not dense, dense.keys()
    return [[float(out.loss) for out in ours.train(batches, 6)], [float(loss) for loss in plain.train(padded, 6)]]


TABLE_PARAMETERS = {"items.weight", "positions.weight"}


def sasrec_parameter_names(blocks):
    parts = "norms.0", "norms.1", "attention.inputs", "attention.output", "network.0", "network.3"
    names = [f"blocks.{block}.{part}" for block in range(blocks) for part in parts] + ["norm"]
    return [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]


def hstu_parameter_names(blocks):
    parts = "distances", "inputs.weight", "output.weight", "output.bias"
    return [f"layers.{block}.{part}" for block in range(blocks) for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sasrec", "hstu"])
@pytest.mark.parametrize("share_negatives", [False, True])
def test_raytrec_and_plain_torch_have_equal_losses(model, share_negatives):
    more = {"model": model, "share_negatives": share_negatives, "items": 3000}
    shape = ML1M | more | {"rows": 6, "negatives": 3, "dropout": 0.0}
    ((ours, plain),) = run_on_ranks(1, train_both_sides, shape)
    assert ours == pytest.approx(plain, rel=1e-4, abs=1e-5)


PLAIN_NAMES = {
    "context_layers.0.": "context.",
    "actions.encoder.": "action_encoder.",
    "towers.towers.0.0.": "tower.0.",
    "towers.logits.0.": "tower.3.",
}


def train_rankers(rank, world, shape):
    """Return the losses of the first 6 steps, [raytrec, plain torch], from equal weights without dropout."""
    from raytrec.embeddings.tables import tables

    (ours, batches), (plain, padded) = hstu_rank.build_raytrec(shape, 0, 1), hstu_rank.build_plain(shape)
    weights = {f"{name}s.weight": table.weight.dense().clone() for name, table in tables(ours.model).items()}
    for name, value in ours.head.model.state_dict().items():
        for own, other in PLAIN_NAMES.items():
            name = name.replace(own, other)
        weights[name] = value.clone()
    plain.model.load_state_dict(weights)
    return [[float(out.loss) for out in ours.train(batches, 6)], [float(loss) for loss in plain.train(padded, 6)]]


@pytest.mark.slow
def test_rankers_of_raytrec_and_plain_torch_have_equal_losses():
    shape = hstu_rank.SHAPE | {"items": 3000, "rows": 6, "dropout": 0.0}
    ((ours, plain),) = run_on_ranks(1, train_rankers, shape)
    assert ours == pytest.approx(plain, rel=1e-4, abs=1e-5)
