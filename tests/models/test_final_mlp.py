"""FinalMLP by the paper's equations, written again row by row and head by head."""

import pytest
import torch
from made import ROWS, inputs, randomized, schema, weights
from references import layers
from torch.nn.functional import linear

from raytrec.common.errors import ConfigError
from raytrec.config.models.ranking import FinalMLPSection
from raytrec.models import build_model

SECTION = {"name": "final_mlp", "mlp1": [6, 4], "mlp2": [6], "gate_mlp": [5]}


def gate(w, name, context):
    hidden = layers(w, f"{name}.hidden", context, 1)
    return 2 / (1 + (-linear(hidden, w[f"{name}.last.weight"], w[f"{name}.last.bias"])).exp())


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("outputs", [1, 3])
def test_final_mlp(heads, outputs):
    of = schema(dims=(8, 4, 12))
    model = randomized(
        build_model(of, FinalMLPSection(**SECTION, heads=heads, gate1=["age", "user"]), outputs)
    )
    dense, pooled = given = inputs(of)
    w, expected = weights(model), []
    for b in range(ROWS):
        e = torch.cat([dense[b], *(x[b] for x in pooled.values())])
        one = layers(w, "streams.0", e * gate(w, "gates.0", torch.cat([dense[b, :1], pooled["user"][b]])), 2)
        two = layers(w, "streams.1", e * gate(w, "gates.1", w["gates.1.vector"][0]), 1)
        forms = [
            sum(one.chunk(heads)[h] @ w["bilinear"][t, h] @ two.chunk(heads)[h] for h in range(heads))
            for t in range(outputs)
        ]
        expected.append(
            linear(torch.cat([one, two]), w["logit.weight"], w["logit.bias"]) + torch.stack(forms)
        )
    torch.testing.assert_close(model(*given), torch.stack(expected).squeeze(1), rtol=1e-5, atol=1e-5)


def test_without_gates_both_streams_read_the_features_as_they_are():
    of = schema()
    model = randomized(build_model(of, FinalMLPSection(**SECTION, gating=False)))
    assert not len(model.gates)
    dense, pooled = given = inputs(of)
    w, e = weights(model), torch.cat([dense, *pooled.values()], 1)
    one, two = layers(w, "streams.0", e, 2), layers(w, "streams.1", e, 1)
    form = ((one @ w["bilinear"][0, 0]) * two).sum(1, keepdim=True)
    expected = linear(torch.cat([one, two], 1), w["logit.weight"], w["logit.bias"]) + form
    torch.testing.assert_close(model(*given), expected.squeeze(1))


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"gate1": ["usr"]}, "did you mean 'user'"),
        ({"gating": False, "gate2": ["item"]}, "gating is false"),
        ({"heads": 4}, r"(?s)width 6 cannot be cut into 4 heads.*model\.mlp2 to 8"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_model(schema(), FinalMLPSection(**SECTION | changes))
