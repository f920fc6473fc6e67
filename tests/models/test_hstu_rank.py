"""hstu_rank, compared with its equations in plain torch: one row, token and pair of tokens at a time."""

from math import cos, log, pi, sin, sqrt

import pytest
import torch
from made import (
    COUNTS,
    DIM,
    LENGTH,
    LENGTHS,
    ROWS,
    apply_linear,
    assert_learns,
    assert_no_nan,
    assert_rows_independent,
    inputs,
    make,
    weights,
)
from torch import nn
from torch.nn.functional import layer_norm, silu
from torch.utils.flop_counter import FlopCounterMode

from raytrec.common.errors import ConfigError
from raytrec.config.features import resolve_features
from raytrec.config.models import SECTIONS
from raytrec.config.schema import Schema
from raytrec.models.inputs import REQUESTS, RequestInputs, Sequence
from raytrec.scoring.manifest import list_inputs
from raytrec.scoring.single_rows import make_example_input, rewrite_for_single_rows

SPARSE = {
    "user": {"table": "user"},
    "item": {"table": "item"},
    "shop": {"table": "shop"},
    "tags": {"table": "user", "pooling": "mean"},
    "history": {"table": "item", "pooling": "sequence", "side_features": ["at", "bits", "watched"]},
    "shops": {"table": "shop", "pooling": "sequence"},
}
TABLES = {"user": {"rows": 9, "dim": DIM}, "item": {"rows": 9, "dim": DIM}, "shop": {"rows": 9, "dim": 4}}
DENSE = ["age", "price", "now"]
ALL = {"actions": {"bits": 2, "watched": [0.5, 2]}, "time": "at", "request_time": "now", "candidate": ["price"]}
TOWERS = {"click": 1, "kind": 2}
HOUR_S = 3600.0


def make_schema(dense=DENSE, **parts):
    return Schema.parse({"labels": ["y"], "dense": dense, "sparse": SPARSE, "tables": TABLES} | parts, "test")


def make_ranker(dense=DENSE, tasks=TOWERS, **keys):
    """Return a model in training mode and its schema, without dropout."""
    keys = {"max_length": LENGTH, "dim": 12, "heads": 2, "encoder": 6, "tower_mlp": [5], "dropout": 0.0} | keys
    of = make_schema(dense)
    model = make("hstu_rank", of, sum(tasks.values()), tasks=tasks, **keys)
    with torch.no_grad():  # larger weights, so that the history has a large effect on scores
        for parameter in model.parameters():
            parameter.mul_(3)
    return model, of


def make_inputs(of, lengths=LENGTHS, now=1e5):
    """Return dense columns and inputs; the times of events are between 0 and `now`."""
    torch.manual_seed(3)
    dense, found = inputs(of, lengths)
    rows = len(lengths)
    if "now" in of.dense:
        dense[:, of.dense.index("now")] = now + HOUR_S * torch.arange(rows)
    at = (torch.rand(rows, LENGTH) * now).sort(descending=True).values
    watched = torch.randint(0, 7, (rows, LENGTH)) / 2  # some numbers equal a threshold
    sides = torch.stack([at, torch.randint(-1, 4, (rows, LENGTH)), watched], 2).double()
    found["history"] = found["history"]._replace(side_features=sides * found["history"].present.unsqueeze(2))
    return dense, found


def encode(w, name, x):
    """Apply an MLP from vectors to tokens."""
    h = apply_linear(w, f"{name}.0", x)
    gate = layer_norm(h, h.shape, w[f"{name}.1.norm.weight"], w[f"{name}.1.norm.bias"])
    h = apply_linear(w, f"{name}.2", h * torch.sigmoid(gate))
    return layer_norm(h, h.shape, w[f"{name}.3.weight"], w[f"{name}.3.bias"])


def list_actions(keys, side):
    """Return the values of all actions of an event."""
    values = [(max(int(side[1]), 0) >> bit) & 1 for bit in range(2)] + [side[2] >= 0.5, side[2] >= 2]
    return torch.tensor([float(value) for value in values]) if keys["actions"] else None


def list_tokens(w, keys, dense, found, i):
    """Return the tokens of row i: those of the context, those of events from the oldest, and the candidate."""
    context = [found[name][i] for name in ("user", "tags") if name not in keys["candidate"]]
    context += [dense[i, :1]] if keys["dense"] else []
    tokens = [apply_linear(w, f"context_layers.{n}", x) for n, x in enumerate(context)]
    for place in reversed(range(int(found["history"].present[i].sum()))):
        side = found["history"].side_features[i, place]
        vectors = torch.cat([found["history"].vectors[i, place], found["shops"].vectors[i, place]])
        event, positions = [encode(w, "item_encoder", vectors)], w["positions"][place]
        if keys["actions"]:
            action = encode(w, "actions.encoder", list_actions(keys, side))
            event = [event[0], action] if keys["interleave"] else [event[0] + action]
        for token, position in zip(event, positions.chunk(len(event)), strict=True):
            if keys["time"]:
                now = dense[i, 2].double() if keys["request_time"] else found["history"].side_features[i, 0, 0]
                bucket = int(log(max(float(now - side[0]), 1.0)) / log(1.35))
                position = position + w["times"][min(bucket, 127)]
            tokens.append(token + position)
    return [*tokens, encode(w, "item_encoder", torch.cat([found["item"][i], found["shop"][i]])) + w["candidate"]]


def apply_layers(model, tokens, heads):
    """Apply all layers to the tokens of a row and return the state of its candidate."""
    for layer in model.layers:
        w, states = weights(layer), []
        normed = [layer_norm(x, x.shape, w["norm.weight"], w["norm.bias"], 1e-6) for x in tokens]
        parts = [apply_linear(w, "inputs", x).chunk(4) for x in normed]
        for i, x in enumerate(tokens):
            read = []
            for head in range(heads):
                total = 0
                for j in range(i + 1):
                    k, v, q = parts[j][0].chunk(heads), parts[j][1].chunk(heads), parts[i][2].chunk(heads)
                    a = silu(q[head] @ k[head] / sqrt(len(q[head]))) / layer.tokens
                    total = total + a * v[head]
                read.append(total)
            r, u = torch.cat(read), silu(parts[i][3])
            y = torch.cat([u, r, u * layer_norm(r, r.shape, w["read_norm.weight"], w["read_norm.bias"], 1e-6)])
            states.append(x + w["output.weight"] @ y)
        tokens = states
    return tokens[-1]


def compute_logits(model, keys, dense, found, i):
    """Return the logits of row i, [columns]."""
    w = weights(model)
    state = apply_layers(model, list_tokens(w, keys, dense, found, i), keys["heads"])
    if keys["request_time"]:
        angles = [2 * pi * (float(dense[i, 2]) % period / period) for period in (86400, 604800)]
        state = apply_linear(w, "clock", torch.cat([state, torch.tensor([f(a) for f in (cos, sin) for a in angles])]))
    state = layer_norm(state, state.shape, w["norm.weight"], w["norm.bias"])
    columns = [dense[i, n : n + 1] for n, name in enumerate(keys["dense"]) if name in keys["candidate"]]
    columns += [found[name][i] for name in SPARSE if name in ("item", "shop", *keys["candidate"])]
    state = state * encode(w, "candidate_encoder", torch.cat(columns))
    logits = []
    for task in range(len(keys["tasks"])):
        h = torch.relu(apply_linear(w, f"towers.towers.{task}.0", state))
        logits.append(apply_linear(w, f"towers.logits.{task}", h))
    return torch.cat(logits)


CASES = {
    "all": ALL,
    "added": ALL | {"interleave": False, "blocks": 1, "heads": 1, "width": 8},
    "no actions": ALL | {"actions": {}, "request_time": None, "dense": ["age", "price"], "width": 8},
    "items alone": {"candidate": ["user", "tags"], "dense": [], "tasks": {"click": 1}, "blocks": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_hstu_rank_matches_its_equations(name):
    keys = {"interleave": True, "time": None, "request_time": None, "actions": {}, "heads": 2} | CASES[name]
    keys = {"dense": DENSE, "tasks": TOWERS} | keys
    model, of = make_ranker(**keys)
    dense, found = make_inputs(of)
    given = model(dense, found)
    assert given.shape == ((ROWS, 3) if keys["tasks"] == TOWERS else (ROWS,))
    expected = [compute_logits(model, keys, dense, found, i) for i in range(ROWS)]
    torch.testing.assert_close(given.reshape(ROWS, -1), torch.stack(expected))


@pytest.mark.parametrize("name", CASES)
def test_hstu_rank_keeps_rows_independent_and_learns(name):
    model, of = make_ranker(**CASES[name])
    assert_rows_independent(model, *make_inputs(of))
    assert_learns(model, *make_inputs(of))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model(*make_inputs(of))).all()


def test_hstu_rank_accepts_empty_histories():
    model, of = make_ranker(**CASES["items alone"])
    assert_no_nan(model, *make_inputs(of, lengths=(0, 0)))


def select_rows(x, places_N):
    return Sequence(*(p if p is None else p[places_N] for p in x)) if isinstance(x, Sequence) else x[places_N]


def make_requests(of, candidates=COUNTS):
    """Return dense columns and inputs of requests with several candidates, and of rows with one candidate each."""
    dense, found = make_inputs(of)
    requests_N = torch.arange(ROWS).repeat_interleave(torch.tensor(candidates))
    dense_Nn = dense[requests_N].clone()
    dense_Nn[:, 1] = torch.randn(len(requests_N))
    items = {name: torch.randn(len(requests_N), of.get_feature_dim(name)) for name in ("item", "shop")}
    dense_of_requests = dense * torch.tensor([1.0, 0.0, 1.0])  # columns of candidates are 0
    requests = RequestInputs(requests_N, dense_of_requests, max(candidates))
    rows = {name: select_rows(x, requests_N) for name, x in found.items()}
    return (dense_Nn, found | items | {REQUESTS: requests}), (dense_Nn, rows | items)


@pytest.mark.parametrize("name", ["all", "added"])
def test_candidates_of_a_request_score_like_rows(name):
    model, of = make_ranker(**CASES[name])
    requests, rows = make_requests(of)
    scores = [model(*of_form) for of_form in (requests, rows)]
    torch.testing.assert_close(*scores)
    gradients = [torch.autograd.grad(each.square().mean(), [*model.parameters()]) for each in scores]
    torch.testing.assert_close(*gradients)


def test_history_is_encoded_once_per_request():
    model, of = make_ranker(**ALL)
    (dense, found), _ = make_requests(of)
    counts = []
    model.layers[0].norm.register_forward_hook(lambda _, given, __: counts.append(len(given[0])))
    model(dense, found)
    assert counts == [3 * ROWS + 2 * sum(LENGTHS), sum(COUNTS)]


class ProgramModule(nn.Module):
    """Model whose inputs are tensors, as in an export."""

    def __init__(self, model, entries):
        super().__init__()
        self.model, self.entries = model, entries

    def forward(self, *tensors):
        by_entry = {(entry.kind, entry.feature): t for entry, t in zip(self.entries, tensors, strict=True)}
        found = {name: t for (kind, name), t in by_entry.items() if kind == "bag"}
        for name in ("history", "shops"):
            found[name] = Sequence(*(by_entry.get((kind, name)) for kind in ("vectors", "present", "side_features")))
        return (self.model(by_entry["dense", ""], found),)


@pytest.mark.survive  # exporting takes seconds
@pytest.mark.parametrize("candidate", [[], ["price"]])
def test_exported_history_is_encoded_once_per_user(candidate):
    keys = ALL | {"candidate": candidate, "max_length": 20}
    model, of = make_ranker(**keys)
    section = SECTIONS["hstu_rank"].model_validate({"name": "hstu_rank"} | keys)
    entries = list_inputs(resolve_features(of, section))
    shapes, examples = {0: torch.export.Dim("rows", min=1)}, tuple(make_example_input(each, 3) for each in entries)
    module = ProgramModule(model.eval(), entries)
    with torch.no_grad():
        program = torch.export.export(module, examples, dynamic_shapes=(tuple(shapes for _ in entries),), strict=False)
    program = program.module(check_guards=False)
    of_rows = ("item", "shop", "") if candidate else ("item", "shop")
    once = {place for place, each in enumerate(entries) if each.feature not in of_rows}
    columns = [place for place, name in enumerate(DENSE) if candidate and name not in candidate]
    rewritten, flops = rewrite_for_single_rows(program, entries, once, columns), []
    for users_B in (torch.zeros(40, dtype=torch.long), torch.arange(40) // 20):
        users = int(users_B[-1]) + 1
        few = [make_example_input(each, users if place in once else 40) for place, each in enumerate(entries)]
        columns_Un = torch.randn(users, len(DENSE))
        if candidate:
            few[0][:, columns] = columns_Un[users_B][:, columns]
        few.extend([users_B, columns_Un])
        whole = [t[users_B] if place in once else t for place, t in enumerate(few[:-2])]
        for call in (lambda whole=whole: program.forward(*whole), lambda few=few: rewritten(*few)):
            with torch.inference_mode(), FlopCounterMode(display=False) as counter:
                scores = call()[0]
            flops.append((counter.get_total_flops(), scores))
        (whole_flops, expected), (once_flops, actual) = flops[-2:]
        largest = expected.abs().max()  # about 30
        torch.testing.assert_close(actual / largest, expected / largest, rtol=0, atol=1e-6)
        assert once_flops < whole_flops / 8


def test_higher_bits_and_later_times_do_not_change_scores():
    model, of = make_ranker(**ALL)
    dense, found = make_inputs(of)
    now_B1 = dense[:, of.dense.index("now"), None].double()

    def score(times, bits):
        sides = found["history"].side_features.clone()
        sides[:, :, 0] = times
        sides[:, :, 1] = bits
        return model(dense, found | {"history": found["history"]._replace(side_features=sides)})

    assert torch.equal(score(now_B1, 2), score(now_B1 + 3600, 2 + 4 + 2**40))
    assert not torch.equal(score(now_B1, 2), score(-3600.0, 2))


@pytest.mark.parametrize(
    "keys, parts, words",
    [
        ({"actions": {"at": 2, "no": 1}}, {}, "'no' is not a side feature of history"),
        ({"time": "age"}, {}, "'age' is not a side feature of history"),
        ({"heads": 5}, {}, "model.dim is 12"),
        ({"candidate": ["cost"]}, {}, "'cost' matches no feature or dense column"),
        ({"request_time": "price", "candidate": ["price"]}, {}, "'price' is a column of candidates"),
        ({"request_time": "now"}, {"scale": {"now": {"std": 2.0}}}, "'now' is scaled"),
        ({}, {"candidates": ["y", "item", "shop", "price"]}, "price is a column of candidates"),
    ],
)
def test_hstu_rank_rejects_wrong_columns(keys, parts, words):
    with pytest.raises(ConfigError, match=words):
        make("hstu_rank", make_schema(**parts), tasks={"y": 1}, **{"dim": 12} | keys)
