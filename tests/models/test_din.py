"""DIN against its definition, row by row and id by id, in plain torch."""

import pytest
import torch
from for_a_target import assert_learns, assert_rows_alone, inputs, layers, make, past, prelu, schema

from raytrec.common.errors import ConfigError
from raytrec.config.models import SECTIONS
from raytrec.models import build_model


def weighted(w, past, target, sizes):
    """Σ of the ids' vectors, each times the unit's weight for it and the target."""
    total = torch.zeros_like(target)
    for e in past:
        x = torch.cat([e, target, e - target, e * target])
        x = layers(w, "attention.0.score", x, sizes, 2, lambda name: prelu(w[f"{name}.weight"]))
        last = f"attention.0.score.{2 * sizes}"
        total = total + (w[f"{last}.weight"] @ x + w[f"{last}.bias"]) * e
    return total


@pytest.mark.parametrize("outputs,target", [(1, None), (3, "item")])
def test_equations(outputs, target):
    of = schema()
    model = make("din", of, outputs, attention_mlp=[6, 3], top_mlp=[10, 4], target=target)
    dense, found = inputs(of)
    given, w = model(dense, found), dict(model.named_parameters())
    for i in range(len(dense)):
        interest = weighted(w, past(found, i), found["item"][i], 2)
        x = torch.cat([dense[i], found["user"][i], interest, found["item"][i], found["tags"][i]])
        x = layers(w, "top", x, 2, 2, lambda name: prelu(w[f"{name}.weight"]))
        expected = w["logit.weight"] @ x + w["logit.bias"]
        torch.testing.assert_close(given[i].reshape(-1), expected)
    assert given.shape == ((6,) if outputs == 1 else (6, 3))


def test_rows_alone_and_what_it_learns():
    of = schema()
    model = make("din", of, top_mlp=[])
    assert_rows_alone(model, *inputs(of))
    assert_learns(model, *inputs(of))


def test_no_dense_columns_and_empty_sequences():
    of = schema(dense=[])
    model, (dense, found) = make("din", of), inputs(of, lengths=(0, 0))
    model(dense, found).sum().backward()
    assert not found["history"].vectors.grad.any()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_refused():
    for of, keys, says in [
        (schema(sparse={f: {"table": f} for f in ("user", "item", "tag")}), {}, "no sequence"),
        (schema(), {"target": "itm"}, "did you mean 'item'"),
        (schema(), {"target": "user"}, "dim 8, and those of its target user 4"),
    ]:
        with pytest.raises(ConfigError, match=says):
            build_model(of, SECTIONS["din"].model_validate({"name": "din"} | keys))
