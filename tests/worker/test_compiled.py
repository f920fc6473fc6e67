"""train.compile: the same losses, weights and names as without, in evaluations and checkpoints, too."""

from functools import partialmethod

import pytest
import torch
from ranks import on_ranks
from small import batches, build, config, train
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
@pytest.mark.parametrize("world", [1, 2])
def test_a_compiled_model_learns_the_same(world, backend):
    plain = on_ranks(world, trained, None)
    for own, other in zip(plain, on_ranks(world, trained, backend), strict=True):
        assert own[0] == other[0], "checkpoints have the same names"
        for name, value in own[1].items():
            torch.testing.assert_close(other[1][name], value, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(other[2], own[2], rtol=1e-4, atol=1e-6)
        assert (own[3], other[3]) == (0, 2), "one for training and one for evaluation, whatever the sizes"


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
