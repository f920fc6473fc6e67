"""BST against its equations, one row, head and position at a time, in plain torch."""

import pytest
import torch
from for_a_target import DIM, LENGTH, assert_learns, assert_rows_alone, inputs, layers, make, past, schema
from torch.nn.functional import layer_norm

from raytrec.common.errors import ConfigError
from raytrec.config.models import SECTIONS
from raytrec.models import build_model


def leaky(x):
    return torch.where(x > 0, x, 0.01 * x)


def attended(of, x, heads):
    """Multi-head self-attention: [n, D] → [n, D]."""
    q, k, v = (x @ part.T for part in of["attention.in_proj_weight"].chunk(3))
    size, read = DIM // heads, []
    for t in range(len(x)):
        parts = []
        for h in range(heads):
            own = slice(h * size, (h + 1) * size)
            weights = torch.stack([q[t, own] @ k[s, own] / size**0.5 for s in range(len(x))]).softmax(0)
            parts.append(sum(a * v[s, own] for s, a in enumerate(weights)))
        read.append(torch.cat(parts) @ of["attention.out_proj.weight"].T)
    return torch.stack(read)


@pytest.mark.parametrize("outputs,blocks,heads", [(1, 1, 2), (2, 2, 4)])
def test_equations(outputs, blocks, heads):
    of = schema()
    model = make("bst", of, outputs, blocks=blocks, heads=heads, feedforward=6, top_mlp=[10, 4])
    dense, found = inputs(of)
    given, w = model(dense, found), dict(model.named_parameters())
    for i in range(len(dense)):
        x = torch.stack([found["item"][i], *past(found, i)])
        x = x + w["transformers.0.position"][: len(x)]
        for block in range(blocks):
            name = f"transformers.0.layers.{block}."
            own = {k.removeprefix(name): v for k, v in w.items()}
            s = x + attended(own, x, heads)
            s = layer_norm(s, (DIM,), own["norms.0.weight"], own["norms.0.bias"])
            hidden = leaky(s @ own["feedforward.0.weight"].T + own["feedforward.0.bias"])
            x = s + hidden @ own["feedforward.2.weight"].T + own["feedforward.2.bias"]
            x = layer_norm(x, (DIM,), own["norms.1.weight"], own["norms.1.bias"])
        x = torch.cat([x.flatten(), torch.zeros((1 + LENGTH) * DIM - x.numel())])
        x = torch.cat([dense[i], *(found[feature][i] for feature in ("user", "item", "tags")), x])
        x = layers(w, "top", x, 2, 2, lambda _: leaky)
        torch.testing.assert_close(given[i].reshape(-1), w["logit.weight"] @ x + w["logit.bias"])
    assert given.shape == ((6,) if outputs == 1 else (6, 2))


def test_rows_alone_and_what_it_learns():
    of = schema()
    model = make("bst", of)
    assert_rows_alone(model, *inputs(of))
    assert_learns(model, *inputs(of))
    torch.testing.assert_close(model.eval()(*inputs(of)), model.train()(*inputs(of)))


def test_no_dense_columns_and_empty_sequences():
    of = schema(dense=[])
    model, (dense, found) = make("bst", of), inputs(of, lengths=(0, 0))
    model(dense, found).sum().backward()
    assert not found["history"].vectors.grad.any()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_refused():
    for of, keys, says in [
        (schema(sparse={f: {"table": f} for f in ("user", "item", "tag")}), {}, "no sequence"),
        (schema(), {"target": "user"}, "dim 8, and those of its target user 4"),
        (schema(), {"heads": 3}, "model.heads is 3"),
    ]:
        with pytest.raises(ConfigError, match=says):
            build_model(of, SECTIONS["bst"].model_validate({"name": "bst"} | keys))
