"""train.compile: the same losses, weights and names as in eager mode, also in evaluations and checkpoints."""

import pytest
import torch
from compile_backends import use_compile_backend
from ranks import run_on_ranks
from small import build_step_on_rank, make_batches, make_small_config, make_small_schema, train_step

from raytrec.common.errors import ConfigError
from raytrec.common.machine import require_compiler

pytestmark = pytest.mark.slow

ROWS = {"sharding_type": "row_wise"}
# "aot_eager" runs all of torch.compile except the slow C++ compiler, which `make parity` also runs.
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.survive)]


def train_and_evaluate(rank, world, backend):
    """Return (dense state, logits of an evaluation, number of compiled graphs)."""
    import torch._dynamo.utils

    from raytrec.checkpoint.state import LogicalState

    torch.compiler.reset()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    with use_compile_backend(backend):
        step = build_step_on_rank(make_small_config(world, ROWS, compile=bool(backend), ema=0.9))
    state, local = LogicalState(step.model, step.optimizer), make_batches(5, rank, world)[1]
    train_step(step, local[:4])
    (outputs,) = step.evaluate(iter(local[4:]))
    train_step(step, local[:1])
    weights = {name: value.clone() for name, value in state.dense.items()}
    return weights, outputs["y"].logits, stats["unique_graphs"] - before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.survive), 2])
def test_compiled_model_matches_eager(world, backend):
    plain = run_on_ranks(world, train_and_evaluate, None)
    for own, other in zip(plain, run_on_ranks(world, train_and_evaluate, backend), strict=True):
        torch.testing.assert_close(other[:2], own[:2], rtol=1e-4, atol=1e-6)
        assert (own[2], other[2]) == (0, 2), "one graph for training, one for evaluation, any batch size"


def train_on_varying_lengths(rank, world, name, dropout):
    """Train plain and compiled on batches with different row counts and history lengths.

    Return the logits of each step, and the number of compiled graphs after each step.
    """
    import torch._dynamo.utils

    from raytrec.checks.parity.batches import make_local_batch, make_random_batches
    from raytrec.config.features import resolve_features

    sparse = {
        "item": {"table": "item"},
        "history": {"table": "item", "pooling": "sequence"},
        "negatives": {"table": "item", "pooling": "sequence"},
    }
    schema = make_small_schema(dense=[], sparse=sparse, tables={"item": {"rows": 31, "dim": 8}})
    model = {"name": name, "max_length": 12, "negatives": "negatives", "max_negatives": 3, "dropout": dropout}
    torch.compiler.reset()
    stats, logits, graphs = torch._dynamo.utils.counters["stats"], [], []
    before = stats["unique_graphs"]
    for compile in (False, True):
        settings = make_small_config(world, ROWS, model=model, compile=compile)
        with use_compile_backend("eager"):
            step = build_step_on_rank(settings, schema)
        features = resolve_features(schema, settings.model)
        for number, (rows, most) in enumerate([(24, 8), (31, 13), (24, 3), (40, 10), (24, 2), (13, 6)]):
            (whole,) = make_random_batches(schema, rows, 1, seed=number)
            g = torch.Generator().manual_seed(number)
            lengths = torch.randint(0, most, (rows,), generator=g)
            ids = torch.randint(0, 31, (int(lengths.sum()),), generator=g)
            bag = torch.arange(rows).repeat_interleave(lengths)
            whole.bags["history"] = ids, bag, torch.ones(len(ids))
            (outputs,) = train_step(step, [make_local_batch(whole, schema, [0, rows], 0, features)])
            logits.append(outputs["y"].logits)
            graphs.append(stats["unique_graphs"] - before)
    return logits[:6], logits[6:], graphs


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["sasrec", pytest.param("hstu", marks=pytest.mark.survive)])
def test_new_sequence_lengths_do_not_recompile(name, dropout):
    ((plain, compiled, graphs),) = run_on_ranks(1, train_on_varying_lengths, name, dropout)
    if not dropout:  # compiled dropout draws different random numbers
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
    assert graphs[:6] == [0] * 6 and graphs[6] == graphs[-1] > 0


def collect_compile_phases(rank, world):
    """Return the heartbeat's phase during the compilation of a graph in a step, and after it."""
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


def test_compilation_in_a_step_uses_the_start_timeout():
    assert run_on_ranks(1, collect_compile_phases) == [["start", "step"]]


class BufferReusingBackend:
    """A compiler backend that reuses output buffers, as a CUDA graph does.

    Each call of a compiled function overwrites the outputs of its previous call.

    Attributes:
        modes: modes of torch.compile.
        compiled: number of compiled functions, forward and backward.
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


def run_with_reused_buffers(rank, world, compile):
    """Train and evaluate on full batches and a smaller one.

    Return (weights, logits of each batch, modes of torch.compile, number of compiled functions).
    """
    backend, kept = BufferReusingBackend(), []
    torch.compiler.reset()
    with use_compile_backend(backend):
        step = build_step_on_rank(make_small_config(world, ROWS, compile=compile))
        step.head.register_forward_pre_hook(
            lambda head, _: kept.extend(w for w in head.model.parameters() if head.training and w.grad is not None)
        )
        local = make_batches(5, rank, world, balance="equal")[1]
        smaller = make_batches(2, rank, world, balance="equal", rows=8)[1]
        given = train_step(step, [*local[:3], smaller[0], local[3]])
        given += step.evaluate(iter([local[4], local[0], smaller[1]]))
        given += train_step(step, local[4:])
    assert not kept, "gradients of the previous step are kept; the next replay would overwrite them"
    weights = [weight.detach().clone() for weight in step.head.model.parameters()]
    return weights, [outputs["y"].logits for outputs in given], backend.modes, backend.compiled


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.survive)])
def test_cuda_graph_replay_does_not_overwrite_outputs(world):
    plain, replayed = (run_on_ranks(world, run_with_reused_buffers, compile) for compile in (False, "graphs"))
    for own, other in zip(plain, replayed, strict=True):
        torch.testing.assert_close(other[:2], own[:2], rtol=1e-4, atol=1e-6)
        assert other[2:] == ({"reduce-overhead"}, 3), "functions of forward, backward and evaluation"


@pytest.mark.parametrize(
    "device,variables,message",
    [
        ("cpu", {"PATH": "/nowhere"}, r"there is no C\+\+ compiler \(g\+\+\)"),
        ("cpu", {"CXX": "no-such-compiler"}, r"there is no C\+\+ compiler \(no-such-compiler\)"),
        ("cuda", {"PATH": "/nowhere"}, r"there is no C compiler \(gcc or clang\)"),
    ],
)
def test_missing_compiler_raises_config_error(monkeypatch, device, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        require_compiler(device)


def test_missing_python_headers_raise_config_error(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"Python's headers are missing .*Python\.h"):
        require_compiler("cpu")
