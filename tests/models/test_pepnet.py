"""pepnet, compared with a plain implementation of Chang et al. 2023, in values and gradients."""

import pytest
import torch
from made import ROWS, apply_linear, inputs, layers, make, schema, weights

TASKS = {"clicked": 1, "kind": 3, "bought": 1}
SECTION = {"domain": ["age", "tags"], "personal": ["us*", "item"], "gate_mlp": [5], "tower_mlp": [6, 4]}


def compute_expected(w, dense, pooled, domain, stops):
    """Return the logits of all tasks, row by row.

    Args:
        stops: True if gates do not pass gradients to the inputs that they weight.
    """
    rows = []
    for b in range(ROWS):
        e = torch.cat([dense[b], *(x[b] for x in pooled.values())])

        def gate(name, of, weighted):
            given = torch.cat([*of, weighted.detach() if stops else weighted])
            return 2 / (1 + (-apply_linear(w, f"{name}.last", layers(w, f"{name}.hidden", given, 1))).exp())

        if domain:
            e = e * gate("domain_gate", [dense[b, :1], pooled["tags"][b]], e)
        logits = []
        for k in range(len(TASKS)):
            hidden = e
            for layer, size in enumerate(SECTION["tower_mlp"]):
                scales = gate(f"gates.{layer}", [pooled["user"][b], pooled["item"][b]], e)
                hidden = layers(w, f"layers.{layer}.{k}", hidden, 1) * scales[k * size : (k + 1) * size]
            logits.append(apply_linear(w, f"towers.logits.{k}", hidden))
        rows.append(torch.cat(logits))
    return torch.stack(rows)


@pytest.mark.parametrize("domain", [True, False])
def test_pepnet_matches_its_equations_and_gradients(domain):
    of = schema(dims=(4, 8, 12))
    section = SECTION if domain else SECTION | {"domain": []}
    model = make("pepnet", of, 5, tasks=TASKS, **section)
    dense, pooled = inputs(of)
    given, w = [dense.requires_grad_(), *pooled.values(), *model.parameters()], weights(model)
    logits, factors = model(dense, pooled), torch.randn(ROWS, 5)
    expected, leaky = (compute_expected(w, dense, pooled, domain, stops) for stops in (True, False))
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(leaky, expected)
    gradients, right, wrong = (torch.autograd.grad((x * factors).sum(), given) for x in (logits, expected, leaky))
    torch.testing.assert_close(gradients, right, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(gradients[0], wrong[0], rtol=1e-2)
