"""mf, ncf and two_tower, which score one user and one item, compared with their equations row by row."""

import pytest
import torch
from made import (
    DIM,
    ROWS,
    apply_linear,
    assert_learns,
    assert_rows_independent,
    get_id_vectors,
    inputs,
    layers,
    loss,
    normalize_vectors,
    schema,
    weights,
)
from made import make as make_model

SCHEMA = schema("user", "item", "history", "negatives", dense=())
DRAWN = {"negatives": "negatives", "max_negatives": 3}
TOWERS = {"query": ["user", "history"], "item": ["item"]}
KINDS = ["softmax", "bce", "bpr"]


def make(name, outputs=1, vectors=False, **keys):
    return make_model(name, SCHEMA, outputs, vectors=vectors, **DRAWN | keys)


def assert_scores(model, dense, found, kind, score):
    """Check the scores, and the model's own loss against the scores of the negatives."""
    given = model(dense, found)
    for i in range(ROWS):
        user, item = found["user"][i], found["item"][i]
        torch.testing.assert_close(given[i, 0], score(user, item))
        others = [score(user, other) for other in get_id_vectors(found, i, "negatives")]
        torch.testing.assert_close(given[i, 1], loss(kind, score(user, item), others))
    assert_rows_independent(model, dense, found)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_mf_matches_its_equations(kind, bias):
    model, (dense, found) = make("mf", loss=kind, bias=bias), inputs(SCHEMA)

    def score(user, item):
        if not bias:
            return user @ item
        return user[:-1] @ item[:-1] + user[-1] + item[-1] + model.bias[0]

    assert_scores(model, dense, found, kind, score)
    query, item = model.query(dense, {"user": found["user"]}), model.item(dense, {"item": found["item"]})
    apart = found["user"][:, -1] + model.bias if bias else torch.zeros(ROWS)
    torch.testing.assert_close(model(dense, found)[:, 0] - (query * item).sum(1), apart)
    assert_learns(model, dense, found, unused=("history",))


@pytest.mark.parametrize("name", ["mf", "ncf"])
def test_softmax_loss_does_not_train_the_bias(name):
    """The gradient is exactly 0 for losses that compare scores."""
    model, (dense, found) = make(name, loss="softmax"), inputs(SCHEMA)
    model(dense, found)[:, 1].sum().backward()
    assert model.bias.grad.tolist() == [0.0]


# Model keys of each variant, and the number of embedding columns for the products.
PARTS = {
    "parted": ({}, 4),
    "first": ({"gmf_dim": 2}, 2),
    "mlp": ({"gmf_dim": 0}, 0),
    "gmf": ({"gmf_dim": 8}, 8),
    "shared": ({"shared": True}, 8),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", PARTS)
def test_ncf_matches_its_equations(kind, parts):
    keys, first = PARTS[parts]
    model, (dense, found) = make("ncf", loss=kind, mlp=[6, 5], **keys), inputs(SCHEMA)
    w = weights(model)

    def score(user, item):
        own = (user, item) if parts == "shared" else (user[first:], item[first:])
        products = [user[:first] * item[:first]]
        if parts != "gmf":
            products.append(apply_linear(w, "mlp.2", apply_linear(w, "first", torch.cat(own)).relu()).relu())
        return w["logit.weight"][0] @ torch.cat(products) + w["bias"][0]

    assert_scores(model, dense, found, kind, score)
    assert not model.eval()(dense, found)[:, 1].any()


@pytest.mark.parametrize("outputs,vectors", [(1, False), (0, True), (1, True), (2, True)])
@pytest.mark.parametrize("normalize", [False, True])
def test_two_tower_matches_its_equations(outputs, vectors, normalize):
    of = schema("user", "item", "tags", "history")
    towers = {"query": ["user", "age", "hist*"], "item": ["item", "tags", "price"]}
    keys = {"towers": towers, "tower_mlp": [6, 3], "normalize": normalize}
    model, (dense, found) = make_model("two_tower", of, outputs, vectors=vectors, **keys), inputs(of)
    found["history"] = torch.randn(ROWS, DIM)
    of_query = torch.cat([dense[:, :1], found["user"], found["history"]], 1)
    of_item = torch.cat([dense[:, 1:], found["item"], found["tags"]], 1)
    query, item = (
        apply_linear(w, "last", layers(w, "hidden", x, 1))
        for w, x in ((weights(model, "towers.query."), of_query), (weights(model, "towers.item."), of_item))
    )
    query = query.view(ROWS, outputs + vectors, 3)
    if normalize:
        query, item = normalize_vectors(query), normalize_vectors(item)
    # Each tower needs only its own features.
    alone = model.query(dense, {f: found[f] for f in ("user", "history")})
    torch.testing.assert_close(alone.view(query.shape), query)
    torch.testing.assert_close(model.item(dense, {f: found[f] for f in ("item", "tags")}), item)
    given, scale = model(dense, found).view(ROWS, -1), model.scale.view(-1)
    for place in range(outputs):
        expected = scale[place] * (query[:, place] * item).sum(1) + model.bias.view(-1)[place]
        torch.testing.assert_close(given[:, place], expected)
    if vectors:
        torch.testing.assert_close(given[:, outputs:], torch.cat([scale[-1] * query[:, -1], item], 1))
    assert len(weights(model)) == 9 + (outputs > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs,vectors", [(1, False), (0, True), (2, True)])
def test_two_tower_with_negatives_matches_its_equations(kind, outputs, vectors):
    keys = {"towers": TOWERS, "tower_mlp": [6, 4], "normalize": True, "temperature": 0.4, "loss": kind}
    model = make("two_tower", outputs, vectors, learn_temperature=False, **keys)
    dense, found = inputs(SCHEMA)
    found["history"] = found["history"].vectors.sum(1)
    given, place = model(dense, found), outputs  # column of the model's own loss
    queries = model.query(dense, found).view(ROWS, -1, 4)
    query = queries[:, max(outputs, 1) - 1]
    bias = model.bias.view(-1)[-1] if outputs and kind == "bce" else 0
    for i in range(ROWS):
        own = query[i] @ model.item(dense, found)[i] / 0.4 + bias
        drawn = get_id_vectors(found, i, "negatives")
        items = [model.item(dense, {"item": other.unsqueeze(0)})[0] for other in drawn]
        others = [query[i] @ item / 0.4 + bias for item in items]
        torch.testing.assert_close(given[i, place], loss(kind, own, others))
    if vectors:
        item = model.item(dense, {"item": found["item"]})
        torch.testing.assert_close(given[:, outputs + 1 :], torch.cat([queries[:, -1] / 0.4, item], 1))
    assert "scale" not in weights(model) and "scale" not in model.state_dict()
    assert not model.eval()(dense, found)[:, place].any()


def test_two_tower_negatives_train_all_parameters():
    model, (dense, found) = (make("two_tower", towers=TOWERS, tower_mlp=[6, 4], temperature=0.5), inputs(SCHEMA))
    mean = {**found, "history": found["history"].vectors.mean(1)}
    model(dense, mean)[:, 1].sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad.any() for name, p in model.named_parameters() if name != "bias")
