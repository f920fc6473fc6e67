"""Multi-task models, compared with the equations of their papers."""

import pytest
import torch
from made import ROWS, apply_linear, inputs, layers, make, schema, weights

TASKS = {"clicked": 1, "kind": 3, "bought": 1}
SMALL = {"expert_mlp": [6, 5], "tower_mlp": [4]}
KEYS = {
    "shared_bottom": {"bottom_mlp": [6], "tower_mlp": [4]},
    "mmoe": {"experts": 3, **SMALL},
    "ple": SMALL,
    "dbmtl": {"bottom_mlp": [6], "tower_mlp": [5], "relation_mlp": [4]},
    "pepnet": {"domain": ["tags"], "personal": ["user"], "tower_mlp": [6]},
    "esmm": {"click": "clicked", "conversion": "bought", "tower_mlp": [6]},
}


def made(name, tasks=TASKS, of=None, **keys):
    of = of or schema()
    return make(name, of, sum(tasks.values()), tasks=tasks, **KEYS[name] | keys), *inputs(of)


def apply_towers(w, of_tasks, hidden):
    after = [layers(w, f"towers.towers.{k}", x, hidden) for k, x in enumerate(of_tasks)]
    return torch.cat([apply_linear(w, f"towers.logits.{k}", x) for k, x in enumerate(after)], 1)


def apply_experts(w, name, count, x):
    return [layers(w, f"{name}.experts.{e}", x, 2) for e in range(count)]


def apply_gate(w, name, x, of_experts):
    """Return the softmax-weighted sum of the experts' vectors."""
    scores = (x @ w[f"{name}.scores.weight"].T).exp()
    shares = scores / scores.sum(1, keepdim=True)
    return sum(shares[:, e : e + 1] * vectors for e, vectors in enumerate(of_experts))


@pytest.mark.parametrize("dense", [("age", "price"), ()])
def test_shared_bottom_matches_its_equations(dense):
    model, *given = made("shared_bottom", of=schema(dense=dense, dims=(4, 8, 12)))
    w, x = weights(model), torch.cat([given[0], *given[1].values()], 1)
    expected = apply_towers(w, [layers(w, "bottom", x, 1)] * 3, 1)
    assert expected.shape == (ROWS, 5)
    torch.testing.assert_close(model(*given), expected)


def test_mmoe_matches_its_equations():
    """Ma et al. 2018, equations 6 and 7."""
    model, dense, pooled = made("mmoe")
    w, x = weights(model), torch.cat([dense, *pooled.values()], 1)
    of_experts = apply_experts(w, "experts", 3, x)
    expected = apply_towers(w, [apply_gate(w, f"gates.{k}", x, of_experts) for k in range(3)], 1)
    torch.testing.assert_close(model(dense, pooled), expected)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_ple_matches_its_equations(levels):
    """Tang et al. 2020, equations 4 to 7."""
    model, dense, pooled = made("ple", levels=levels, task_experts=2, shared_experts=3)
    w, x = weights(model), torch.cat([dense, *pooled.values()], 1)
    of_tasks, of_all = [x, x, x], x
    for level in range(levels):
        name = f"levels.{level}"
        own = [apply_experts(w, f"{name}.experts.{k}", 2, of_tasks[k]) for k in range(3)]
        shared = apply_experts(w, f"{name}.experts.3", 3, of_all)
        if level < levels - 1:
            after = apply_gate(w, f"{name}.gates.3", of_all, [*own[0], *own[1], *own[2], *shared])
        of_tasks = [apply_gate(w, f"{name}.gates.{k}", of_tasks[k], own[k] + shared) for k in range(3)]
        of_all = after if level < levels - 1 else None
    torch.testing.assert_close(model(dense, pooled), apply_towers(w, of_tasks, 1))
    assert len(model.levels[-1].gates) == 3


@pytest.mark.parametrize("names", [("clicked", "bought"), ("bought", "clicked")])
def test_esmm_matches_its_equations(names):
    """Ma et al. 2018, equation 4, in probabilities."""
    model, dense, pooled = made("esmm", dict.fromkeys(names, 1))
    w, x = weights(model), torch.cat([dense, *pooled.values()], 1)
    ctr, cvr = (
        torch.sigmoid(apply_linear(w, f"{tower}.1", layers(w, f"{tower}.0", x, 1))).double()
        for tower in ("click", "conversion")
    )
    expected = {"clicked": ctr, "bought": ctr * cvr}
    given = model(dense, pooled).sigmoid().double()
    torch.testing.assert_close(given, torch.cat([expected[name] for name in names], 1), rtol=1e-5, atol=1e-6)


def test_esmm_log_odds_are_exact_for_extreme_probabilities():
    """The product of probabilities in float32 is 0 or 1."""
    model, dense, pooled = made("esmm", {"clicked": 1, "bought": 1})
    with torch.no_grad():
        for place, logit in ((0, 1.0), (1, -1.0)):
            for tower in (model.click, model.conversion):
                tower[1].weight.zero_()
                tower[1].bias.fill_([60.0, -80.0][place])
            p = torch.tensor([60.0, -80.0][place], dtype=torch.float64).sigmoid()
            exact = -(-2 * p.log()).expm1().log() if place else -(2 * torch.tensor(-60.0).exp().double()).log()
            torch.testing.assert_close(model(dense, pooled)[0, 1].double(), exact, rtol=1e-6, atol=0)
            assert (model(dense, pooled)[0, 1] * logit) > 50
    model(dense, pooled).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    "relations,parents",
    [
        (None, {"clicked": [], "kind": ["clicked"], "bought": ["clicked", "kind"]}),
        ({"clicked": ["bought"]}, {"bought": [], "kind": [], "clicked": ["bought"]}),
        ({}, {"bought": [], "kind": [], "clicked": []}),
    ],
)
def test_dbmtl_matches_its_equations(relations, parents):
    model, dense, pooled = made("dbmtl", tower_mlp=[5, 4], relation_mlp=[3], relations=relations)
    w, x = weights(model), torch.cat([dense, *pooled.values()], 1)
    shared, names, related = layers(w, "bottom", x, 1), list(TASKS), {}
    for name, before in parents.items():
        k = names.index(name)
        own = layers(w, f"towers.{k}", shared, 2)
        related[name] = layers(w, f"relations.{k}", torch.cat([own, *(related[b] for b in before)], 1), 1)
    expected = [apply_linear(w, f"logits.{k}", related[name]) for k, name in enumerate(names)]
    torch.testing.assert_close(model(dense, pooled), torch.cat(expected, 1))


PEPNET = {"domain": ["age", "tags"], "personal": ["us*", "item"], "gate_mlp": [5], "tower_mlp": [6, 4]}


def compute_pepnet_logits(w, dense, pooled, domain, stops):
    """Return the logits of pepnet, Chang et al. 2023, row by row.

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
            for layer, size in enumerate(PEPNET["tower_mlp"]):
                scales = gate(f"gates.{layer}", [pooled["user"][b], pooled["item"][b]], e)
                hidden = layers(w, f"layers.{layer}.{k}", hidden, 1) * scales[k * size : (k + 1) * size]
            logits.append(apply_linear(w, f"towers.logits.{k}", hidden))
        rows.append(torch.cat(logits))
    return torch.stack(rows)


@pytest.mark.parametrize("domain", [True, False])
def test_pepnet_matches_its_equations_and_gradients(domain):
    of = schema(dims=(4, 8, 12))
    section = PEPNET if domain else PEPNET | {"domain": []}
    model = make("pepnet", of, 5, tasks=TASKS, **section)
    dense, pooled = inputs(of)
    given, w = [dense.requires_grad_(), *pooled.values(), *model.parameters()], weights(model)
    logits, factors = model(dense, pooled), torch.randn(ROWS, 5)
    expected, leaky = (compute_pepnet_logits(w, dense, pooled, domain, stops) for stops in (True, False))
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(leaky, expected)
    gradients, right, wrong = (torch.autograd.grad((x * factors).sum(), given) for x in (logits, expected, leaky))
    torch.testing.assert_close(gradients, right, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(gradients[0], wrong[0], rtol=1e-2)


@pytest.mark.parametrize("name", [name for name in KEYS if name != "esmm"])  # esmm requires two tasks
def test_multi_task_model_with_one_task_returns_one_logit(name):
    model, dense, pooled = made(name, {"y": 1})
    assert model(dense, pooled).shape == (ROWS,)
