"""Attribution of step time to phases: on a simulated GPU with streams and events, and on real ranks."""

from time import sleep

import pytest
import small
import torch
from ranks import run_on_ranks
from standin import device, use_stand_in_gpu
from standin.clock import SimulatedClock

from raytrec.worker import step_timing as module
from raytrec.worker.step_timing import FlopCounter, PhaseTimer, Stopwatch, compute_flop_rates

GPU = torch.device("cuda", 0)


@pytest.fixture
def time():
    return SimulatedClock()


@pytest.fixture
def gpu(time):
    with time.of(device, "perf_counter", "sleep"), use_stand_in_gpu() as gpu:
        yield gpu


def run_step(phases, gpu, time, others, data=0.0, computing=0.0):
    """Run a step like TorchRec's pipeline: batches and ids on separate streams."""
    memcpy, data_dist = others
    with torch.cuda.stream(data_dist), phases.phase("input_exchange"):
        data_dist.wait_stream(memcpy)
        gpu.work(0.002)
    with torch.cuda.stream(memcpy):
        with phases.phase("data"):
            time.sleep(data)
        with phases.phase("copy"):
            gpu.work(0.001)
    with phases.phase("forward"):
        with torch.cuda.stream(data_dist), phases.phase("collectives"):
            gpu.work(0.002)
        torch.cuda.current_stream().wait_stream(data_dist)
        gpu.work(computing / 2)
    with phases.phase("backward"):
        gpu.work(computing / 2)


def time_steps(gpu, time, steps, **times):
    """Run some steps; return (seconds of each phase, seconds of the host)."""
    phases, others = PhaseTimer(GPU), (torch.cuda.Stream(), torch.cuda.Stream())
    for stream in others:
        stream.work(0.05)  # its clock is far ahead of the compute stream
    began = time.now
    phases.resume()
    for _ in range(steps):
        run_step(phases, gpu, time, others, **times)
    phases.pause()
    taken = phases.take()
    return taken, time.now - began


def test_phases_are_exclusive_and_sum_to_wall_time(gpu, time):
    taken, wall = time_steps(gpu, time, 5, computing=0.02)
    assert all(seconds >= 0 for seconds in taken.values()), taken
    assert sum(taken.values()) == pytest.approx(wall, rel=0.01)
    assert taken["backward"] == pytest.approx(0.05, rel=0.01)
    assert taken["copy"] + taken["data"] + taken["collectives"] < 0.01, "other streams run at the same time"


def test_data_phase_counts_only_gpu_idle_time(gpu, time):
    starved, wall = time_steps(gpu, time, 5, data=0.04, computing=0.004)
    assert sum(starved.values()) == pytest.approx(wall, rel=0.01)
    assert 0.12 < starved["data"] < 0.2, "all waiting time except remaining GPU work"
    busy, wall = time_steps(gpu, time, 5, data=0.01, computing=0.04)
    assert sum(busy.values()) == pytest.approx(wall, rel=0.01)
    assert busy["data"] < 0.02, "the wait overlaps with earlier steps"


def test_reading_events_does_not_block_training(gpu, time, monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING_INTERVALS", 4)
    phases, others = PhaseTimer(GPU), (torch.cuda.Stream(), torch.cuda.Stream())
    phases.resume()
    for _ in range(5):
        run_step(phases, gpu, time, others, computing=0.02)
    assert gpu.waits == [], "the GPU is still computing"
    assert phases.unfinished_phase == "forward", "the phase of the first step"
    phases.pause()
    assert sum(phases.take().values()) == pytest.approx(0.1, rel=0.05)
    assert [wait.what for wait in gpu.waits] == ["Event.synchronize"]
    assert phases.unfinished_phase is None


def test_finished_events_are_read_promptly(gpu, monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING_INTERVALS", 10)
    phases = PhaseTimer(GPU)
    phases.resume()
    for _ in range(200):
        with phases.phase("data"):
            pass
    assert len(phases._intervals) <= 11


def test_rows_per_second_include_pending_gpu_steps(gpu, time):
    clock = Stopwatch()
    with time.of(module, "perf_counter"):
        clock.resume()
        for _ in range(6):
            gpu.work(0.05)
            clock.step(100)
        assert clock.seconds < 0.1, "the host has not waited"
        clock.pause(GPU)
        assert (clock.rows, clock.seconds) == (500, pytest.approx(0.3, rel=0.01))


def test_stopwatch_pause_on_cpu_adds_no_time():
    clock = Stopwatch()
    clock.resume()
    clock.step(100)
    clock.step(100)
    before = clock.seconds
    clock.pause(torch.device("cpu"))
    assert clock.seconds == before


STEPS, PAUSE_S = 3, 0.1


def measure_phases(rank, world, pause, sharding):
    """Return the seconds of each phase of some steps on this rank; `pause(rank, step)` adds a delay."""
    step = small.build_step_on_rank(small.make_small_config(world, {"sharding_type": sharding}))
    _, local = small.make_batches(STEPS + 1, rank, world)
    small.train_step(step, local[:1])  # warm-up step
    step.phases.take()
    pause(rank, step)
    small.train_step(step, local[1:])
    return step.phases.take()


def list_kernels(step):
    from raytrec.compat.torchrec_ import iterate_replicated_kernels, iterate_sharded_kernels

    return [*iterate_sharded_kernels(step.model), *iterate_replicated_kernels(step.model)]


def slow_down_lookups(rank, step):
    """Add a delay to a lookup kernel's forward and to its part of backward."""
    kernel = list_kernels(step)[0].emb_module
    forward = kernel.forward

    def slow(*args, **options):
        sleep(PAUSE_S)
        pooled = forward(*args, **options)
        pooled.grad_fn.register_hook(lambda *_: sleep(PAUSE_S))
        return pooled

    kernel.forward = slow


def slow_down_dense_backward(rank, step):
    """Delay rank 1 in backward, so that rank 0 waits in the all-reduce of the dense gradients."""
    if rank == 1:
        head = step.model.module.head
        head.register_full_backward_pre_hook(lambda *_: sleep(PAUSE_S))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_lookup_time_counts_as_tables_phase(sharding):
    for seconds in run_on_ranks(1, measure_phases, slow_down_lookups, sharding):
        assert seconds["tables"] > 1.9 * STEPS * PAUSE_S
        assert seconds["forward"] + seconds["backward"] < STEPS * PAUSE_S


def test_dense_all_reduce_wait_counts_as_collectives():
    waiting, slow = run_on_ranks(2, measure_phases, slow_down_dense_backward, "data_parallel")
    assert waiting["collectives"] > 0.8 * STEPS * PAUSE_S > waiting["backward"]
    assert slow["backward"] > 0.9 * STEPS * PAUSE_S > slow["collectives"]


def test_products_of_layers_and_attention_are_counted():
    layer, x = torch.nn.Linear(8, 6), torch.randn(2, 3, 5, 8, requires_grad=True)
    with FlopCounter() as counter:
        layer(x).sum().backward()
    assert counter.flops == 3 * 2 * (2 * 3 * 5) * 8 * 6
    with FlopCounter() as counter:
        torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().backward()
    assert counter.flops == (2 + 5) * 2 * (2 * 3) * 5 * 5 * 8  # forward 2 products; backward 5, one of them repeated


def test_flop_rates_add_up_ranks_and_are_compared_with_the_peak(monkeypatch):
    assert compute_flop_rates(None, 10, 5.0, torch.device("cpu"), "fp32") == {}
    assert compute_flop_rates(40, 10, 5.0, torch.device("cpu"), "fp32") == {"train.flops_per_s": 20.0}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "NVIDIA H100 80GB HBM3")
    rates = compute_flop_rates(989e12, 10, 5.0, GPU, "bf16")
    assert rates == {"train.flops_per_s": 989e12 / 2, "train.mfu": pytest.approx(0.5)}


def count_step_flops(rank, world, schema, model):
    from raytrec.config.features import resolve_features

    config = small.make_small_config(world, {"sharding_type": "row_wise"}, model=model)
    step = small.build_step_on_rank(config, schema)
    features = resolve_features(schema, config.model)
    _, local = small.make_batches(3, rank, world, schema=schema, features=features)
    small.train_step(step, local[:1])
    before = step.flops
    small.train_step(step, local)
    return before, step.flops


@pytest.mark.slow
def test_second_step_of_sequence_models_is_counted():
    sparse = {
        name: spec | {"pooling": "sequence"} if "pooling" in spec else spec
        for name, spec in small.SMALL_SCHEMA_PARTS["sparse"].items()
    }
    schema = small.make_small_schema(sparse=sparse)
    model = {"name": "sequence", "max_length": 3, "target": "user", "top_mlp": [6]}
    (before, flops), _ = run_on_ranks(2, count_step_flops, schema, model)
    assert before is None and flops > 0
    assert run_on_ranks(1, count_step_flops, small.SCHEMA, None)[0][1] is None
