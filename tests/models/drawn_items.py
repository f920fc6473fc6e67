"""Models that hold a row's item against drawn ones: their schema, inputs, and losses by definition."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from raytrec.config.models import SECTIONS
from raytrec.config.schema import Schema
from raytrec.models import build_model
from raytrec.models.inputs import Sequence

ROWS, DIM, LENGTH, DRAWN = 6, 8, 5, 3
LENGTHS, COUNTS = (0, 1, 2, 4, 5, 5), (3, 3, 0, 1, 2, 3)


def schema(**changes):
    item = {"table": "item", "pooling": "sequence"}
    values = {
        "labels": ["y"],
        "sparse": {"user": {"table": "user"}, "item": {"table": "item"}, "history": item, "negatives": item},
        "tables": {"user": {"rows": 9, "dim": DIM}, "item": {"rows": 9, "dim": DIM}},
    }
    return Schema.parse(values | changes, "test")


def make(name, outputs=1, vectors=False, of=None, **keys):
    """A model whose parameters are all drawn, in training; it learns from `negatives`."""
    keys = {"negatives": "negatives", "max_negatives": DRAWN} | keys
    model = build_model(
        of or schema(), SECTIONS[name].model_validate({"name": name} | keys), outputs, vectors
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / max(parameter.shape, default=1) ** 0.5)
    return model.train()


def inputs(lengths=LENGTHS, counts=COUNTS, dim=DIM, side_features=None):
    """What a model is given; ids are the most recent first, and gradients are asked for."""
    torch.manual_seed(2)
    found = {name: torch.randn(len(lengths), dim, requires_grad=True) for name in ("user", "item")}
    found["history"] = sequence(lengths, LENGTH, dim, side_features)
    found["negatives"] = sequence(counts, DRAWN, dim)
    return torch.empty(len(lengths), 0), found


def sequence(lengths, length, dim, side_features=None):
    present = torch.arange(length) < torch.tensor(lengths).unsqueeze(1)
    vectors = (torch.randn(len(lengths), length, dim) * present.unsqueeze(2)).requires_grad_()
    return Sequence(vectors, present) if side_features is None else Sequence(vectors, present, side_features)


def row(found, i):
    """The inputs of one row."""
    return {
        name: Sequence(
            *(part if part is None else part[i : i + 1] for part in (x.vectors, x.present, x.side_features))
        )
        if isinstance(x, Sequence)
        else x[i : i + 1]
        for name, x in found.items()
    }


def past(found, i):
    """One row's history: [n, D], the oldest first."""
    vectors, present = found["history"]
    return vectors[i, : int(present[i].sum())].flip(0)


def loss(kind, own, others):
    """Of one score and a list of others, by its definition."""
    if kind == "softmax":
        return cross_entropy(torch.stack([own, *others]).unsqueeze(0), torch.tensor([0]))
    if kind == "bce":
        scores = torch.stack([own, *others])
        labels = torch.tensor([1.0] + [0.0] * len(others))
        return binary_cross_entropy_with_logits(scores, labels, reduction="sum")
    each = [-torch.sigmoid(own - other).log() for other in others]
    return sum(each) / len(each) if each else own * 0


def drawn(found, i):
    """One row's negatives: [k, D]."""
    vectors, present = found["negatives"][:2]
    return vectors[i][present[i]]


def assert_alone(model, dense, found):
    """Rows know nothing of each other, and nothing of what stands where no id is."""
    whole = model(dense, found)
    for i in range(len(dense)):
        torch.testing.assert_close(model(dense[i : i + 1], row(found, i)), whole[i : i + 1])
    noisy = dict(found)
    for name in ("history", "negatives"):
        vectors, present = found[name]
        noise = torch.randn_like(vectors) * ~present.unsqueeze(2)
        noisy[name] = Sequence(vectors + noise, present, found[name].side_features)
    assert torch.equal(model(dense, noisy), whole)


def assert_learns(model, dense, found, unused=()):
    """Every parameter and every input that takes part gets a gradient, and all of them are finite."""
    model(dense, found).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert name in unused or parameter.grad.any(), name
    for name, x in found.items():
        grad = (x.vectors if isinstance(x, Sequence) else x).grad
        assert name in unused or (grad.isfinite().all() and grad.any()), name
