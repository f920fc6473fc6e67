"""MaskNet by the paper's equations, written again row by row."""

import pytest
import torch
from made import ROWS, inputs, randomized, schema, weights
from references import layers
from torch.nn.functional import linear

from raytrec.common.errors import ConfigError
from raytrec.config.models.ranking import MaskNetSection
from raytrec.models import build_model

SECTION = {"name": "masknet", "reduction": 1.5, "top_mlp": [5]}


def normal(x, eps=1e-5):
    return (x - x.mean()) / (x.var(unbiased=False) + eps).sqrt()


def block(w, name, v, h):
    """Equations 4, 7 and 8: of all embeddings v, and what the block reads."""
    hidden = layers(w, f"{name}.mask", v, 1)
    mask = linear(hidden, w[f"{name}.mask.2.weight"], w[f"{name}.mask.2.bias"])
    x = normal(w[f"{name}.layer.weight"] @ (mask * h))
    return (w[f"{name}.norm.weight"] * x + w[f"{name}.norm.bias"]).clamp(min=0)


@pytest.mark.parametrize("arrangement", ["serial", "parallel"])
@pytest.mark.parametrize("dense", [("age", "price"), ()])
def test_masknet(arrangement, dense):
    of = schema(dense)
    model = randomized(
        build_model(of, MaskNetSection(**SECTION, arrangement=arrangement, blocks=[6, 4, 3]), 2)
    )
    columns, pooled = given = inputs(of)
    w, expected = weights(model), []
    for b in range(ROWS):
        vectors = [columns[b, i] * w["fields.columns"][i] for i in range(len(dense))]
        vectors += [x[b] for x in pooled.values()]
        v = torch.cat(vectors)
        n = torch.cat([w["gain"][i] * normal(x) + w["bias"][i] for i, x in enumerate(vectors)])
        if arrangement == "serial":
            h = n
            for i in range(3):
                h = block(w, f"blocks.{i}", v, h)
        else:
            h = torch.cat([block(w, f"blocks.{i}", v, n) for i in range(3)])
        expected.append(linear(layers(w, "top", h, 1), w["logit.weight"], w["logit.bias"]))
    torch.testing.assert_close(model(*given), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_masks_are_as_wide_as_what_they_multiply():
    model = build_model(schema(), MaskNetSection(**SECTION, arrangement="serial", blocks=[6, 4]))
    assert [block.mask[2].out_features for block in model.blocks] == [5 * 8, 6]
    assert [block.mask[0].out_features for block in model.blocks] == [60, 9]
    assert [block.mask[0].in_features for block in model.blocks] == [5 * 8, 5 * 8]


def test_refused():
    with pytest.raises(ConfigError, match="dims 4, 8"):
        build_model(schema(dims=(8, 4, 8)), MaskNetSection(name="masknet"))
