"""What the model refuses, and its parts by their definitions (whole steps: worker/test_reference.py)."""

import pytest
import torch

from raytrec.common.errors import ConfigError
from raytrec.config.models.ranking import DlrmSection
from raytrec.config.schema import Schema
from raytrec.models import build_model
from raytrec.models.dlrm import DotInteraction
from raytrec.models.inputs import Constant


def schema(dims=(8, 8), dense=("a",)):
    return Schema.parse(
        {
            "labels": ["y"],
            "dense": list(dense),
            "sparse": {"u": {"table": "u"}, "v": {"table": "v"}},
            "tables": {"u": {"rows": 3, "dim": dims[0]}, "v": {"rows": 3, "dim": dims[1]}},
        },
        "test",
    )


def test_dims_must_fit():
    with pytest.raises(ConfigError, match="dims 8, 16"):
        build_model(schema(dims=(8, 16)), DlrmSection())


def test_interactions_are_all_pairs():
    vectors = torch.randn(5, 4, 8)
    expected = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
    torch.testing.assert_close(DotInteraction(4)(vectors), torch.stack(expected, 1))


def test_no_dense_columns_give_one_learned_vector():
    model = build_model(schema(dense=()), DlrmSection(top_mlp=[]))
    assert isinstance(model.bottom, Constant)
    assert torch.equal(model.bottom(torch.empty(3, 0)), model.bottom.vector.expand(3, 8))
