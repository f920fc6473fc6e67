"""SASRec against its equations, one row and one item at a time."""

import pytest
import torch
from drawn_items import LENGTH, ROWS, assert_alone, assert_learns, drawn, inputs, loss, make, past, schema
from torch.nn.functional import layer_norm

from raytrec.common.errors import ConfigError

SIZES = {"max_length": LENGTH, "dropout": 0.0}


def states(model, past_TD, heads=1, positions="recency"):
    """The state after each item, [T, D]."""
    w, count, dim = dict(model.named_parameters()), len(past_TD), past_TD.shape[1]
    places = range(count) if positions == "order" else range(count - 1, -1, -1)
    x = torch.stack([e * dim**0.5 + w["positions"][p] for e, p in zip(past_TD, places, strict=True)])
    for i in range(len(model.blocks)):
        of = {k.removeprefix(f"blocks.{i}."): v for k, v in w.items()}
        n = layer_norm(x, (dim,), of["norms.0.weight"], of["norms.0.bias"])
        q, k, v = (n @ of["attention.inputs.weight"].T + of["attention.inputs.bias"]).split(dim, 1)
        read, size = [], dim // heads
        for t in range(count):
            parts = []
            for h in range(heads):
                own = slice(h * size, (h + 1) * size)
                weights = torch.stack([q[t, own] @ k[s, own] / size**0.5 for s in range(t + 1)]).softmax(0)
                parts.append(sum(a * v[s, own] for s, a in enumerate(weights)))
            read.append(torch.cat(parts))
        x = x + torch.stack(read) @ of["attention.output.weight"].T + of["attention.output.bias"]
        n = layer_norm(x, (dim,), of["norms.1.weight"], of["norms.1.bias"])
        hidden = (n @ of["network.0.weight"].T + of["network.0.bias"]).relu()
        x = x + hidden @ of["network.3.weight"].T + of["network.3.bias"]
    return layer_norm(x, (dim,), w["norm.weight"], w["norm.bias"])


def unit(x, normalize):
    return x / x.square().sum(-1, keepdim=True).sqrt() if normalize else x


@pytest.mark.parametrize(
    "kind,keys",
    [
        ("softmax", {"heads": 2, "feedforward": 6}),
        ("bce", {"positions": "order"}),
        ("bpr", {"normalize": True, "temperature": 0.3, "blocks": 1}),
    ],
)
def test_equations(kind, keys):
    model = make("sasrec", loss=kind, **SIZES, **keys)
    dense, found = inputs()
    given, temperature, cosine = model(dense, found), keys.get("temperature", 1), keys.get("normalize", False)
    for i in range(ROWS):
        history, item = past(found, i), unit(found["item"][i], cosine)
        if not len(history):
            assert given[i].tolist() == [0, 0] and not model.query(dense, found)[i].any()
            continue
        after = unit(states(model, history, keys.get("heads", 1), keys.get("positions", "recency")), cosine)
        torch.testing.assert_close(model.query(dense, found)[i], after[-1])
        torch.testing.assert_close(given[i, 0], after[-1] @ item / temperature)
        following = [*unit(history[1:], cosine), item]
        others = [list(unit(drawn(found, i), cosine) @ state / temperature) for state in after]
        own = [state @ e / temperature for state, e in zip(after, following, strict=True)]
        total = sum(loss(kind, s, o) for s, o in zip(own, others, strict=True))
        torch.testing.assert_close(given[i, 1], total / LENGTH)
    torch.testing.assert_close(model.item(dense, {"item": found["item"]}), unit(found["item"], cosine))


def test_rows_are_alone_and_everything_learns():
    model = make("sasrec", **SIZES, heads=2)
    dense, found = inputs()
    assert_alone(model, dense, found)
    assert_learns(model, dense, found, unused=("user",))
    assert not found["history"].vectors.grad[~found["history"].present].any()


def test_evaluations_have_no_loss_and_batches_without_histories_no_nan():
    model = make("sasrec", **SIZES)
    dense, found = inputs()
    assert not model.eval()(dense, found)[:, 1].any()
    dense, found = inputs(lengths=(0, 0), counts=(0, 3))
    given = model.train()(dense, found)
    given.sum().backward()
    assert not given.any() and all(p.grad.isfinite().all() for p in model.parameters())


def test_several_outputs_and_vectors():
    model = make("sasrec", 2, True, **SIZES, temperature=0.5)
    dense, found = inputs()
    given, query, item = model(dense, found), model.query(dense, found), model.item(dense, found)
    assert given.shape == (ROWS, 2 + 1 + 2 * 8) and query.shape == (ROWS, 3, 8)
    torch.testing.assert_close(given[:, 1], (query[:, 1] * item).sum(1) / 0.5)
    torch.testing.assert_close(given[:, 3:], torch.cat([query[:, 2] / 0.5, item], 1))
    # The own loss is of the last output's query, not of the vectors'.
    given[:, 2].sum().backward()
    assert model.queries.weights.grad.any(1).tolist() == [False, True, False]
    assert make("sasrec", negatives=None, **SIZES)(dense, found).shape == (ROWS,)


def test_dropout_of_attention():
    model = make("sasrec", max_length=LENGTH, dropout=0.0, attention_dropout=0.5)
    dense, found = inputs()
    assert not torch.equal(model(dense, found), model(dense, found))
    assert torch.equal(model.eval()(dense, found), model(dense, found))


SPARSE = schema().model_dump()["sparse"]


@pytest.mark.parametrize(
    "keys,changes,message",
    [
        ({"history": "histroy"}, {}, "did you mean 'history'"),
        ({"item": "itm"}, {}, "did you mean 'item'"),
        ({"negatives": "negative"}, {}, "did you mean 'negatives'"),
        ({"history": "user"}, {}, "pooled by its sum"),
        ({"item": "user"}, {}, "'history' looks up table item, and 'user' table user"),
        ({"heads": 3}, {}, "the dim of table item is 8"),
        ({}, {"sparse": SPARSE | {"negatives": {"table": "user", "pooling": "sequence"}}}, "table user"),
    ],
)
@pytest.mark.parametrize("name", ["sasrec", "hstu"])
def test_refused(name, keys, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(name, of=schema(**changes), **keys)
