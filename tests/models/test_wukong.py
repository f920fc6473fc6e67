"""wukong, compared with a plain implementation that loops over rows and pairs of vectors."""

import pytest
import torch
from made import DIM, ROWS, apply_linear, inputs, layers, make, schema, weights

SIZES = {"bottom_mlp": [5], "fmb_vectors": 3, "lcb_vectors": 2, "rank": 3, "fmb_mlp": [6], "top_mlp": [7]}


def normalize(x, w, name):
    """Apply the layer norm of this name to one vector."""
    centered = x - x.sum() / len(x)
    return centered / (centered.square().sum() / len(x) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def combine(matrix, x):
    """Return the weighted sums of vectors, one for each row of the matrix."""
    return [sum(weight * vector for weight, vector in zip(row, x, strict=True)) for row in matrix]


def apply_layer(w, name, x):
    """Return the vectors of one layer by sections 3.3 to 3.6 of Zhang et al. 2024, with the full matrix of products."""
    rank, compressed = SIZES["rank"], SIZES["lcb_vectors"]
    vectors = SIZES["fmb_vectors"] + compressed
    matrix = w[f"{name}.linear.weight"]
    products = torch.stack([torch.stack([(one * other).sum() for other in x]) for one in x])
    flat = torch.cat([row @ matrix[:rank].T for row in products])
    hidden = layers(w, f"{name}.hidden", normalize(flat, w, f"{name}.interaction_norm"), 1)
    machine = list(apply_linear(w, f"{name}.last", hidden).split(DIM))
    after = machine + combine(matrix[rank : rank + compressed], x)
    residual = x if len(x) == vectors else combine(matrix[rank + compressed :], x)
    return [normalize(one + other, w, f"{name}.norm") for one, other in zip(after, residual, strict=True)]


# With 4 or 3 vectors as input, the first layer maps the residual. Four features and the dense columns are 5 vectors.
@pytest.mark.parametrize("dense,more", [(("age", "price"), {}), ((), {}), (("age",), {"last": {"table": "item"}})])
def test_wukong_matches_its_equations(dense, more):
    of = schema("user", "item", "tags", dense=dense, **more)
    model = make("wukong", of, 2, layers=3, **SIZES)
    columns, pooled = inputs(of)
    w, expected = weights(model), []
    for b in range(ROWS):
        x = [layers(w, "bottom", columns[b], 2)] if dense else []
        x += [vector[b] for vector in pooled.values()]
        assert (model.layers[0].sizes[2] == 0) == (len(x) == 5)
        for i in range(3):
            x = apply_layer(w, f"layers.{i}", x)
        expected.append(apply_linear(w, "logit", layers(w, "top", torch.cat(x), 1)))
    torch.testing.assert_close(model(columns, pooled), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_wukong_does_not_compute_all_products():
    of = schema(dense=())
    wide = {f"c{i}": {"table": "user"} for i in range(40)}
    model = make("wukong", schema("user", dense=(), **wide), rank=2)
    assert model.layers[0].interaction_norm.normalized_shape == (41 * 2,)
    assert make("wukong", of, layers=1)(*inputs(of)).shape == (ROWS,)
