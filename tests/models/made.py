"""What tests of models share: a schema, inputs, and weights that are nowhere 0."""

import torch

from raytrec.config.schema import Schema

ROWS, DIM = 7, 8


def schema(dense=("age", "price"), dims=(DIM, DIM, DIM)):
    names = ("user", "item", "tag")
    return Schema.parse(
        {
            "labels": ["y", "z"],
            "dense": list(dense),
            "sparse": {
                "user": {"table": "user"},
                "item": {"table": "item"},
                "tags": {"table": "tag", "pooling": "mean"},
            },
            "tables": {name: {"rows": 9, "dim": dim} for name, dim in zip(names, dims, strict=True)},
        },
        "test",
    )


def randomized(model):
    """With parameters that begin as 0 or 1 drawn, too, so that none goes unnoticed."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / max(parameter.shape, default=1) ** 0.5)
    return model


def inputs(of, rows=ROWS):
    """Dense columns, and pooled embeddings by feature."""
    torch.manual_seed(2)
    pooled = {f: torch.randn(rows, of.tables[spec.table].dim) for f, spec in of.sparse.items()}
    return torch.randn(rows, len(of.dense)), pooled


def weights(model):
    return dict(model.named_parameters())
