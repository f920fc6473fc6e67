"""DIEN against its equations, one row and one step at a time, in plain torch."""

import pytest
import torch
from for_a_target import DIM, assert_learns, assert_rows_alone, inputs, layers, make, past, prelu, schema
from torch.nn.functional import logsigmoid

from raytrec.common.errors import ConfigError
from raytrec.config.models import SECTIONS
from raytrec.config.schema import Schema
from raytrec.models import build_model


def step(w, names, x, h, weight=1.0):
    """Equations 2 to 5, and with a weight 7 to 9: u, r, h̃, h. Weights of r, u and h̃ are below each other, as
    torch has them; with its weights, the sigmoid is the share that is kept, 1 − u."""
    given = (w[names[0]] @ x + w[names[1]]).chunk(3)
    from_h = (w[names[2]] @ h + w[names[3]]).chunk(3)
    r, u = torch.sigmoid(given[0] + from_h[0]), 1 - torch.sigmoid(given[1] + from_h[1])
    candidate = torch.tanh(given[2] + r * from_h[2])
    return (1 - weight * u) * h + weight * u * candidate


EXTRACTOR = [f"extractor.{kind}_l0" for kind in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")]
EVOLUTION = [f"evolution.cell.{kind}" for kind in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")]


def interests(w, past, target):
    """(the state after each id, the oldest first; the last state of AUGRU)."""
    states, h = [], torch.zeros(DIM)
    for e in past:
        h = step(w, EXTRACTOR, e, h)
        states.append(h)
    last = torch.zeros(DIM)
    if states:
        weights = torch.stack([h @ w["attention.weight"] @ target for h in states]).softmax(0)
        for h, a in zip(states, weights, strict=True):
            last = step(w, EVOLUTION, h, last, a)
    return states, last


@pytest.mark.parametrize("outputs,weight", [(1, None), (1, 0.25), (2, 1.0)])
def test_equations(outputs, weight):
    of = schema(negatives=weight is not None)
    keys = {"negatives": "negatives", "auxiliary_weight": weight} if weight else {}
    model = make("dien", of, outputs, top_mlp=[10, 4], **keys)
    dense, found = inputs(of)
    given, w = model(dense, found), dict(model.named_parameters())
    of_sequence = {k.removeprefix("interests.0."): v for k, v in w.items()}
    for i in range(len(dense)):
        ids = past(found, i)[::-1]
        states, interest = interests(of_sequence, ids, found["item"][i])
        x = torch.cat([dense[i], found["user"][i], interest, found["item"][i], found["tags"][i]])
        x = layers(w, "top", x, 2, 2, lambda name: prelu(w[f"{name}.weight"]))
        expected = w["logit.weight"] @ x + w["logit.bias"]
        if weight:
            drawn, own = past(found, i, "negatives"), torch.zeros(())
            for t in range(len(ids) - 1):
                if (k := len(ids) - 2 - t) < len(drawn):  # of id t + 1, which k are more recent than
                    own = (
                        own
                        - logsigmoid(states[t] @ ids[t + 1])
                        - (1 - torch.sigmoid(states[t] @ drawn[k])).log()
                    )
            expected = torch.cat([expected, weight * own.reshape(1)])
        torch.testing.assert_close(given[i].reshape(-1), expected, rtol=1e-4, atol=1e-5)
    assert given.shape == ((6,) if outputs == 1 and not weight else (6, outputs + bool(weight)))
    if weight:
        assert given[2:, -1].all() and not given[:2, -1].any()
        assert not model.eval()(dense, found)[:, -1].any()


def test_rows_alone_and_what_it_learns():
    of = schema(negatives=True)
    model = make("dien", of, negatives="negatives")
    assert_rows_alone(model, *inputs(of))
    assert_learns(model, *inputs(of))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model(*inputs(of))).all()


def test_empty_sequences_have_no_interests():
    of = schema(dense=[], negatives=True)
    model, (dense, found) = make("dien", of, negatives="negatives"), inputs(of, lengths=(0, 0), counts=(5, 5))
    interest, _ = model.interests[0](found["history"], found["item"])
    assert not interest.any()
    model(dense, found).sum().backward()
    assert not found["history"].vectors.grad.any() and not found["negatives"].vectors.grad.any()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_refused():
    elsewhere = schema(negatives=True).model_dump()
    elsewhere["sparse"]["negatives"]["table"] = "tag"
    for of, negatives, says in [
        (schema(negatives=True), "negativs", "did you mean 'negatives'"),
        (schema(), "tags", "pooled by its mean"),
        (Schema.parse(elsewhere, "test"), "negatives", "looks up table tag, and no sequence does"),
        (schema(), "history", "no sequence"),
    ]:
        with pytest.raises(ConfigError, match=says):
            build_model(of, SECTIONS["dien"].model_validate({"name": "dien", "negatives": negatives}))
