"""train.compile: the same losses, weights and names as without, in evaluations and checkpoints, too."""

from functools import partialmethod

import pytest
import torch
from ranks import on_ranks
from small import a_schema, batches, build, config, train
from torch import nn

from raytrec.common.errors import ConfigError
from raytrec.common.machine import require_compiler

ROWS = {"sharding_type": "row_wise"}
# All of torch.compile but the C++ compiler, which takes long: `make parity` has that one, too.
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.survive)]


def trained(rank, world, backend):
    """(names of the dense state, its values, logits of an evaluation, compiled graphs)."""
    import torch._dynamo.utils

    from raytrec.checkpoint.state import LogicalState

    plain = nn.Module.compile
    nn.Module.compile = partialmethod(plain, backend=backend)
    torch.compiler.reset()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    try:
        settings = config(world, ROWS, compile=bool(backend), ema=0.9)
        step = build(settings)
    finally:
        nn.Module.compile = plain
    state, local = LogicalState(step.model, step.optimizer), batches(5, rank, world)[1]
    train(step, local[:4])
    (outputs,) = step.evaluate(iter(local[4:]))
    train(step, local[:1])
    weights = {name: value.clone() for name, value in state.dense.items()}
    return sorted(weights), weights, outputs["y"].logits, stats["unique_graphs"] - before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.survive), 2])
def test_a_compiled_model_learns_the_same(world, backend):
    plain = on_ranks(world, trained, None)
    for own, other in zip(plain, on_ranks(world, trained, backend), strict=True):
        assert own[0] == other[0], "checkpoints have the same names"
        for name, value in own[1].items():
            torch.testing.assert_close(other[1][name], value, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(other[2], own[2], rtol=1e-4, atol=1e-6)
        assert (own[3], other[3]) == (0, 2), "one for training and one for evaluation, whatever the sizes"


def trained_on_lengths(rank, world, name, dropout):
    """Of batches of other numbers of rows, with histories of other lengths, plain and compiled: each step's
    logits; and how many graphs there are compiled after each step."""
    import torch._dynamo.utils

    from raytrec.checks.parity.batches import make_local_batch, random_batches
    from raytrec.config.features import resolve_features

    sparse = {
        "item": {"table": "item"},
        "history": {"table": "item", "pooling": "sequence"},
        "negatives": {"table": "item", "pooling": "sequence"},
    }
    schema = a_schema(dense=[], sparse=sparse, tables={"item": {"rows": 31, "dim": 8}})
    model = {"name": name, "max_length": 12, "negatives": "negatives", "max_negatives": 3}
    model["dropout"] = dropout
    torch.compiler.reset()
    stats, plain, logits, graphs = torch._dynamo.utils.counters["stats"], nn.Module.compile, [], []
    before = stats["unique_graphs"]
    for compile in (False, True):
        nn.Module.compile = partialmethod(plain, backend="eager")
        try:
            settings = config(world, ROWS, model=model, compile=compile)
            step = build(settings, schema)
        finally:
            nn.Module.compile = plain
        features = resolve_features(schema, settings.model)
        for number, (rows, most) in enumerate([(24, 8), (31, 13), (24, 3), (40, 10), (24, 2), (13, 6)]):
            (whole,) = random_batches(schema, rows, 1, seed=number)
            g = torch.Generator().manual_seed(number)
            lengths = torch.randint(0, most, (rows,), generator=g)
            ids = torch.randint(0, 31, (int(lengths.sum()),), generator=g)
            bag = torch.arange(rows).repeat_interleave(lengths)
            whole.bags["history"] = ids, bag, torch.ones(len(ids))
            (outputs,) = train(step, [make_local_batch(whole, schema, [0, rows], 0, features)])
            logits.append(outputs["y"].logits)
            graphs.append(stats["unique_graphs"] - before)
    return logits[:6], logits[6:], graphs


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["sasrec", pytest.param("hstu", marks=pytest.mark.survive)])
def test_other_lengths_of_sequences_are_not_compiled_again(name, dropout):
    ((plain, compiled, graphs),) = on_ranks(1, trained_on_lengths, name, dropout)
    if not dropout:  # compiled, it draws other numbers
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
    assert graphs[:6] == [0] * 6 and graphs[6] == graphs[-1] > 0


def phases_of_compiling(rank, world):
    """The heartbeat's phase while a graph is compiled in a step, and after it."""
    from raytrec.worker.heartbeat import Heartbeat

    heartbeat, seen = Heartbeat(None, "attempt", 0, 60.0, every_s=60.0), []
    heartbeat.watch_compiler()
    heartbeat.tick("step", 3)

    def backend(graph, inputs):
        seen.append(heartbeat.phase)
        return graph

    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(3))
    heartbeat.close()
    return [*seen, heartbeat.phase]


def test_what_is_compiled_in_a_step_may_take_as_long_as_the_start():
    assert on_ranks(1, phases_of_compiling) == [["start", "step"]]


class Replayed:
    """A backend like a CUDA graph: whatever a compiled function gives lies where it lay before, so that each
    call writes over what the last one has given.

    Attributes:
        modes: of torch.compile. compiled: how many functions, forward and backward.
    """

    def __init__(self):
        self.modes, self.compiled = set(), 0

    def __call__(self, module, inputs, mode=None):
        from torch._dynamo.backends.common import aot_autograd

        self.modes.add(mode)
        return aot_autograd(fw_compiler=self._compile)(module, inputs)

    def _compile(self, module, inputs):
        from functorch.compile import make_boxed_func

        self.compiled, kept = self.compiled + 1, []

        def run(*inputs):
            given = module(*inputs)
            if not kept:
                kept.extend(each.clone() if torch.is_tensor(each) else each for each in given)
            for each, own in zip(given, kept, strict=True):
                if torch.is_tensor(each):
                    own.copy_(each)
            return [own.detach() if torch.is_tensor(own) else own for own in kept]

        return make_boxed_func(run)


def replayed(rank, world, compile):
    """(weights, logits of each batch, modes, compiled functions): of whole batches and a smaller one, in
    training, then in evaluation."""
    backend, plain, kept = Replayed(), nn.Module.compile, []
    nn.Module.compile = partialmethod(plain, backend=backend)
    torch.compiler.reset()
    try:
        step = build(config(world, ROWS, compile=compile))
        step.head.register_forward_pre_hook(
            lambda head, _: kept.extend(
                w for w in head.model.parameters() if head.training and w.grad is not None
            )
        )
        local = batches(5, rank, world, balance="equal")[1]
        smaller = batches(2, rank, world, balance="equal", rows=8)[1]
        given = train(step, [*local[:3], smaller[0], local[3]])
        given += step.evaluate(iter([local[4], local[0], smaller[1]]))
        given += train(step, local[4:])
    finally:
        nn.Module.compile = plain
    assert not kept, "gradients of the step before, which the next replay would write over"
    weights = [weight.detach().clone() for weight in step.head.model.parameters()]
    return weights, [outputs["y"].logits for outputs in given], backend.modes, backend.compiled


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.survive)])
def test_what_graphs_give_is_not_overwritten(world):
    for own, other in zip(on_ranks(world, replayed, False), on_ranks(world, replayed, "graphs"), strict=True):
        for value, plain in zip([*other[0], *other[1]], [*own[0], *own[1]], strict=True):
            torch.testing.assert_close(value, plain, rtol=1e-4, atol=1e-6)
        assert other[2:] == ({"reduce-overhead"}, 3), (
            "training forward and backward, evaluation; one size each"
        )


@pytest.mark.parametrize(
    "device,variables,message",
    [
        ("cpu", {"PATH": "/nowhere"}, r"there is no C\+\+ compiler \(g\+\+\)"),
        ("cpu", {"CXX": "no-such-compiler"}, r"there is no C\+\+ compiler \(no-such-compiler\)"),
        ("cuda", {"PATH": "/nowhere"}, r"there is no C compiler \(gcc or clang\)"),
    ],
)
def test_without_a_compiler(monkeypatch, device, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        require_compiler(device)


def test_without_the_headers_of_python(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"Python's headers are missing .*Python\.h"):
        require_compiler("cpu")
