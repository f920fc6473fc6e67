"""HSTU against its equations, one row and one pair of items at a time."""

import pytest
import torch
from drawn_items import (
    LENGTH,
    LENGTHS,
    ROWS,
    assert_alone,
    assert_learns,
    drawn,
    inputs,
    loss,
    make,
    past,
    schema,
)
from torch.nn.functional import layer_norm, silu

from raytrec.common.errors import ConfigError

SIZES = {"max_length": LENGTH, "dropout": 0.0}


def states(model, past_TD, heads, times=None, positions="recency"):
    """The state after each item, [T, D]."""
    w, count, dim = dict(model.named_parameters()), len(past_TD), past_TD.shape[1]
    places = range(count) if positions == "order" else range(count - 1, -1, -1)
    x = torch.stack([e * dim**0.5 + w["positions"][p] for e, p in zip(past_TD, places, strict=True)])
    for i in range(len(model.layers)):
        of = {k.removeprefix(f"layers.{i}."): v for k, v in w.items()}
        width = of["inputs.weight"].shape[0] // 4
        u, v, q, k = silu(layer_norm(x, (dim,)) @ of["inputs.weight"].T).split(width, 1)
        read, size = torch.zeros(count, width), width // heads
        for h in range(heads):
            own = slice(h * size, (h + 1) * size)
            for t in range(count):
                for s in range(t + 1):
                    score = q[t, own] @ k[s, own] + of["distances"][t - s]
                    if times is not None:
                        between = max(float(times[t] - times[s]), 1)
                        place = min(
                            int(torch.tensor(between).double().log() / torch.tensor(1.35).double().log()), 127
                        )
                        score = score + of["times"][place]
                    read[t, own] = read[t, own] + score * torch.sigmoid(score) / LENGTH * v[s, own]
        x = x + (u * layer_norm(read, (width,))) @ of["output.weight"].T + of["output.bias"]
    return x


@pytest.mark.parametrize(
    "keys",
    [
        {"heads": 2},
        {"width": 12, "positions": "order", "normalize": False, "temperature": 1.0},
        {"time": "at"},
    ],
)
def test_equations(keys):
    timed = "time" in keys
    changed = schema().model_dump()["sparse"]
    if timed:
        changed["history"]["side_features"] = ["price", "at"]
    model = make("hstu", of=schema(sparse=changed), **SIZES, **keys)
    cosine, temperature = keys.get("normalize", True), keys.get("temperature", 0.05)
    times = torch.tensor([[1e9, 9.99e8, 9.98e8, 5e8, 0.0]] * ROWS, dtype=torch.float64)
    dense, found = inputs(side_features=torch.stack([times * 0, times], 2) if timed else None)
    given = model(dense, found)
    for i, count in enumerate(LENGTHS):
        if not count:
            assert given[i].tolist() == [0, 0]
            continue
        at = times[i, :count].flip(0) if timed else None
        after = states(model, past(found, i), keys.get("heads", 1), at, keys.get("positions", "recency"))
        item, others, history = found["item"][i], drawn(found, i), past(found, i)
        if cosine:
            after, item, others, history = (
                x / x.square().sum(-1, keepdim=True).sqrt() for x in (after, item, others, history)
            )
        torch.testing.assert_close(model.query(dense, found)[i], after[-1])
        torch.testing.assert_close(given[i, 0], after[-1] @ item / temperature)
        total = 0
        for state, following in zip(after, [*history[1:], item], strict=True):
            total = total + loss(
                "softmax", state @ following / temperature, list(others @ state / temperature)
            )
        torch.testing.assert_close(given[i, 1], total / LENGTH)
    assert_alone(model, dense, found)
    assert_learns(model, dense, found, unused=("user",))


def test_batches_without_histories_have_no_nan():
    model = make("hstu", **SIZES)
    dense, found = inputs(lengths=(0, 0), counts=(0, 3))
    given = model(dense, found)
    given.sum().backward()
    assert not given.any() and all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "keys,message", [({"time": "at"}, "there are none"), ({"width": 6, "heads": 4}, "model.width is 6")]
)
def test_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        make("hstu", **keys)
