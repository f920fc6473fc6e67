"""dlrm, dcn, masknet and final_mlp, compared with the equations of their papers."""

import pytest
import torch
from made import DIM, ROWS, apply_linear, inputs, layers, make, schema, weights

from raytrec.models.parts.layers import Constant


def test_dlrm_without_dense_columns_learns_a_constant_vector():
    model = make("dlrm", schema(dense=()), top_mlp=[])
    assert isinstance(model.bottom, Constant)
    assert torch.equal(model.bottom(torch.empty(3, 0)), model.bottom.vector.expand(3, DIM))


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("deep", ["stacked", "parallel"])
def test_dcn_matches_its_equations(rank, deep):
    """Wang et al. 2021, equation 3 (and 4 with a rank), row by row for the products."""
    of = schema(dims=(8, 4, 12))
    keys = {"bottom_mlp": [5, 3], "cross_layers": 2, "cross_rank": rank, "deep": deep, "top_mlp": [6, 5]}
    model, (dense, pooled) = make("dcn", of, **keys), inputs(of)
    w = weights(model)
    x = x0 = torch.cat([layers(w, "bottom", dense, 2), *pooled.values()], 1)
    for i in range(2):
        matrix, bias = w[f"cross.layers.{i}.0.weight"], w[f"cross.layers.{i}.{1 if rank else 0}.bias"]
        if rank:
            matrix = w[f"cross.layers.{i}.1.weight"] @ matrix
        x = torch.stack([x0[b] * (matrix @ x[b] + bias) + x[b] for b in range(ROWS)])
    parallel = deep == "parallel"
    x = torch.cat([x, layers(w, "deep", x0, 2)], 1) if parallel else layers(w, "deep", x, 2)
    torch.testing.assert_close(model(dense, pooled), apply_linear(w, "logit", x)[:, 0])


def test_mlperf_dcn_can_be_configured():
    sparse = {f"c{i}": {"table": "user"} for i in range(26)}
    criteo = schema("user", dense=[f"d{i}" for i in range(13)], dims=(128, 8, 8), **sparse)
    del criteo.sparse["user"]
    keys = {"bottom_mlp": [512, 256, 128], "cross_layers": 3, "cross_rank": 512}
    shapes = weights(make("dcn", criteo, **keys, top_mlp=[1024, 1024, 512, 256]))
    shapes = {name: tuple(p.shape) for name, p in shapes.items()}
    assert shapes["bottom.0.weight"] == (512, 13) and shapes["bottom.4.weight"] == (128, 256)
    assert [shapes[f"cross.layers.{i}.0.weight"] for i in range(3)] == [(512, 27 * 128)] * 3
    assert [shapes[f"deep.{i}.weight"][0] for i in (0, 2, 4, 6)] == [1024, 1024, 512, 256]
    assert shapes["logit.weight"] == (1, 256)


MASKNET = {"reduction": 1.5, "top_mlp": [5]}


def normalize(x, eps=1e-5):
    return (x - x.mean()) / (x.var(unbiased=False) + eps).sqrt()


def block(w, name, v, h):
    """Apply equations 4, 7 and 8 to all embeddings v and the block input h."""
    mask = apply_linear(w, f"{name}.mask.2", layers(w, f"{name}.mask", v, 1))
    x = normalize(w[f"{name}.layer.weight"] @ (mask * h))
    return (w[f"{name}.norm.weight"] * x + w[f"{name}.norm.bias"]).clamp(min=0)


@pytest.mark.parametrize("arrangement", ["serial", "parallel"])
@pytest.mark.parametrize("columns", [("age", "price"), ()])
def test_masknet_matches_its_equations(arrangement, columns):
    of = schema(dense=columns)
    model = make("masknet", of, 2, arrangement=arrangement, blocks=[6, 4, 3], **MASKNET)
    dense, pooled = given = inputs(of)
    w, expected = weights(model), []
    for b in range(ROWS):
        vectors = [dense[b, i] * w["fields.columns"][i] for i in range(len(columns))]
        vectors += [x[b] for x in pooled.values()]
        v = torch.cat(vectors)
        n = torch.cat([w["gain"][i] * normalize(x) + w["bias"][i] for i, x in enumerate(vectors)])
        if arrangement == "serial":
            h = n
            for i in range(3):
                h = block(w, f"blocks.{i}", v, h)
        else:
            h = torch.cat([block(w, f"blocks.{i}", v, n) for i in range(3)])
        expected.append(apply_linear(w, "logit", layers(w, "top", h, 1)))
    torch.testing.assert_close(model(*given), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_masknet_masks_have_the_width_of_their_input():
    model = make("masknet", schema(), arrangement="serial", blocks=[6, 4], **MASKNET)
    assert [block.mask[2].out_features for block in model.blocks] == [5 * 8, 6]
    assert [block.mask[0].out_features for block in model.blocks] == [60, 9]
    assert [block.mask[0].in_features for block in model.blocks] == [5 * 8, 5 * 8]


@pytest.mark.parametrize("heads, outputs, gates", [(1, 1, True), (2, 3, True), (1, 3, False)])
def test_final_mlp_matches_its_equations(heads, outputs, gates):
    of = schema(dims=(8, 4, 12))
    keys = {"gating": True, "gate1": ["age", "user"]} if gates else {"gating": False}
    model = make("final_mlp", of, outputs, heads=heads, mlp1=[6, 4], mlp2=[6], gate_mlp=[5], **keys)
    dense, pooled = given = inputs(of)
    w, expected = weights(model), []

    def gate(name, context):
        hidden = layers(w, f"{name}.hidden", context, 1)
        return 2 * apply_linear(w, f"{name}.last", hidden).sigmoid()

    for b in range(ROWS):
        e = torch.cat([dense[b], *(x[b] for x in pooled.values())])
        of_one = e * gate("gates.0", torch.cat([dense[b, :1], pooled["user"][b]])) if gates else e
        of_two = e * gate("gates.1", w["gates.1.vector"][0]) if gates else e
        one, two = layers(w, "streams.0", of_one, 2), layers(w, "streams.1", of_two, 1)
        of_heads = list(zip(one.chunk(heads), two.chunk(heads), strict=True))
        forms = [
            sum(left @ w["bilinear"][t, h] @ right for h, (left, right) in enumerate(of_heads)) for t in range(outputs)
        ]
        expected.append(apply_linear(w, "logit", torch.cat([one, two])) + torch.stack(forms))
    torch.testing.assert_close(model(*given), torch.stack(expected).squeeze(1), rtol=1e-5, atol=1e-5)
