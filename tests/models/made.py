"""Helpers of model tests: schemas, inputs, nonzero random weights, and parts of equations."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear

from raytrec.config.models import SECTIONS
from raytrec.config.schema import Schema
from raytrec.models import build_model
from raytrec.models.inputs import Sequence

ROWS, DIM, LENGTH, DRAWN = 6, 8, 5, 3
LENGTHS, COUNTS = (0, 1, 2, 4, 5, 5), (3, 3, 0, 1, 2, 3)  # of history and negatives, per row
POOLED = ("user", "item", "tags")
SPARSE = {
    "user": {"table": "user"},
    "item": {"table": "item"},
    "tags": {"table": "tag", "pooling": "mean"},
    "history": {"table": "item", "pooling": "sequence"},
    "negatives": {"table": "item", "pooling": "sequence"},
}


def schema(*features, dense=("age", "price"), dims=(DIM, DIM, DIM), **sparse):
    """Return a Schema of these features (default: POOLED) and the features in `sparse`.

    Args:
        dims: embedding dims of the tables user, item and tag.
    """
    sparse = {name: SPARSE[name] for name in features or POOLED} | sparse
    sizes = dict(zip(("user", "item", "tag"), dims, strict=True))
    tables = {spec["table"]: {"rows": 9, "dim": sizes[spec["table"]]} for spec in sparse.values()}
    return Schema.parse({"labels": ["y"], "dense": list(dense), "sparse": sparse, "tables": tables}, "test")


def make(name, of, outputs=1, *, vectors=False, tasks=None, **keys):
    """Return a model in training mode with random parameters, including those initialized to 0 or 1."""
    section = SECTIONS[name].model_validate({"name": name} | keys)
    tasks = {f"task_{place}": 1 for place in range(outputs)} if tasks is None else tasks
    model = build_model(of, section, tasks, vectors)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / max(parameter.shape, default=1) ** 0.5)
    return model.train()


def inputs(of, lengths=LENGTHS, counts=COUNTS, side_features=None):
    """Return dense columns and feature inputs; the feature inputs require gradients.

    Args:
        side_features: side features of the history.
    """
    torch.manual_seed(2)
    found = {}
    for name, spec in of.sparse.items():
        dim = of.tables[spec.table].dim
        if name == "negatives":
            found[name] = sequence(counts, max(counts), dim)
        elif spec.pooling == "sequence":
            found[name] = sequence(lengths, LENGTH, dim, side_features)
        else:
            found[name] = torch.randn(len(lengths), dim, requires_grad=True)
    return torch.randn(len(lengths), len(of.dense)), found


def sequence(lengths, length, dim, side_features=None):
    present = torch.arange(length) < torch.tensor(lengths).unsqueeze(1)
    vectors = (torch.randn(len(lengths), length, dim) * present.unsqueeze(2)).requires_grad_()
    return Sequence(vectors, present, side_features)


def weights(model, prefix=""):
    """Return the parameters under a prefix, keyed by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in model.named_parameters() if k.startswith(prefix)}


def get_id_vectors(found, i, name="history"):
    """Return the vectors of one row's ids, [n, D], most recent first."""
    return found[name].vectors[i, : int(found[name].present[i].sum())]


def layers(w, name, x, count, step=2, activation=lambda name: torch.relu):
    """Apply `count` linear layers name.0, name.step, …; each is followed by activation(next name)."""
    for i in range(count):
        x = linear(x, w[f"{name}.{i * step}.weight"], w[f"{name}.{i * step}.bias"])
        x = activation(f"{name}.{i * step + 1}")(x)
    return x


def apply_linear(w, name, x):
    """Apply the linear layer of this name."""
    return linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def prelu(w):
    """Return a function from the name of the slopes to a PReLU."""
    return lambda name: lambda x: torch.where(x > 0, x, w[f"{name}.weight"] * x)


def normalize_vectors(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def loss(kind, own, others, weight=1.0):
    """Return the loss of one positive score and a list of negative scores, by its definition.

    Args:
        weight: weight of the positive score in the loss bce.
    """
    scores = torch.stack([own, *others])
    if kind == "softmax":
        return cross_entropy(scores.unsqueeze(0), torch.tensor([0]))
    if kind == "bce":
        labels = torch.tensor([1.0] + [0.0] * len(others))
        weights = torch.tensor([weight] + [1.0] * len(others))
        return binary_cross_entropy_with_logits(scores, labels, weights, reduction="sum")
    each = [-torch.sigmoid(own - other).log() for other in others]
    return sum(each) / len(each) if each else own * 0


def assert_rows_independent(model, dense, found):
    """Check that rows do not depend on other rows (so sharding a batch changes nothing) or on padding
    vectors."""
    whole = model(dense, found)

    def of_row(x, i):
        if not isinstance(x, Sequence):
            return x[i : i + 1]
        return Sequence(*(part if part is None else part[i : i + 1] for part in x))

    for i in range(len(dense)):
        alone = model(dense[i : i + 1], {name: of_row(x, i) for name, x in found.items()})
        torch.testing.assert_close(alone.reshape(-1), whole[i].reshape(-1))
    noisy = dict(found)
    for name, x in found.items():
        if isinstance(x, Sequence):
            noise = 9 * torch.randn_like(x.vectors) * ~x.present.unsqueeze(2)
            noisy[name] = x._replace(vectors=x.vectors + noise)
    torch.testing.assert_close(model(dense, noisy), whole)


def assert_learns(model, dense, found, unused=()):
    """Check that gradients are finite and reach all parameters and present ids, and no padding."""
    model(dense, found).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    for name, x in found.items():
        if name not in unused:
            gradient = (x.vectors if isinstance(x, Sequence) else x).grad
            assert gradient.isfinite().all() and gradient.any(), name
            assert not isinstance(x, Sequence) or not gradient[~x.present].any(), name


def assert_no_nan(model, dense, found):
    """Check that rows without ids have finite gradients, and that padding has no gradient."""
    given = model(dense, found)
    given.sum().backward()
    assert given.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    for x in found.values():
        if isinstance(x, Sequence) and x.vectors.grad is not None:
            assert not x.vectors.grad[~x.present].any()
    return given
