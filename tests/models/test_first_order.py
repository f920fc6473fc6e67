"""wide_deep, deepfm and xdeepfm by their papers' equations, written again: weights and vectors of ids taken
from their tables' rows, sums over pairs and triples of features in loops."""

from itertools import combinations

import pytest
import torch
from made import ROWS, inputs, randomized, schema, weights
from references import layers
from torch.nn.functional import linear

from raytrec.common.errors import ConfigError
from raytrec.config.models.ranking import DeepFMSection, WideDeepSection, XDeepFMSection
from raytrec.models import build_model


def fields(model, dense, pooled, outputs):
    """Of each row: first-order weights, a list of [T], and vectors, a list of [D]."""
    rows = []
    for b in range(ROWS):
        found = [pooled[f][b] for f in pooled]
        if dense.shape[1]:
            v = weights(model)["fields.columns"]
            found = [dense[b, i] * v[i] for i in range(dense.shape[1])] + found
        rows.append(([x[:outputs] for x in found], [x[outputs:] for x in found]))
    return rows


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("dense", [("age", "price"), ()])
def test_deepfm(outputs, dense):
    """Guo et al. 2017, equations 1 to 4."""
    of = schema(dense)
    model = randomized(build_model(of, DeepFMSection(name="deepfm", top_mlp=[6, 5]), outputs))
    given = inputs(of)
    w, expected = weights(model), []
    for first, vectors in fields(model, *given, outputs):
        pairs = sum(a * b for a, b in combinations(vectors, 2))
        second = pairs.sum() if outputs == 1 else pairs @ w["factors"]
        deep = layers(w, "deep", torch.cat(vectors), 2)
        expected.append(sum(first) + second + linear(deep, w["logit.weight"], w["logit.bias"]))
    torch.testing.assert_close(model(*given), torch.stack(expected).squeeze(1), rtol=1e-5, atol=1e-5)


def test_torchrecs_pairs_are_other_ones():
    """Each number with each other one, of the same vector, too; where vectors have one number, ours."""
    from torchrec.modules.deepfm import FactorizationMachine

    from raytrec.models.deepfm import sum_of_pairs

    narrow, wide = torch.randn(ROWS, 4, 1), torch.randn(ROWS, 4, 3)
    torch.testing.assert_close(sum_of_pairs(narrow), FactorizationMachine()([narrow]))
    assert not torch.allclose(sum_of_pairs(wide).sum(1, keepdim=True), FactorizationMachine()([wide]))


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("dense", [("age", "price"), ()])
def test_xdeepfm(outputs, dense):
    """Lian et al. 2018, equations 6, 8 and 9."""
    of = schema(dense)
    section = XDeepFMSection(name="xdeepfm", cin=[4, 3], top_mlp=[6])
    model = randomized(build_model(of, section, outputs))
    given = inputs(of)
    w, expected = weights(model), []
    for first, vectors in fields(model, *given, outputs):
        before, sums = vectors, []
        for k, size in enumerate(section.cin):
            matrix = w[f"cin.layers.{k}.weight"].view(size, len(before), len(vectors))
            before = [
                sum(
                    matrix[h, i, j] * before[i] * vectors[j]
                    for i in range(len(before))
                    for j in range(len(vectors))
                )
                for h in range(size)
            ]
            sums += [x.sum() for x in before]
        both = torch.cat([torch.stack(sums), layers(w, "deep", torch.cat(vectors), 1)])
        expected.append(sum(first) + linear(both, w["logit.weight"], w["logit.bias"]))
    torch.testing.assert_close(model(*given), torch.stack(expected).squeeze(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("wide,deep", [(["*"], ["*"]), (["tags", "price"], ["user", "item", "a*"])])
def test_wide_deep(outputs, wide, deep):
    """Cheng et al. 2016, equation 3: a feature that is deep alone has no weight in the first order."""
    of = schema(dims=(8, 4, 12))
    section = WideDeepSection(name="wide_deep", wide=wide, deep=deep, top_mlp=[6])
    model = randomized(build_model(of, section, outputs))
    dense, pooled = given = inputs(of)
    w = weights(model)
    if wide == ["*"]:
        linear_part = sum(x[:, :outputs] for x in pooled.values()) + dense @ w["slopes.weight"].T
        beside = torch.cat([dense, *(x[:, outputs:] for x in pooled.values())], 1)
    else:
        linear_part = pooled["tags"][:, :outputs] + dense[:, 1:] @ w["slopes.weight"].T
        beside = torch.cat([dense[:, :1], pooled["user"], pooled["item"]], 1)
    expected = linear_part + linear(layers(w, "deep", beside, 1), w["logit.weight"], w["logit.bias"])
    torch.testing.assert_close(model(*given), expected.squeeze(1))


@pytest.mark.parametrize(
    "section,dims,outputs,message",
    [
        (WideDeepSection(name="wide_deep", wide=["usr"]), (8, 8, 8), 1, "did you mean 'user'"),
        (WideDeepSection(name="wide_deep", wide=["user"], deep=["item"]), (8, 8, 8), 1, "wide nor deep: age"),
        (WideDeepSection(name="wide_deep"), (8, 4, 8), 4, "table item has dim 4.*4 columns"),
        (DeepFMSection(name="deepfm"), (8, 4, 8), 1, "dims 4, 8"),
        (DeepFMSection(name="deepfm"), (8, 8, 8), 8, r"(?s)table user has dim 8.*a dim of 12 or more"),
        (XDeepFMSection(name="xdeepfm"), (8, 4, 8), 1, "dims 4, 8"),
        (XDeepFMSection(name="xdeepfm"), (4, 4, 4), 5, r"(?s)table user has dim 4.*a dim of 8 or more"),
    ],
)
def test_refused(section, dims, outputs, message):
    with pytest.raises(ConfigError, match=message):
        build_model(schema(dims=dims), section, outputs)


def test_a_table_of_deep_features_alone_may_be_narrow():
    section = WideDeepSection(name="wide_deep", wide=["user"])
    assert build_model(schema(dims=(8, 4, 4)), section, 5)(*inputs(schema(dims=(8, 4, 4)))).shape == (ROWS, 5)
