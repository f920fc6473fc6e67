"""train.matmul and train.deterministic: their effects, and where the effects end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import small
import torch
from ranks import run_on_ranks
from small import SCHEMA, build_step_on_rank, make_batches, make_small_config, train_step

from raytrec.config.training import TrainSection
from raytrec.driver.resume import _list_differences
from raytrec.worker.process import prepare_process

TESTS = Path(__file__).parents[1]


class Bf16Autocast(torch.nn.Module):
    """A dense model under plain torch's autocast."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, dense, inputs):
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(dense, inputs)
        assert logits.dtype == torch.bfloat16
        return logits.float()


def compare_bf16_step(rank, world, changes):
    """Compare one step and one evaluation with plain torch under autocast, and with fp32.

    Return the largest difference of a weight, as a share of the largest update.
    """
    from raytrec.checks.parity import reference

    settings = make_small_config(world, {"sharding_type": "row_wise"}, "sgd", lr=1.0, matmul="bf16", **changes)
    step = build_step_on_rank(settings)
    begun, (whole, local), expected = small.gather_weights(step), make_batches(1, rank, world), {}
    for name in ("bf16", "fp32"):
        one = small.make_reference_model(step, settings)
        dense, one.model = one.model, Bf16Autocast(one.model) if name == "bf16" else one.model
        optimizers = [torch.optim.SGD(one.tables.values(), lr=1.0), torch.optim.SGD(dense.parameters(), lr=0.1)]
        reference.train(one, whole, optimizers)
        expected[name] = dict(dense.named_parameters()) | one.tables
    (outputs,) = train_step(step, local)
    (evaluated,) = step.evaluate(iter(local))
    trained, evaluated = outputs["y"].logits, evaluated["y"].logits
    assert trained.dtype == evaluated.dtype == torch.float32
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}
    assert torch.equal(evaluated, evaluated.bfloat16().float())  # the logits are exact bf16 values
    got, differ = small.gather_weights(step), small.max_weight_difference
    return {name: differ(got, weights) / differ(begun, weights) for name, weights in expected.items()}


@pytest.mark.parametrize(
    "settings", [{}, {"activation_checkpointing": True, "on_nan": "skip"}, {"max_grad_norm": 100.0}]
)
def test_bf16_matches_autocast_of_the_dense_model(settings):
    for errors in run_on_ranks(2, compare_bf16_step, settings):
        # A pooled embedding that differs in its last bit may round to another bfloat16: 2^-8.
        assert errors["bf16"] < 4e-3
        assert errors["fp32"] > 1e-4


def measure_bf16_errors(rank, world):
    """Return the difference between bf16 and fp32 logits of each model, relative to the largest logit, per
    step."""
    from test_on_ranks import SECTIONS

    from raytrec.config.features import resolve_features

    schema = SCHEMA.model_copy(deep=True)
    schema.sparse["tags"].pooling = schema.sparse["friends"].pooling = "sequence"
    errors = {}
    for name, section in SECTIONS.items():
        of = {}
        for matmul in ("fp32", "bf16"):
            settings = make_small_config(world, {}, model=section, matmul=matmul)
            features = resolve_features(schema, settings.model)
            _, local = make_batches(3, rank, world, schema=schema, features=features)
            of[matmul] = torch.stack([o["y"].logits for o in train_step(build_step_on_rank(settings, schema), local)])
        errors[name] = ((of["bf16"] - of["fp32"]).abs().amax(1) / of["fp32"].abs().max()).tolist()
    return errors


@pytest.mark.slow
def test_every_model_trains_in_bf16(monkeypatch):
    monkeypatch.syspath_prepend(str(TESTS / "models"))
    (errors,) = run_on_ranks(1, measure_bf16_errors)
    for first, *later in errors.values():
        assert 1e-5 < first < 0.02, errors
        # Adagrad's first steps are the signs of gradients; rounding can flip signs of gradients near 0.
        assert max(later) < 0.3, errors


def run_checks_in_bf16(rank, world):
    from loops import SHARDING_PLANS, train_with_checks

    return train_with_checks(rank, world, SHARDING_PLANS["row-wise"], matmul="bf16", activation_checkpointing=True)


def test_live_checks_pass_in_bf16():
    for outcomes in run_on_ranks(2, run_checks_in_bf16):
        assert {outcome["check"] for outcome in outcomes} >= {"parity", "replicas", "numerics"}
        assert all(outcome["passed"] for outcome in outcomes)


def record_torch_switches(rank, world, settings, device):
    """Return torch's switches in forward, in backward, between two steps and after the last step."""
    seen = []

    def look(*_):
        cudnn, filled = torch.backends.cudnn, torch.utils.deterministic.fill_uninitialized_memory
        of_cudnn = {cudnn.rnn.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32", cudnn.allow_tf32}
        products = torch.get_float32_matmul_precision(), *of_cudnn
        seen.append((*products, torch.get_deterministic_debug_mode(), filled))

    def in_forward(_, __, logits):
        look()
        if logits.requires_grad:
            logits.register_hook(look)

    step = build_step_on_rank(make_small_config(world, {"sharding_type": "row_wise"}, **settings), device=device)
    step.model.module.head.model.register_forward_hook(in_forward)
    _, local = make_batches(2, rank, world)
    for _ in step.train(iter(local), 2):
        look()
    for _ in step.evaluate(iter(local[:1])):
        look()
    return seen, {name: os.environ.pop(name, None) for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")}


DEFAULT_SWITCHES = ("highest", True, 0, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings,device,inside",
    [
        ({}, "cuda", ("highest", False, 0, True)),
        ({"matmul": "bf16"}, "cuda", ("highest", False, 0, True)),
        ({"matmul": "tf32"}, "cuda", ("high", True, 0, True)),
        ({"matmul": "tf32"}, "cpu", DEFAULT_SWITCHES),
        ({"deterministic": True}, "cuda", ("highest", False, 1, False)),
        ({"deterministic": True, "matmul": "tf32"}, "cuda", ("high", True, 1, False)),
    ],
)
def test_torch_switches_are_set_only_during_steps(settings, device, inside):
    ((seen, environment),) = run_on_ranks(1, record_torch_switches, settings, device, device=device)
    assert seen == [inside, inside, DEFAULT_SWITCHES] * 2 + [inside, DEFAULT_SWITCHES]
    asked = settings.get("deterministic", False)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == (":4096:8" if asked else None)
    assert environment["NCCL_ALGO"] == ("^NVLS,NVLSTree" if asked else None)


def test_deterministic_keeps_user_environment_variables(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    prepare_process(TrainSection(deterministic=True))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8" and os.environ["NCCL_ALGO"] == "Tree"


def test_managed_ids_order_the_launches_of_their_communicator(monkeypatch):
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    prepare_process(TrainSection(), has_managed_ids=True)
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "0", "the user's value must be kept"
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    prepare_process(TrainSection())
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" not in os.environ, "it costs time in each launch"
    prepare_process(TrainSection(), has_managed_ids=True)
    assert os.environ.pop("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"


@pytest.mark.parametrize(("ranks", "cpus", "usable", "processes"), [(8, 96, 48, 6), (1, 96, 96, 32), (8, 8, 4, 1)])
def test_ranks_of_a_host_share_the_compile_processes(monkeypatch, ranks, cpus, usable, processes):
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "compile_threads", inductor.compile_threads)
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(usable)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    prepare_process(TrainSection(compile=True))
    assert inductor.compile_threads == processes
    inductor.compile_threads = 77
    prepare_process(TrainSection())
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "77")
    prepare_process(TrainSection(compile=True))
    assert inductor.compile_threads == 77, "the user's value, and the value without train.compile, must be kept"


def test_resume_allows_deterministic_but_not_matmul_changes():
    def changed(**settings):
        return _list_differences(make_small_config(1, {}), make_small_config(1, {}, **settings))

    assert changed(deterministic=True) == []
    assert changed(matmul="tf32") == ["  train.matmul: fp32 → tf32"]


@pytest.mark.slow
def test_matmul_precision_ignores_the_environment():
    """NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which makes TF32 the default of torch."""
    code = """
import torch
from raytrec.config.training import TrainSection
from raytrec.worker.process import numerics
for matmul in ("fp32", "bf16", "tf32"):
    before = torch.get_float32_matmul_precision()
    with numerics(TrainSection(matmul=matmul), torch.device("cuda")):
        inside = torch.get_float32_matmul_precision()
    print(before, inside, torch.get_float32_matmul_precision())
"""
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert output.splitlines() == ["high highest high", "high highest high", "high high high"]
