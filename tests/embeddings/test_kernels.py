"""Reads of kernels with a GPU cache go through the cache."""

from types import SimpleNamespace
from unittest.mock import patch

import caching
import pytest
import torch
from caching import STALE_VALUE, SimulatedCaches
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from ranks import run_on_ranks
from small import SCHEMA, build_step_on_rank, make_batches, make_small_config, train_step
from standin import use_stand_in_gpu

from raytrec.checkpoint.state import LogicalState
from raytrec.checks.live.numerics import Numerics
from raytrec.checks.live.outcome import CheckedRun, Position
from raytrec.checks.live.probe import Parity
from raytrec.compat.fbgemm import Cache, find_fused_lookup, get_update_count, measure_cache_hits, set_update_count
from raytrec.compat.torchrec_ import iterate_sharded_kernels
from raytrec.embeddings.tables import tables
from raytrec.embeddings.taps import Taps
from raytrec.worker.statistics import Statistics

CACHED = {"sharding_type": "row_wise", "compute_kernel": "fused_uvm_caching"}


def read_through_cache(rank, world, plan):
    """Read, write and save a table while its kernel caches rows."""
    step = build_step_on_rank(make_small_config(world, plan))
    train_step(step, make_batches(2, rank, world)[1])
    caches = SimulatedCaches(step.model)
    with caches.holding():
        state = LogicalState(step.model, step.optimizer)
    before = {name: [s.values.clone() for s in t.weight.local] for name, t in state.tables.items()}
    caches.flushes = 0
    with caches.holding():
        for name, table in state.tables.items():
            for shard, values in zip(table.weight.local, before[name], strict=True):
                rows = torch.arange(len(values)).flip(0)
                assert not len(rows) or (shard.values == STALE_VALUE).any()
                assert torch.equal(shard.read(rows), values[rows])
                assert torch.equal(shard.read(slice(1, None, 3)), values[1::3])
                assert shard.read(rows[:0]).shape == (0, values.shape[1])
    assert not caches.flushes
    with caches.holding():
        whole = {name: table.weight.dense() for name, table in state.tables.items()}
    with caches.holding():
        saved = state.tensors()
        for name in state.tables:
            for part, values in zip(saved[f"tables/{name}/weight"].local_shards(), before[name], strict=False):
                assert torch.equal(part.tensor, values)
    with caches.holding():
        for table in state.tables.values():
            for shard in table.weight.local:
                rows = torch.tensor([row - shard.rows.start for row in (1, 2) if row in shard.rows], dtype=torch.int64)
                shard.write(rows, torch.full((len(rows), len(shard.columns)), 7.0))
                assert torch.equal(shard.read(slice(None)), shard.values), "the cache has no stale rows"
    loaded = {name: table.weight.dense() for name, table in state.tables.items()}
    return whole, loaded


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
def test_cached_rows_are_read_through_the_cache(sharding):
    found = run_on_ranks(2, read_through_cache, CACHED | {"sharding_type": sharding})
    expected = run_on_ranks(2, train_uncached, {"sharding_type": sharding})[0]
    for whole, loaded in found:
        for name in SCHEMA.tables:
            assert torch.equal(whole[name], expected[name])
            assert (loaded[name][1:3] == 7).all() and torch.equal(loaded[name][3:], expected[name][3:])


def train_uncached(rank, world, plan):
    step = build_step_on_rank(make_small_config(world, plan))
    train_step(step, make_batches(2, rank, world)[1])
    return {name: table.weight.dense() for name, table in tables(step.model).items()}


def collect_observations(rank, world, kernel, optimizer):
    """Return statistics and the outcomes of numerics and parity of a step whose kernels cache rows."""
    settings = make_small_config(world, {"sharding_type": "row_wise", "compute_kernel": kernel}, optimizer)
    step = build_step_on_rank(settings)
    caches = SimulatedCaches(step.model if kernel == "fused_uvm_caching" else torch.nn.Module())
    with caches.holding():
        state = LogicalState(step.model, step.optimizer)
    caches.flushes = 0
    taps = Taps(step.model, step.head, list(SCHEMA.sparse))
    held = []

    def hold(*_):
        held.append(caches.holding())
        held[-1].__enter__()

    def release(*_):
        held.pop().__exit__(None, None, None)

    for lookup in taps.lookups:
        lookup.kernel.register_forward_hook(hold)
    statistics = Statistics(SCHEMA, state.tables, taps)
    for lookup in taps.lookups:
        lookup.kernel.register_forward_hook(release)
    run = CheckedRun(settings, SCHEMA, state.tables, state.dense, taps, torch.device("cpu"))
    parity, numbers = Parity(run), Numerics(run)
    local = make_batches(3, rank, world)[1]
    train_step(step, local[:-1])
    taps.is_probing = True
    with caches.holding():
        parity.prepare(local[-1])
    train_step(step, local[-1:])
    with caches.holding():
        seen = parity.evaluate(Position(3), True), numbers.sizes(Position(3), True)
        figures = statistics.collect()
        for slots in caches.slots():
            slots.masked_fill_(slots == slots, torch.nan)  # overwrite all cached rows
        broken = numbers.sizes(Position(3), True)
    assert not caches.flushes
    return figures, seen, broken


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_statistics_and_checks_read_cached_rows(optimizer):
    found = run_on_ranks(2, collect_observations, "fused_uvm_caching", optimizer)
    expected = run_on_ranks(2, collect_observations, "fused_uvm", optimizer)
    for (figures, (parity, numbers), broken), (others, (_, same), _) in zip(found, expected, strict=True):
        assert parity.passed and parity.figure < 1e-5
        assert numbers == same
        assert any(value != value for name, value in broken.values.items() if name.startswith("table"))
        for table, of_table in others.items():
            different = {k for k, v in of_table.items() if figures[table][k] != v}
            assert different <= {"device"}, table
            assert of_table["update_norm"] > 0


def test_cache_read_is_ordered_with_prefetches():
    """The prefetch stream replaces rows in the cache."""
    state = torch.full((1, 32), -1)
    state[0, 3] = 12  # row 2 of a shard whose first row is row 10
    weights = torch.arange(32.0).unsqueeze(1).repeat(1, 8)
    with use_stand_in_gpu() as gpu, patch.object(torch.ops.fbgemm, "lxu_cache_lookup", caching.lookup):
        filling = torch.cuda.Stream()
        emb = SimpleNamespace(
            prefetch_stream=filling, lxu_cache_state=state.to("cuda"), lxu_cache_weights=weights.to("cuda")
        )
        cache = Cache(SimpleNamespace(emb_module=emb), 10)
        values, rows = torch.zeros(4, 8).to("cuda"), torch.tensor([2, 0]).to("cuda")
        filling.work(0.05)
        done = filling.done_at
        gpu.waits.clear()
        assert cache.read(values, rows).is_cuda and not gpu.waits, "the host does not wait"
        assert gpu.stream.done_at >= done, "the read waits for earlier prefetches"
        gpu.work(0.05)
        found = cache.read(values, rows)
        assert filling.done_at >= gpu.stream.done_at, "later prefetches wait for the read"
        assert found.cpu()[:, 0].tolist() == [3.0, 0.0]


def test_kernel_hit_rate_applies_to_all_its_tables():
    lookup = SplitTableBatchedEmbeddingBagsCodegen.__new__(SplitTableBatchedEmbeddingBagsCodegen)
    torch.nn.Module.__init__(lookup)
    lookup.gather_uvm_cache_stats = True
    lookup.uvm_cache_stats = torch.tensor([3, 100, 40, 10, 0, 0])
    lookup.local_uvm_cache_stats = torch.zeros(6, dtype=torch.int32)
    kernel = SimpleNamespace(emb_module=lookup)
    statistics = Statistics.__new__(Statistics)
    looked_up = SimpleNamespace(kernel=kernel, tables=["a", "b", "a"], received=torch.tensor([5, 6, 7]))
    statistics._taps = SimpleNamespace(lookups=[looked_up])
    statistics._counted = {id(looked_up): torch.tensor([1, 1, 1])}
    hits = {"a": {"cache_hit_rate": 0.75}, "b": {"cache_hit_rate": 0.75}}
    assert statistics._count_lookups() == ({"a": 10, "b": 5}, hits)
    assert statistics._count_lookups() == ({"a": 0, "b": 0}, {}), "lookups are not counted twice"
    lookup.gather_uvm_cache_stats = False
    assert measure_cache_hits(kernel) is None


def test_fbgemm_has_the_cache_lookup_operator():
    arguments = torch.ops.fbgemm.lxu_cache_lookup.default._schema.arguments
    assert [a.name for a in arguments][:2] == ["linear_cache_indices", "lxu_cache_state"]


def build_kernel(world, **plan):
    step = build_step_on_rank(make_small_config(world, {"sharding_type": "table_wise", **plan}))
    return next(iterate_sharded_kernels(step.model))


def set_and_read_count(rank, world):
    """Return a kernel's update count before and after setting it, and whether an fp16 kernel rounds
    stochastically.

    Stochastic rounding is FBGEMM's default; its CPU kernels ignore it.
    """
    kernel = build_kernel(world)
    before = get_update_count(kernel)
    set_update_count(kernel, 7)
    count = before, get_update_count(kernel), int(kernel.emb_module.iter_cpu)
    return count, find_fused_lookup(build_kernel(world, dtype="fp16")).stochastic_rounding


def test_update_count_is_settable_and_rounding_is_stochastic():
    assert run_on_ranks(1, set_and_read_count) == [((0, 7, 7), True)]
