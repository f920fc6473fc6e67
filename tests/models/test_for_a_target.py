"""Target-attention models sequence, din, dien and bst, compared with their equations in plain torch: one row,
head and id at a time."""

import pytest
import torch
from made import (
    DIM,
    LENGTH,
    ROWS,
    apply_linear,
    assert_learns,
    assert_no_nan,
    assert_rows_independent,
    get_id_vectors,
    inputs,
    layers,
    make,
    prelu,
    schema,
    weights,
)
from operators import OperatorCounter
from standin import use_stand_in_gpu
from torch.nn.functional import layer_norm, logsigmoid
from torch.utils import _pytree as pytree

from raytrec.models import dien
from raytrec.models.inputs import Sequence

DIMS = (4, DIM, 12)
ONE_DIM = (DIM, DIM, DIM)  # the model `sequence` needs equal dims
KEYS = {"din": {"top_mlp": []}, "bst": {}, "dien": {"negatives": "negatives"}, "sequence": {}}


def make_target_schema(name="din", *more, dense=("age", "price")):
    """Return a Schema; its features have different dims if the model supports that."""
    return schema(
        *("user", "history", "item", "tags", *more), dims=ONE_DIM if name == "sequence" else DIMS, dense=dense
    )


def made(name, **changes):
    """Return a model, its dense columns and its inputs."""
    negatives = ["negatives"] * (name == "dien")
    dense = changes.pop("dense", ("age", "price"))
    of = make_target_schema(name, *negatives, dense=dense)
    counts = (LENGTH,) * len(changes.get("lengths", range(ROWS)))
    return make(name, of, max_length=LENGTH, **KEYS[name]), *inputs(of, counts=counts, **changes)


@pytest.mark.parametrize("name", KEYS)
def test_target_models_keep_rows_independent_and_learn(name):
    assert_rows_independent(*made(name))
    assert_learns(*made(name))
    model, dense, found = made(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model(dense, found)).all()


@pytest.mark.parametrize("name", KEYS)
def test_target_models_accept_empty_sequences(name):
    assert_no_nan(*made(name, dense=(), lengths=(0, 0)))


def test_dien_gru_runs_in_float32_under_autocast():
    model, dense, found = made("dien")
    seen = {}

    def look(name):
        def hook(_, given):
            seen[name] = torch.is_autocast_enabled("cuda"), given[0].dtype

        return hook

    with use_stand_in_gpu():
        on_gpu = pytree.tree_map_only(torch.Tensor, lambda value: value.to("cuda"), found)
        model.to("cuda")
        model.interests[0].extractor.register_forward_pre_hook(look("gru"))
        model.top.register_forward_pre_hook(look("mlp"))
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(dense.to("cuda"), on_gpu)
        assert torch.isfinite(logits).all()
    assert seen["gru"] == (False, torch.float32) and seen["mlp"][0]


def test_sequence_model_matches_its_equations():
    of, keys = make_target_schema("sequence"), {"attention_mlp": [6, 5], "bottom_mlp": [3], "top_mlp": [6]}
    model, (dense, found) = make("sequence", of, max_length=LENGTH, **keys), inputs(of)
    assert model.attention.target_of == {"history": "item"}
    w, of_dlrm = weights(model, "attention.0."), weights(model, "dlrm.")
    read = []
    for i in range(ROWS):
        target, ids = found["item"][i], get_id_vectors(found, i)
        total = torch.zeros(DIM)
        for place, e in enumerate(ids):
            x = torch.cat([e, target, e - target, e * target])
            h = layers(w, "score", x, 2, activation=lambda _: torch.sigmoid)
            total = total + e * torch.sigmoid((w["score.4.weight"] @ h)[0] + w["recency"][place]) / len(ids)
        read.append(total)
    x = layers(of_dlrm, "bottom", dense, 2)
    vectors = [x, found["user"], torch.stack(read), found["item"], found["tags"]]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(5) for j in range(i + 1, 5)]
    h = layers(of_dlrm, "top", torch.cat([x, torch.stack(pairs, 1)], 1), 1)
    torch.testing.assert_close(model(dense, found), apply_linear(of_dlrm, "logit", h)[:, 0])
    # The order of the ids changes the result.
    history = found["history"]
    turned = model(dense, found | {"history": Sequence(history.vectors.flip(1), history.present)})
    assert not torch.allclose(turned[-1], model(dense, found)[-1])


@pytest.mark.parametrize("outputs,target", [(1, None), (3, "item")])
def test_din_matches_its_equations(outputs, target):
    of, keys = make_target_schema(), {"attention_mlp": [6, 3], "top_mlp": [10, 4], "target": target}
    model, (dense, found) = make("din", of, outputs, max_length=LENGTH, **keys), inputs(of)
    given, w = model(dense, found), weights(model)
    for i in range(ROWS):
        target, interest = found["item"][i], torch.zeros(DIM)
        for e in get_id_vectors(found, i):
            x = torch.cat([e, target, e - target, e * target])
            x = layers(w, "attention.0.score", x, 2, 2, prelu(w))
            interest = interest + apply_linear(w, "attention.0.score.4", x) * e
        x = torch.cat([dense[i], found["user"][i], interest, target, found["tags"][i]])
        expected = apply_linear(w, "logit", layers(w, "top", x, 2, 2, prelu(w)))
        torch.testing.assert_close(given[i].reshape(-1), expected)
    assert given.shape == ((ROWS,) if outputs == 1 else (ROWS, 3))


def apply_gru_step(w, names, x, h, weight=1.0):
    """Apply DIEN's equations 2 to 5, and 7 to 9 with a weight: u, r, h̃, h. The weights of r, u and h̃ are
    stacked as in torch, where the sigmoid is the share that is kept, 1 − u."""
    given = (w[names[0]] @ x + w[names[1]]).chunk(3)
    from_h = (w[names[2]] @ h + w[names[3]]).chunk(3)
    r, u = torch.sigmoid(given[0] + from_h[0]), 1 - torch.sigmoid(given[1] + from_h[1])
    candidate = torch.tanh(given[2] + r * from_h[2])
    return (1 - weight * u) * h + weight * u * candidate


EXTRACTOR = [f"extractor.{kind}_l0" for kind in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")]
EVOLUTION = [f"evolution.cell.{kind}" for kind in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")]


def interests(w, past, target):
    """Return (the state after each id, oldest first; the last state of AUGRU)."""
    states, h = [], torch.zeros(DIM)
    for e in past:
        h = apply_gru_step(w, EXTRACTOR, e, h)
        states.append(h)
    state = torch.zeros(DIM)
    if states:
        shares = torch.stack([h @ w["attention.weight"] @ target for h in states]).softmax(0)
        for h, a in zip(states, shares, strict=True):
            state = apply_gru_step(w, EVOLUTION, h, state, a)
    return states, state


@pytest.mark.survive
def test_dien_interest_evolution_has_correct_gradients():
    torch.manual_seed(1)
    given = (ROWS, LENGTH, 3 * DIM), (ROWS, LENGTH, 1), (3 * DIM, DIM), (3 * DIM,)
    inputs = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in given]
    assert torch.autograd.gradcheck(dien._Evolve.apply, inputs)


def test_dien_interest_evolution_launches_ten_kernels_per_step():
    """Count GPU kernels, forward and backward."""
    counts = []
    for length in (5, 25):
        evolution = dien.AUGRU(DIM, DIM)
        steps, shares = torch.randn(ROWS, length, DIM), torch.rand(ROWS, length)
        with OperatorCounter() as operators:
            evolution(steps.requires_grad_(), shares).sum().backward()
        counts.append(operators.launched)
    assert (counts[1] - counts[0]) / 20 <= 10


@pytest.mark.parametrize("outputs,weight", [(1, None), (1, 0.25), (2, 1.0)])
def test_dien_matches_its_equations(outputs, weight):
    of = make_target_schema("dien", *["negatives"] * (weight is not None))
    keys = {"negatives": "negatives", "auxiliary_weight": weight} if weight else {}
    model = make("dien", of, outputs, max_length=LENGTH, top_mlp=[10, 4], **keys)
    dense, found = inputs(of, counts=(5, 5, 5, 1, 5, 3))
    given, w = model(dense, found), weights(model)
    for i in range(ROWS):
        ids = get_id_vectors(found, i).flip(0)
        states, interest = interests(weights(model, "interests.0."), ids, found["item"][i])
        x = torch.cat([dense[i], found["user"][i], interest, found["item"][i], found["tags"][i]])
        expected = apply_linear(w, "logit", layers(w, "top", x, 2, 2, prelu(w)))
        if weight:
            drawn, own = get_id_vectors(found, i, "negatives"), torch.zeros(())
            for t in range(len(ids) - 1):
                if (k := len(ids) - 2 - t) < len(drawn):  # id t + 1, with k more recent ids
                    own = own - logsigmoid(states[t] @ ids[t + 1])
                    own = own - (1 - torch.sigmoid(states[t] @ drawn[k])).log()
            expected = torch.cat([expected, weight * own.reshape(1)])
        torch.testing.assert_close(given[i].reshape(-1), expected, rtol=1e-4, atol=1e-5)
    assert given.shape == ((ROWS,) if outputs == 1 and not weight else (ROWS, outputs + bool(weight)))
    if weight:
        assert given[2:, -1].all() and not given[:2, -1].any()
        assert not model.eval()(dense, found)[:, -1].any()


def leaky_relu(x):
    return torch.where(x > 0, x, 0.01 * x)


def compute_self_attention(of, x, heads):
    """Apply BST's multi-head self-attention, [n, D] → [n, D]."""
    q, k, v = (x @ part.T for part in of["attention.in_proj_weight"].chunk(3))
    size, read = DIM // heads, []
    for t in range(len(x)):
        parts = []
        for h in range(heads):
            own = slice(h * size, (h + 1) * size)
            shares = torch.stack([q[t, own] @ k[s, own] / size**0.5 for s in range(len(x))]).softmax(0)
            parts.append(sum(a * v[s, own] for s, a in enumerate(shares)))
        read.append(torch.cat(parts) @ of["attention.out_proj.weight"].T)
    return torch.stack(read)


@pytest.mark.parametrize("outputs,blocks,heads", [(1, 1, 2), (2, 2, 4)])
def test_bst_matches_its_equations(outputs, blocks, heads):
    of, keys = make_target_schema(), {"blocks": blocks, "heads": heads, "feedforward": 6, "top_mlp": [10, 4]}
    model, (dense, found) = make("bst", of, outputs, max_length=LENGTH, **keys), inputs(of)
    given, w = model(dense, found), weights(model)
    torch.testing.assert_close(model.eval()(dense, found), given)
    for i in range(ROWS):
        x = torch.cat([found["item"][i : i + 1], get_id_vectors(found, i)])
        x = x + w["transformers.0.position"][: len(x)]
        for block in range(blocks):
            own = weights(model, f"transformers.0.layers.{block}.")
            s = x + compute_self_attention(own, x, heads)
            s = layer_norm(s, (DIM,), own["norms.0.weight"], own["norms.0.bias"])
            x = s + apply_linear(own, "feedforward.2", leaky_relu(apply_linear(own, "feedforward.0", s)))
            x = layer_norm(x, (DIM,), own["norms.1.weight"], own["norms.1.bias"])
        x = torch.cat([x.flatten(), torch.zeros((1 + LENGTH) * DIM - x.numel())])
        x = torch.cat([dense[i], *(found[feature][i] for feature in ("user", "item", "tags")), x])
        x = layers(w, "top", x, 2, 2, lambda _: leaky_relu)
        torch.testing.assert_close(given[i].reshape(-1), apply_linear(w, "logit", x))
    assert given.shape == ((ROWS,) if outputs == 1 else (ROWS, 2))
