"""wide_deep, deepfm and xdeepfm, compared with the equations of their papers: id weights and vectors come
from table rows, and loops sum over pairs and triples of features."""

from itertools import combinations, product

import pytest
import torch
from made import ROWS, apply_linear, inputs, layers, make, schema, weights
from torch import nn


def split_fields(model, dense, pooled, outputs):
    """Return per row the first-order weights, a list of [T], and the vectors, a list of [D]."""
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
def test_deepfm_matches_its_equations(outputs, dense):
    """Guo et al. 2017, equations 1 to 4."""
    of = schema(dense=dense)
    model, given = make("deepfm", of, outputs, top_mlp=[6, 5]), inputs(of)
    w, expected = weights(model), []
    for first, vectors in split_fields(model, *given, outputs):
        pairs = sum(a * b for a, b in combinations(vectors, 2))
        second = pairs.sum() if outputs == 1 else pairs @ w["factors"]
        deep = layers(w, "deep", torch.cat(vectors), 2)
        expected.append(sum(first) + second + apply_linear(w, "logit", deep))
    torch.testing.assert_close(model(*given), torch.stack(expected).squeeze(1), rtol=1e-5, atol=1e-5)


def test_wide_deep_drops_the_deep_part_of_some_rows():
    of = schema()
    model, (columns, pooled) = make("wide_deep", of, top_mlp=[6], deep_dropout=0.5), inputs(of)
    nn.init.ones_(model.logit.weight)
    whole = model.eval()(columns, pooled)
    with torch.no_grad():
        model.logit.weight.mul_(0)
    linear = model(columns, pooled)
    nn.init.ones_(model.logit.weight)
    found = torch.stack([model.train()(columns, pooled) for _ in range(20)])
    is_linear, is_whole = ((found - each).abs() < 1e-5 for each in (linear, whole))
    assert (is_linear | is_whole).all() and 0.3 < is_linear.float().mean() < 0.7


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("dense", [("age", "price"), ()])
def test_xdeepfm_matches_its_equations(outputs, dense):
    """Lian et al. 2018, equations 6, 8 and 9."""
    of, sizes = schema(dense=dense), [4, 3]
    model, given = make("xdeepfm", of, outputs, cin=sizes, top_mlp=[6]), inputs(of)
    w, expected = weights(model), []
    for first, vectors in split_fields(model, *given, outputs):
        before, sums = vectors, []
        for k, size in enumerate(sizes):
            matrix = w[f"cin.layers.{k}.weight"].view(size, len(before), len(vectors))
            pairs = list(product(range(len(before)), range(len(vectors))))
            before = [sum(matrix[h, i, j] * before[i] * vectors[j] for i, j in pairs) for h in range(size)]
            sums += [x.sum() for x in before]
        both = torch.cat([torch.stack(sums), layers(w, "deep", torch.cat(vectors), 1)])
        expected.append(sum(first) + apply_linear(w, "logit", both))
    torch.testing.assert_close(model(*given), torch.stack(expected).squeeze(1), rtol=1e-5, atol=1e-5)


SPLIT = {"wide": ["tags", "price"], "deep": ["user", "item", "a*"]}


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize(
    "columns, keys",
    [(("age", "price"), {}), ((), {}), (("age", "price"), SPLIT)],
    ids=["all features", "no dense columns", "split"],
)
@pytest.mark.parametrize("cross_layers", [0, 2])
def test_wide_deep_matches_its_equations(outputs, columns, keys, cross_layers):
    """Cheng et al. 2016, equation 3: a deep-only feature has no first-order weight.

    With cross layers, the deep part is DCN-V2.
    """
    of = schema(dims=(8, 4, 12), dense=columns)
    model = make("wide_deep", of, outputs, top_mlp=[6], cross_layers=cross_layers, slope_rate=5, **keys)
    dense, pooled = given = inputs(of)
    w = weights(model)
    if keys:
        linear_part = pooled["tags"][:, :outputs] + 5 * dense[:, 1:] @ w["slopes.weight"].T
        beside = torch.cat([dense[:, :1], pooled["user"], pooled["item"]], 1)
    else:
        linear_part = sum(x[:, :outputs] for x in pooled.values())
        linear_part = linear_part + (5 * dense @ w["slopes.weight"].T if columns else 0)
        beside = torch.cat([dense, *(x[:, outputs:] for x in pooled.values())], 1)
    crossed = model.cross(beside) if cross_layers else beside
    expected = linear_part + apply_linear(w, "logit", layers(w, "deep", crossed, 1))
    torch.testing.assert_close(model(*given), expected.squeeze(1), rtol=1e-5, atol=1e-5)


def test_wide_deep_accepts_narrow_tables_of_deep_features():
    of = schema(dims=(8, 4, 4))
    assert make("wide_deep", of, 5, wide=["user"])(*inputs(of)).shape == (ROWS, 5)
