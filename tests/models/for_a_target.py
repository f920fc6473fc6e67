"""Models that read a sequence for a target: their schema, inputs, and an MLP written out."""

import torch
from drawn_items import row, sequence

from raytrec.config.models import SECTIONS
from raytrec.config.schema import Schema
from raytrec.models import build_model
from raytrec.models.inputs import Sequence

DIM, LENGTH = 8, 5
LENGTHS, COUNTS = (0, 1, 2, 3, 5, 5), (5, 5, 5, 1, 5, 3)


def schema(negatives=False, dims=None, **changes):
    """User and tags of other dims than the item, whose history there is."""
    dims = {"user": 4, "item": DIM, "tag": 12} | (dims or {})
    sparse = {
        "user": {"table": "user"},
        "history": {"table": "item", "pooling": "sequence"},
        "item": {"table": "item"},
        "tags": {"table": "tag", "pooling": "mean"},
    }
    if negatives:
        sparse["negatives"] = {"table": "item", "pooling": "sequence"}
    tables = {name: {"rows": 9, "dim": dim} for name, dim in dims.items()}
    values = {"labels": ["y"], "dense": ["age", "price"], "sparse": sparse, "tables": tables}
    return Schema.parse(values | changes, "test")


def make(name, of, outputs=1, **keys):
    """A model whose parameters are all drawn, in training."""
    section = SECTIONS[name].model_validate({"name": name, "max_length": LENGTH} | keys)
    model = build_model(of, section, outputs)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / max(parameter.shape, default=1) ** 0.5)
    return model.train()


def inputs(of, lengths=LENGTHS, counts=COUNTS):
    """What a model is given; gradients are asked for."""
    torch.manual_seed(2)
    found = {}
    for name, spec in of.sparse.items():
        dim = of.tables[spec.table].dim
        if spec.pooling == "sequence":
            found[name] = sequence(counts if name == "negatives" else lengths, LENGTH, dim)
        else:
            found[name] = torch.randn(len(lengths), dim, requires_grad=True)
    return torch.randn(len(lengths), len(of.dense)), found


def past(found, i, name="history"):
    """One row's ids as a list of vectors, the most recent first."""
    sequence = found[name]
    return list(sequence.vectors[i, : int(sequence.present[i].sum())])


def prelu(slopes):
    return lambda x: torch.where(x > 0, x, slopes * x)


def layers(w, name, x, count, step, activation):
    """Linear layers `name.0`, `name.step`, …, each followed by `activation(the name after it)`."""
    for i in range(count):
        x = w[f"{name}.{i * step}.weight"] @ x + w[f"{name}.{i * step}.bias"]
        x = activation(f"{name}.{i * step + 1}")(x)
    return x


def assert_rows_alone(model, dense, found):
    """Each row is computed from that row alone; what a sequence has behind its last id changes nothing."""
    whole = model(dense, found)
    for i in range(len(dense)):
        torch.testing.assert_close(model(dense[i : i + 1], row(found, i)).reshape(-1), whole[i].reshape(-1))
    noisy = {
        name: Sequence(
            x.vectors + 9 * torch.randn_like(x.vectors) * ~x.present.unsqueeze(2), x.present, x.side_features
        )
        if isinstance(x, Sequence)
        else x
        for name, x in found.items()
    }
    torch.testing.assert_close(model(dense, noisy), whole)


def assert_learns(model, dense, found):
    """Gradients reach every parameter and every id that is there, and no other."""
    model(dense, found).square().sum().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not still, still
    for name, x in found.items():
        gradient = (x.vectors if isinstance(x, Sequence) else x).grad
        assert torch.isfinite(gradient).all(), name
        reached = gradient.abs().sum(-1) > 0
        assert not isinstance(x, Sequence) or not (reached & ~x.present).any(), name
        assert reached[-1].any(), name
