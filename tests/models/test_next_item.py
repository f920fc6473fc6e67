"""sasrec and hstu, compared with their equations: one row, item and pair of items at a time."""

import pytest
import torch
from made import (
    LENGTH,
    LENGTHS,
    ROWS,
    SPARSE,
    apply_linear,
    assert_learns,
    assert_no_nan,
    assert_rows_independent,
    get_id_vectors,
    inputs,
    loss,
    normalize_vectors,
    schema,
    weights,
)
from made import make as make_model
from operators import OperatorCounter
from standin import use_stand_in_gpu
from torch.nn.functional import layer_norm, silu

from raytrec.models.next_item import Layer
from raytrec.models.parts import packed_sequences
from raytrec.models.parts.packed_sequences import PackedSequences

SIZES = {"max_length": LENGTH, "dropout": 0.0, "negatives": "negatives", "max_negatives": 3}
NAMES = ["sasrec", "hstu"]


def make_items_schema(**changes):
    return schema("user", "item", "history", "negatives", dense=(), **changes)


def make(name, outputs=1, vectors=False, of=None, **keys):
    return make_model(name, of or make_items_schema(), outputs, vectors=vectors, **SIZES | keys)


def add_positions(model, past_TD, positions):
    """Return the item vectors plus their position vectors."""
    count = len(past_TD)
    places = range(count) if positions == "order" else range(count - 1, -1, -1)
    at = weights(model)["positions"]
    return torch.stack([e * len(e) ** 0.5 + at[p] for e, p in zip(past_TD, places, strict=True)])


def compute_sasrec_states(model, past_TD, heads, positions, times):
    """Return the state after each item, [T, D]."""
    w, count, dim = weights(model), len(past_TD), past_TD.shape[1]
    x = add_positions(model, past_TD, positions)
    for i in range(len(model.blocks)):
        of = weights(model, f"blocks.{i}.")
        n = layer_norm(x, (dim,), of["norms.0.weight"], of["norms.0.bias"])
        q, k, v = apply_linear(of, "attention.inputs", n).split(dim, 1)
        read, size = [], dim // heads
        for t in range(count):
            parts = []
            for h in range(heads):
                own = slice(h * size, (h + 1) * size)
                shares = torch.stack([q[t, own] @ k[s, own] / size**0.5 for s in range(t + 1)]).softmax(0)
                parts.append(sum(a * v[s, own] for s, a in enumerate(shares)))
            read.append(torch.cat(parts))
        x = x + apply_linear(of, "attention.output", torch.stack(read))
        n = layer_norm(x, (dim,), of["norms.1.weight"], of["norms.1.bias"])
        x = x + apply_linear(of, "network.3", apply_linear(of, "network.0", n).relu())
    return layer_norm(x, (dim,), w["norm.weight"], w["norm.bias"])


def compute_hstu_states(model, past_TD, heads, positions, times):
    """Return the state after each item, [T, D]."""
    count, dim = past_TD.shape
    x = add_positions(model, past_TD, positions)
    for i in range(len(model.layers)):
        of = weights(model, f"layers.{i}.")
        width = of["inputs.weight"].shape[0] // 4
        u, v, q, k = silu(layer_norm(x, (dim,)) @ of["inputs.weight"].T).split(width, 1)
        read, size = torch.zeros(count, width), width // heads
        for h in range(heads):
            own = slice(h * size, (h + 1) * size)
            for t in range(count):
                for s in range(t + 1):
                    score = q[t, own] @ k[s, own] + of["distances"][t - s]
                    if times is not None:
                        between = (times[t] - times[s]).clamp(min=1)
                        place = between.log() / torch.tensor(1.35).double().log()
                        score = score + of["times"][min(int(place), 127)]
                    read[t, own] = read[t, own] + score * torch.sigmoid(score) / LENGTH * v[s, own]
        x = x + apply_linear(of, "output", u * layer_norm(read, (width,)))
    return x


def make_timed_schema():
    return make_items_schema(history=SPARSE["history"] | {"side_features": ["price", "at"]})


@pytest.mark.parametrize(
    "name,kind,keys",
    [
        ("sasrec", "softmax", {"heads": 2, "feedforward": 6}),
        ("sasrec", "bce", {"positions": "order"}),
        ("sasrec", "bpr", {"normalize": True, "temperature": 0.3, "blocks": 1}),
        ("hstu", "softmax", {"heads": 2}),
        ("hstu", "softmax", {"width": 12, "positions": "order", "normalize": False, "temperature": 1.0}),
        ("hstu", "softmax", {"time": "at"}),
    ],
)
def test_next_item_models_match_their_equations(name, kind, keys):
    timed = "time" in keys
    of = make_timed_schema() if timed else make_items_schema()
    model = make(name, of=of, loss=kind, **keys)
    times = torch.tensor([[1e9, 9.99e8, 9.98e8, 5e8, 0.0]] * ROWS, dtype=torch.float64)
    dense, found = inputs(of, side_features=torch.stack([times * 0, times], 2) if timed else None)
    given, queries = model(dense, found), model.query(dense, found)
    normalize, temperature = model.config.normalize, model.config.temperature
    scaled = normalize_vectors if normalize else lambda x: x
    states = compute_sasrec_states if name == "sasrec" else compute_hstu_states
    for i, count in enumerate(LENGTHS):
        if not count:
            assert given[i].tolist() == [0, 0] and not queries[i].any()
            continue
        history, at = get_id_vectors(found, i).flip(0), times[i, :count].flip(0) if timed else None
        after = scaled(states(model, history, keys.get("heads", 1), keys.get("positions", "recency"), at))
        item, others = scaled(found["item"][i]), scaled(get_id_vectors(found, i, "negatives"))
        torch.testing.assert_close(queries[i], after[-1])
        torch.testing.assert_close(given[i, 0], after[-1] @ item / temperature)
        total = 0
        for state, following in zip(after, [*scaled(history[1:]), item], strict=True):
            own = state @ following / temperature
            total = total + loss(kind, own, list(others @ state / temperature))
        torch.testing.assert_close(given[i, 1], total / LENGTH)
    torch.testing.assert_close(model.item(dense, {"item": found["item"]}), scaled(found["item"]))
    assert_rows_independent(model, dense, found)
    assert_learns(model, dense, found, unused=("user",))


@pytest.mark.parametrize("name", NAMES)
def test_next_item_models_handle_evaluation_and_empty_histories(name):
    model, (dense, found) = make(name), inputs(make_items_schema())
    assert not model.eval()(dense, found)[:, 1].any()
    assert not assert_no_nan(model.train(), *inputs(make_items_schema(), lengths=(0, 0), counts=(0, 3))).any()


def test_sasrec_returns_several_outputs_and_vectors():
    model, (dense, found) = make("sasrec", 2, True, temperature=0.5), inputs(make_items_schema())
    given, query, item = model(dense, found), model.query(dense, found), model.item(dense, found)
    assert given.shape == (ROWS, 2 + 1 + 2 * 8) and query.shape == (ROWS, 3, 8)
    torch.testing.assert_close(given[:, 1], (query[:, 1] * item).sum(1) / 0.5)
    torch.testing.assert_close(given[:, 3:], torch.cat([query[:, 2] / 0.5, item], 1))
    # The model's own loss uses the query of the last output, not the exported vectors.
    given[:, 2].sum().backward()
    assert model.queries.weights.grad.any(1).tolist() == [False, True, False]
    assert make("sasrec", negatives=None)(dense, found).shape == (ROWS,)


def test_attention_dropout_applies_only_in_training():
    model, (dense, found) = make("sasrec", attention_dropout=0.5), inputs(make_items_schema())
    assert not torch.equal(model(dense, found), model(dense, found))
    assert torch.equal(model.eval()(dense, found), model(dense, found))


def test_packed_sequences_with_host_lengths_never_wait_for_gpu(monkeypatch):
    monkeypatch.setattr(packed_sequences, "GPU_GROUPS", packed_sequences.CPU_GROUPS)  # to compare with the CPU
    lengths = torch.tensor([2, 0, 5, 5, 1, 0, 3, 4, 2, 5, 0, 1], dtype=torch.int32)
    present = torch.arange(5) < lengths.unsqueeze(1)
    values = torch.randn(len(lengths), 5, 3)
    with use_stand_in_gpu() as gpu:
        here = present.to("cuda"), values.to("cuda")
        gpu.waits.clear()
        packed = PackedSequences(here[0], lengths)
        found = packed.pack(here[1])
        groups, newest = packed.to_chronological(found), packed.select_newest(found)
        back = packed.from_chronological(groups)
        assert not gpu.waits and torch.equal(back.cpu(), found.cpu())
        assert torch.equal(found.cpu(), values[present])
        assert torch.equal(newest.cpu(), values[:, 0].where(lengths.unsqueeze(1) > 0, 0))
        assert [len(group) * group.shape[1] for group in groups] == [there.numel() for there in packed.group_masks]
        plain = PackedSequences(present)
        for name, value in vars(plain).items():
            given = getattr(packed, name)
            of_both = zip(value, given, strict=True) if isinstance(value, list) else [(value, given)]
            assert all(a == b if isinstance(a, int) else torch.equal(a, b.cpu()) for a, b in of_both), name


def test_gpus_process_fewer_groups_of_rows_with_fewer_kernels():
    present, lengths = torch.ones(16, 4, dtype=torch.bool), torch.full((16,), 4)
    with use_stand_in_gpu():
        groups = len(PackedSequences(present.cuda(), lengths).group_masks)
    assert (groups, len(PackedSequences(present, lengths).group_masks)) == (2, 8)


def test_time_buckets_on_gpu_have_the_gradients_of_an_embedding_without_a_sort():
    draw = torch.Generator().manual_seed(0)
    buckets = torch.randint(0, 7, (3, 5, 5), generator=draw, dtype=torch.int32)
    factors, gradients = torch.randn(3, 5, 5, generator=draw), []
    for device in ("cpu", "cuda"):
        with use_stand_in_gpu() as gpu, OperatorCounter() as counter:
            layer = Layer(8, make("hstu", time="at", of=make_timed_schema()).config).to(device)
            with torch.no_grad():
                layer.times.copy_(torch.arange(128.0).to(device))
            gpu.waits.clear()
            bias = layer._bias(5, buckets.to(device))
            (bias * factors.to(device)).sum().backward()
            gradients.append(layer.times.grad.cpu())
            assert not any(wait.ours for wait in gpu.waits)
        assert counter.calls["aten::embedding_dense_backward"] == (device == "cpu")
    expected = torch.zeros(128).index_add(0, buckets.flatten(), factors.flatten())
    torch.testing.assert_close(gradients, [expected] * 2)


def test_long_rows_are_padded_to_at_most_twice_their_length():
    lengths = torch.tensor([3, 1700, 90, 0, 40, 5, 900, 12, 200, 7, 60, 1])
    packed = packed_sequences.PackedSequences(torch.arange(2048) < lengths.unsqueeze(1), lengths)
    assert sum(map(len, packed.group_masks)) == len(lengths)
    for mask_bT in packed.group_masks:
        padded_length = mask_bT.shape[1]
        assert padded_length <= packed_sequences.MIN_SPLIT_LENGTH or 2 * int(mask_bT.sum(1).min()) >= padded_length - 1
