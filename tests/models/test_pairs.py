"""mf, ncf and two_tower, which score one user and one item, against their equations, row by row."""

import pytest
import torch
from drawn_items import ROWS, assert_alone, assert_learns, drawn, inputs, loss, make, schema

from raytrec.common.errors import ConfigError
from raytrec.config.features import resolve_features
from raytrec.config.models import SECTIONS

TOWERS = {"query": ["user", "history"], "item": ["item"]}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "bce", "bpr"])
def test_matrix_factorisation(kind, bias):
    model = make("mf", loss=kind, bias=bias)
    dense, found = inputs()
    given = model(dense, found)

    def score(user, item):
        if not bias:
            return user @ item
        return user[:-1] @ item[:-1] + user[-1] + item[-1] + model.bias[0]

    for i in range(ROWS):
        user, item = found["user"][i], found["item"][i]
        torch.testing.assert_close(given[i, 0], score(user, item))
        others = [score(user, other) for other in drawn(found, i)]
        torch.testing.assert_close(given[i, 1], loss(kind, score(user, item), others))
    query, item = model.query(dense, {"user": found["user"]}), model.item(dense, {"item": found["item"]})
    apart = found["user"][:, -1] + model.bias if bias else torch.zeros(ROWS)
    torch.testing.assert_close(given[:, 0] - (query * item).sum(1), apart)
    assert_alone(model, dense, found)
    # Where scores are compared, a bias of all of them cancels: exactly, not up to rounding.
    assert_learns(model, dense, {f: found[f] for f in ("user", "item", "negatives")})


def test_a_bias_that_cancels_is_not_learned():
    for name in ("mf", "ncf"):
        model = make(name, loss="softmax")
        dense, found = inputs()
        model(dense, found)[:, 1].sum().backward()
        assert model.bias.grad.tolist() == [0.0]


PARTS = {
    "parted": {},
    "first": {"gmf_dim": 2},
    "mlp": {"gmf_dim": 0},
    "gmf": {"gmf_dim": 8},
    "shared": {"shared": True},
}


@pytest.mark.parametrize("kind", ["softmax", "bce", "bpr"])
@pytest.mark.parametrize("parts", PARTS)
def test_neural_collaborative_filtering(kind, parts):
    model = make("ncf", loss=kind, mlp=[6, 5], **PARTS[parts])
    dense, found = inputs()
    given, w = model(dense, found), dict(model.named_parameters())
    first = {"parted": 4, "first": 2, "mlp": 0, "gmf": 8, "shared": 8}[parts]

    def score(user, item):
        own = (user, item) if parts == "shared" else (user[first:], item[first:])
        last = [user[:first] * item[:first]]
        if parts != "gmf":
            x = torch.cat(own)
            for layer in ("first", "mlp.2"):
                x = (w[f"{layer}.weight"] @ x + w[f"{layer}.bias"]).relu()
            last.append(x)
        return w["logit.weight"][0] @ torch.cat(last) + w["bias"][0]

    for i in range(ROWS):
        user, item = found["user"][i], found["item"][i]
        torch.testing.assert_close(given[i, 0], score(user, item))
        others = [score(user, other) for other in drawn(found, i)]
        torch.testing.assert_close(given[i, 1], loss(kind, score(user, item), others))
    assert_alone(model, dense, found)
    assert not model.eval()(dense, found)[:, 1].any()


@pytest.mark.parametrize("kind", ["softmax", "bce", "bpr"])
@pytest.mark.parametrize("outputs,vectors", [(1, False), (0, True), (2, True)])
def test_two_towers_with_negatives(kind, outputs, vectors):
    keys = {"towers": TOWERS, "tower_mlp": [6, 4], "normalize": True, "temperature": 0.4, "loss": kind}
    model = make("two_tower", outputs, vectors, learn_temperature=False, **keys)
    dense, found = inputs()
    found["history"] = found["history"].vectors.sum(1)
    given, place = model(dense, found), outputs  # of the own loss
    queries = model.query(dense, found).view(ROWS, -1, 4)
    query = queries[:, max(outputs, 1) - 1]
    bias = model.bias.view(-1)[-1] if outputs and kind == "bce" else 0
    for i in range(ROWS):
        own = query[i] @ model.item(dense, found)[i] / 0.4 + bias
        items = [model.item(dense, {"item": other.unsqueeze(0)})[0] for other in drawn(found, i)]
        others = [query[i] @ item / 0.4 + bias for item in items]
        torch.testing.assert_close(given[i, place], loss(kind, own, others))
    if vectors:
        item = model.item(dense, {"item": found["item"]})
        torch.testing.assert_close(given[:, outputs + 1 :], torch.cat([queries[:, -1] / 0.4, item], 1))
    assert "scale" not in dict(model.named_parameters()) and "scale" not in model.state_dict()
    assert not model.eval()(dense, found)[:, place].any()


def test_two_towers_learn_everything_from_negatives():
    model = make("two_tower", towers=TOWERS, tower_mlp=[6, 4], temperature=0.5)
    dense, found = inputs()
    mean = {**found, "history": found["history"].vectors.mean(1)}
    model(dense, mean)[:, 1].sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad.any() for name, p in model.named_parameters() if name != "bias")


def test_only_negatives_are_read_id_by_id():
    for name, keys in {"mf": {}, "ncf": {}, "two_tower": {"towers": TOWERS}}.items():
        section = SECTIONS[name].model_validate(
            {"name": name, "negatives": "negatives", "max_negatives": 7} | keys
        )
        assert resolve_features(schema(), section).sequences == {"negatives": 7}
    section = SECTIONS["sasrec"].model_validate({"name": "sasrec", "max_length": 9})
    assert resolve_features(schema(), section).sequences == {"history": 9}


TABLES = schema().model_dump()["tables"]


@pytest.mark.parametrize(
    "name,keys,changes,message",
    [
        ("mf", {"user": "usr"}, {}, "did you mean 'user'"),
        ("mf", {}, {"tables": TABLES | {"user": {"rows": 3, "dim": 4}}}, "the same dim"),
        ("mf", {"negatives": "user"}, {}, "pooling: sequence"),
        ("ncf", {"gmf_dim": 12}, {}, "12 of each"),
        ("ncf", {"gmf_dim": 2, "shared": True}, {}, "one of the two"),
        ("ncf", {"shared": True}, {"tables": TABLES | {"user": {"rows": 3, "dim": 4}}}, "have 4 numbers"),
        ("two_tower", {"towers": {"query": ["history"], "item": ["item", "user"]}}, {}, "only ids are known"),
        ("two_tower", {"towers": {"query": ["user", "neg*"], "item": ["item"]}}, {}, "matches, 'neg\\*'"),
    ],
)
def test_refused(name, keys, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(name, of=schema(**changes), **keys)
