"""Tests of the CUDA stand-in: it rejects and waits like CUDA, and computes like the CPU."""

from time import perf_counter

import pytest
import torch
from ranks import run_on_ranks
from small import SCHEMA, make_batches, make_small_config
from standin import StandInGpu, use_stand_in_gpu
from standin.device_rules import OPERATOR_LIST, SAME_DEVICE_COMPOSITES, read_device_rules
from torch import nn
from torchgen.gen import parse_native_yaml
from torchgen.model import DeviceCheckType, DispatchKey


@pytest.fixture
def gpu():
    with use_stand_in_gpu() as gpu:
        yield gpu


def take_waits(gpu):
    """Return the operations that have waited since the last call."""
    operations = [wait.what for wait in gpu.waits]
    gpu.waits.clear()
    return operations


def test_stand_in_tensors_report_cuda_device(gpu):
    value = torch.zeros(3, device="cuda")
    assert value.is_cuda and not value.is_cpu and value.device == torch.device("cuda", 0)
    for other in (value + 1, value[1:], torch.empty_like(value), value.new_ones(2), torch.cat([value, value])):
        assert other.is_cuda
    assert not value.cpu().is_cuda and not torch.zeros_like(value, device="cpu").is_cuda
    assert torch.arange(4, device=value.device).is_cuda and not torch.arange(4).is_cuda
    layer = nn.Linear(3, 2).to("cuda")
    assert isinstance(layer.weight, nn.Parameter) and layer.weight.is_leaf and layer.weight.is_cuda
    layer(value).sum().backward()
    assert layer.weight.grad.is_cuda
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        value.numpy()


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: torch.stack([here[0], there[0]]),
        lambda here, there: here.index_add_(0, torch.tensor([0, 1, 2]), here),
        lambda here, there: nn.functional.linear(here, there),
        lambda here, there: here.__setitem__(torch.arange(3, device="cuda"), there),
        lambda here, there: there.__setitem__(torch.arange(3), here),
        lambda here, there: here.__setitem__(here > 0, there),
        lambda here, there: here.index_put_((torch.arange(3),), there),
    ],
)
def test_stand_in_rejects_operands_on_two_devices(gpu, mix):
    with pytest.raises(RuntimeError, match="same device, but found at least two"):
        mix(torch.ones(3, device="cuda"), torch.ones(3))


@pytest.mark.parametrize(
    "look",
    [
        lambda here, there: there[here],
        lambda here, there: there[1:, here],
        lambda here, there: there[here > 0],
        lambda here, there: there.__setitem__(here, 1.0),
        lambda here, there: there.index_put_((here,), torch.ones(())),
    ],
)
def test_stand_in_rejects_cuda_indices_into_host_tensor(gpu, look):
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        look(torch.arange(3, device="cuda"), torch.ones(3, 3))


@pytest.mark.slow
def test_device_rules_are_those_of_torchs_code_generator():
    entries = parse_native_yaml(str(OPERATOR_LIST), str(OPERATOR_LIST.with_name("tags.yaml")))
    checked = {
        str(function.func.name)
        for function in entries.native_functions
        if function.device_check is not DeviceCheckType.NoCheck
        and entries.backend_indices[DispatchKey.CUDA].has_kernel(function)
    }
    assert checked <= read_device_rules().same_device
    by_delegate = read_device_rules().same_device - checked - SAME_DEVICE_COMPOSITES
    assert all(entry.structured_delegate for entry in entries.native_functions if str(entry.func.name) in by_delegate)


def test_stand_in_rejects_scalars_where_cuda_code_checks_devices(gpu):
    weight, gradient = (torch.ones(3, device="cuda") for _ in range(2))
    moments = [[torch.zeros(3, device="cuda")], [torch.zeros(3, device="cuda")], []]
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    with pytest.raises(RuntimeError, match=r"at least two devices.*argument state_steps of _fused_adam_"):
        torch._fused_adam_([weight], [gradient], *moments, [torch.ones(())], amsgrad=False, maximize=False, **rates)
    with pytest.raises(NotImplementedError, match="aten::histogram"):
        torch.histogram(weight, 2)


class _HostGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * HOST_FACTOR


HOST_FACTOR = torch.ones(3)


def test_stand_in_checks_devices_in_backward(gpu):
    weight = torch.ones(3, device="cuda", requires_grad=True)
    (weight * torch.arange(3.0, device="cuda")).cumsum(0).sum().backward()
    with pytest.raises(RuntimeError, match="same device, but found at least two"):
        _HostGradient.apply(weight).sum().backward()


def test_stand_in_allows_scalars_and_copies_across_devices(gpu):
    here, there = torch.arange(3.0, device="cuda"), torch.arange(3)
    assert (here * torch.tensor(2.0)).is_cuda, "a host scalar must be accepted"
    assert here[there].is_cuda and there[torch.ones((), dtype=torch.int64, device="cuda")] == 1
    here[there], there[1:] = torch.tensor(1.0), here[1:]
    here[1:] = there[1:]
    assert here.copy_(there).is_cuda and not there.copy_(here).is_cuda


def test_stand_in_records_host_waits(gpu):
    value = torch.arange(4.0, device="cuda")
    value.sum().item(), value.tolist(), bool(value[0]), value[value > 1], value.unique(), value.nonzero()
    assert take_waits(gpu) == ["item", "tolist", "__bool__", "__getitem__", "unique", "nonzero"]
    value.repeat_interleave(torch.ones(4, dtype=torch.int64, device="cuda"), output_size=4)
    value[1:] * 2, value.index_select(0, torch.arange(2, device="cuda")), torch.where(value > 1, value, 0)
    assert not gpu.waits
    value.repeat_interleave(torch.ones(4, dtype=torch.int64, device="cuda"))
    torch.tensor([1.0], device="cuda")
    assert take_waits(gpu) == ["repeat_interleave", "torch.tensor"]
    value[torch.arange(2)], value[torch.arange(2, device="cuda")], value[1:], value[1]
    value[value > 1] = 0.0
    assert take_waits(gpu) == ["__getitem__"]


def test_stand_in_copies_only_pinned_memory_without_wait(gpu):
    pageable, pinned = torch.ones(3), torch.ones(3).pin_memory()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not pageable.is_pinned()
    there = pinned.to("cuda", non_blocking=True)
    torch.empty(3, pin_memory=True).copy_(there, non_blocking=True)
    assert not gpu.waits
    pageable.to("cuda", non_blocking=True), pinned.to("cuda"), pageable.copy_(there, non_blocking=True)
    assert len(gpu.waits) == 3


def test_stand_in_streams_have_separate_clocks(gpu):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    other = torch.cuda.Stream()
    begin.record()
    gpu.work(0.3)
    end.record()
    with torch.cuda.stream(other):
        assert torch.cuda.current_stream() is other and other.query()
    assert not end.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    started = perf_counter()
    torch.ones((), device="cuda").item()
    assert perf_counter() - started > 0.1, "the host did not wait for earlier work"
    assert 295 < begin.elapsed_time(end) < 3000


def run_collectives(rank, world):
    import torch.distributed as dist

    assert dist.get_backend() == "nccl" and dist.get_backend(dist.new_group(backend="gloo")) == "gloo"
    value, errors, earlier = torch.full((2,), float(rank), device="cuda"), [], len(StandInGpu.active.waits)
    dist.all_reduce(value)
    dist.barrier()
    waited = [wait.what for wait in StandInGpu.active.waits[earlier:]]
    for collective in dist.all_reduce, lambda here: dist.all_gather_single(torch.ones(world), here):
        with pytest.raises(RuntimeError) as error:
            collective(torch.ones(1))
        errors.append(str(error.value))
    return value.tolist(), waited, errors


def test_stand_in_nccl_rejects_host_tensors():
    values, waited, errors = run_on_ranks(2, run_collectives, device="cuda")[1]
    assert values == [1.0, 1.0] and waited == ["barrier"]
    assert all("No backend type associated with device type cpu" in error for error in errors)


def train_and_collect_weights(rank, world, device, plan, optimizer, settings):
    """Train 4 steps; return ({name: table or dense parameter}, devices of the table shards)."""
    from raytrec.embeddings.tables import tables
    from raytrec.worker.build import build_step

    step, _ = build_step(make_small_config(world, plan, optimizer, **settings), SCHEMA, torch.device(device))
    local = make_batches(4, rank, world)[1]
    if device != "cpu":
        local = [batch.pin_memory() for batch in local]
    for _ in step.train(iter(local), len(local)):
        pass
    found = tables(step.model)
    places = {str(s.values.device) for table in found.values() for s in table.weight.local}
    whole = {name: table.weight.dense().cpu() for name, table in found.items()}
    dense = dict(step.model.module.head.model.named_parameters())
    return whole | {name: p.detach().cpu() for name, p in dense.items()}, places


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "optimizer", "settings"),
    [
        ({"sharding_type": "row_wise"}, "rowwise_adagrad", {}),
        ({"sharding_type": "column_wise"}, "sgd", {}),
        ({"sharding_type": "row_wise", "compute_kernel": "fused_uvm"}, "sgd", {"on_nan": "skip"}),
    ],
)
def test_stand_in_training_matches_cpu_training(plan, optimizer, settings):
    """tests/checks/parity/test_parity.py compares other plans with one CPU process."""
    expected = run_on_ranks(2, train_and_collect_weights, "cpu", plan, optimizer, settings)
    got = run_on_ranks(2, train_and_collect_weights, "cuda", plan, optimizer, settings, device="cuda")
    for rank, ((weights, places), (of_cpu, _)) in enumerate(zip(got, expected, strict=True)):
        assert places <= {f"cuda:{rank}"}
        torch.testing.assert_close(weights, of_cpu, rtol=0, atol=1e-6)


def test_wait_callers_exclude_packages_under_raytrec_folder(gpu):
    file, scope = "/home/me/torch/raytrec/.venv/lib/python3.11/site-packages/other/steps.py", {}
    exec(compile("def wait(value):\n    return value.item()\n", file, "exec"), scope)
    scope["wait"](torch.ones((), device="cuda"))
    assert (gpu.waits[-1].where, gpu.waits[-1].callers) == ("site-packages/other/steps.py:wait", ())
