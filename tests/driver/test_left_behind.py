"""Test that steps and epochs leak no tensors, threads, readers or Ray Data executors."""

import gc
import threading
import weakref
from collections import Counter
from time import monotonic, sleep

import loop
import parquet
import pytest
import ranks

from raytrec.config.schema import Schema
from raytrec.data.fragments import scan
from raytrec.data.order import Order
from raytrec.data.read_plans import ReadPlan
from raytrec.data.stream import Stream
from raytrec.driver import launch as group
from raytrec.worker import process

STEP_KINDS = ("Tensor", "Parameter", "Batch", "KeyedJaggedTensor", "Outputs", "Thread", "Look")
READING_KINDS = ("Reading", "Batch", "Supply", "Dataset", "StreamingExecutor", "DatasetStats", "Tensor")


def count_alive(kinds):
    """Count the referenced objects of each class and the threads."""
    gc.collect()
    found = Counter(type(each).__name__ for each in gc.get_objects())
    # A C++ thread that has logged a line stays in Python's list for good, as a dummy.
    threads = sum(not isinstance(each, threading._DummyThread) for each in threading.enumerate())
    return {kind: found[kind] for kind in kinds} | {"threads": threads}


def wait_for_stable_counts(kinds):
    """Return the counts once they are stable for a second; leftovers of other tests may still end."""
    counts, until = [count_alive(kinds)], monotonic() + 60
    while len(counts) < 5 or any(each != counts[-1] for each in counts[-5:]):
        assert monotonic() < until, f"the counts keep changing: {counts[-5:]}"
        sleep(0.25)
        counts.append(count_alive(kinds))
    return counts[-1]


def find_growth(early, late):
    """Return {kind: (before, after)} of the kinds whose count has increased."""
    return {kind: (count, late[kind]) for kind, count in early.items() if late[kind] > count}


def count_after_steps(rank, world, folder):
    """Count live objects after an early and a late step, each with checks and tracking."""
    found = []

    def after(made):
        if made.progress.step in (21, 51):
            found.append(count_alive(STEP_KINDS))

    changes = ["tracking.every_steps=10", "checks.every_steps=10", "train.log_every_steps=10"]
    made = loop.make_worker_loop(rank, world, 60, changes, folder).train(60, after)
    assert made.error is None, made.error
    return found


@pytest.mark.slow
def test_steps_leak_no_objects(tmp_path):
    for early, late in ranks.run_on_ranks(2, count_after_steps, tmp_path):
        assert early["Tensor"] > 10
        assert not find_growth(early, late)


@pytest.mark.survive
@pytest.mark.usefixtures("ray_cluster")
def test_epochs_leak_no_objects(tmp_path, monkeypatch, request):
    import ray
    from ray.data._internal.stats import get_or_create_stats_actor

    executed, name = set(), ray.data.Dataset.get_dataset_id  # identifies an execution

    def note(dataset):
        executed.add(name(dataset))
        return name(dataset)

    monkeypatch.setattr(ray.data.Dataset, "get_dataset_id", note)
    folder = parquet.write_dataset(tmp_path / "data", train=400)
    gc.collect()
    gc.freeze()  # exclude existing objects from the counts
    request.addfinalizer(gc.unfreeze)
    data = scan(str(folder / "train"), ReadPlan(Schema.load(folder / "schema.yaml")))
    stream = Stream(data, Order(100, 4, "window", 2, 0), rank=0, world=1)
    assert len(list(stream.epochs(1))) == 4
    early = wait_for_stable_counts(READING_KINDS)
    assert len(list(stream.epochs(3))) == 12
    until = monotonic() + 30
    while find_growth(early, late := count_alive(READING_KINDS)) and monotonic() < until:  # threads end late
        sleep(0.1)
    assert not find_growth(early, late), [each.name for each in threading.enumerate()]
    assert late["Reading"] == late["Supply"] == 0
    assert len(executed) == 4
    assert not executed & ray.get(get_or_create_stats_actor().get_datasets.remote()).keys()


class Cycle:
    def __init__(self):
        self.me = self


@pytest.mark.slow
def test_gc_collects_old_cycles_soon():
    """The collector finds old garbage soon, even if the process holds many objects, as ranks do."""
    ballast = [[] for _ in range(600_000)]
    process.freeze_gc()
    try:
        cycle = Cycle()
        gc.collect(1)  # it is old now
        gone = weakref.ref(cycle)
        del cycle
        kept = [[] for _ in range(100_000)]  # about as many as ten epochs of Ray Data create
        assert gone() is None
    finally:
        gc.unfreeze()
    assert len(ballast) > len(kept)


def test_ranks_limit_malloc_arenas(ray_cluster, tmp_path):
    """Each glibc arena keeps the peak memory of its threads."""
    run = group._make_ray_run_config(str(tmp_path / "checkpoints"))
    assert run.worker_runtime_env["env_vars"]["MALLOC_ARENA_MAX"] == "2"
