"""Statistics of shards against statistics of whole tables in one plain torch process."""

from math import isclose

import pytest
import recorded
import small
import torch
from ranks import run_on_ranks

from raytrec.common.messages import RankLine
from raytrec.tracking.aggregate import combine_shards
from raytrec.worker.statistics import NORM_EDGES, _count_norms, estimate_collision_rate

STEPS = 3


def collect_statistics(rank, world, plan, optimizer, train, sample):
    """Return (statistics, tables before and after the last step, dense weights, all global batches)."""
    from raytrec.checkpoint.state import LogicalState
    from raytrec.embeddings.taps import Taps
    from raytrec.worker import statistics

    statistics.MIN_SAMPLED_ROWS = sample
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    step = small.build_step_on_rank(small.make_small_config(world, plan, optimizer, **train), device=device)
    state = LogicalState(step.model, step.optimizer)
    taps = Taps(step.model, step.head, list(small.SCHEMA.sparse))
    watched = statistics.Statistics(small.SCHEMA, state.tables, taps)
    whole, local = small.make_batches(STEPS, rank, world)
    small.train_step(step, local[:-1])
    before = {name: table.weight.dense() for name, table in state.tables.items()}
    model = {name: p.detach().clone() for name, p in step.head.model.named_parameters()}
    taps.is_probing = True
    small.train_step(step, local[-1:])
    found = watched.collect()
    after = {name: table.weight.dense() for name, table in state.tables.items()}
    return found, before, after, model, whole


def compute_reference_gradients(before, model, batch):
    """Return the gradient of the mean loss of each table, computed by plain torch."""
    from raytrec.checks.parity.reference import Reference
    from raytrec.models import build_model

    dense = build_model(small.SCHEMA, small.make_small_config(1, {}).model)
    dense.load_state_dict(model)
    one = Reference(small.SCHEMA, before, dense)
    logits = dense(batch.dense, one.pooled(batch))
    torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels[:, 0]).backward()
    return {name: table.grad for name, table in one.tables.items()}


def collect_ids(table, batches):
    return torch.cat([b.bags[f][0] for b in batches for f, s in small.SCHEMA.sparse.items() if s.table == table])


def test_statistics_support_models_without_dense_layers():
    parts = {"model": {"name": "mf", "item": "friends"}, "tasks": [{"loss": "in_batch_softmax"}]}
    ((found, _, _, dense, _),) = run_on_ranks(1, collect_statistics, {"sharding_type": "row_wise"}, "sgd", parts, 4096)
    assert not dense and found["user"]["lookups"] > 0


def make_rank_line(found):
    return RankLine(**recorded.rank_line([], 0, 1, 100, tables=found))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", ["table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "grid_shard"]
)
@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_shard_statistics_match_whole_tables(sharding, optimizer):
    train = {"max_grad_norm": 1000.0} if optimizer == "sgd" else {}
    results = run_on_ranks(2, collect_statistics, {"sharding_type": sharding}, optimizer, train, 4096)
    _, before, after, model, whole = results[0]
    gradients = compute_reference_gradients(before, model, whole[-1])
    for name, spec in small.SCHEMA.tables.items():
        shards = [found[name] for found, *_ in results if name in found]
        figures = combine_shards([make_rank_line(found) for found, *_ in results], name)
        copies = {"column_wise": 2}.get(sharding, 1)
        assert figures["lookups"] == copies * len(collect_ids(name, whole))
        assert figures["weight_bytes"] == 4 * spec.rows * spec.dim * (2 if sharding == "data_parallel" else 1)
        assert_close(figures["weight_norm"], after[name].norm())
        update = (after[name] - before[name]).norm()
        if sharding == "data_parallel":  # a rank samples only rows touched by its own part of the batch
            assert 0 < figures["update_norm"] <= update * 1.0001
        else:
            assert_close(figures["update_norm"], update)
        assert_close(figures["gradient_norm"], gradients[name].norm())
        dead = 1 - len(collect_ids(name, whole).unique()) / spec.rows
        if sharding != "data_parallel" or optimizer == "adagrad":  # else a rank knows only its own ids
            assert_close(figures["dead_share"], dead)
        if copies == 1:
            assert_close(figures["max_abs"], after[name].abs().max())
            assert_close(max(s["row_norm_max"] for s in shards if s["rows"]), after[name].norm(dim=1).max())
            assert sum(sum(s["row_norm_counts"]) for s in shards if s["rows"]) == sum(s["rows"] for s in shards)
        touched = collect_ids(name, whole[-1:])
        if sharding in ("table_wise", "row_wise"):
            assert sum(s.get("touched_rows", 0) for s in shards) == len(touched.unique())
        if sharding == "table_wise":
            assert_close(shards[0]["unique_ratio"], len(touched.unique()) / len(touched))
            assert_close(shards[0]["row_norm_p50"], after[name].norm(dim=1).quantile(0.5))


@pytest.mark.slow
@pytest.mark.parametrize("sharding,optimizer", [("row_wise", "sgd"), ("data_parallel", "adagrad")])
def test_gpu_statistics_match_cpu(sharding, optimizer):
    plan = {"sharding_type": sharding}
    found = [
        run_on_ranks(2, collect_statistics, plan, optimizer, {}, 4096, device=device) for device in ("cuda", "cpu")
    ]
    for rank, ((of_gpu, *_), (of_cpu, *_)) in enumerate(zip(*found, strict=True)):
        for name, figures in of_cpu.items():
            assert of_gpu[name]["device"] == f"cuda:{rank}"
            for key in figures.keys() - {"device"}:
                value = figures[key]
                expected = value if value is None else pytest.approx(value, rel=1e-5)
                assert of_gpu[name][key] == expected, (name, key)


def test_norm_histogram_matches_torch_histc():
    """torch.histc is the reference; CUDA does not support it with deterministic algorithms."""
    low, high, bins = NORM_EDGES
    edges = 10.0 ** torch.linspace(low, high, bins + 1)
    drawn = torch.randn(2000, generator=torch.Generator().manual_seed(0)).mul(3).exp()
    for norms in (drawn, edges, torch.tensor([0.0, 1e-9, 1e9, torch.inf, torch.nan])):
        expected = torch.histc(norms.clamp_min(1e-30).log10().clamp(low, high), bins, low, high)
        assert torch.equal(_count_norms(norms), expected.long())


def test_sampled_norms_estimate_whole_table_norms():
    """With a sample of 6 of 23 rows, norms are estimates of the whole table's norms."""
    [(found, before, after, model, whole)] = run_on_ranks(
        1, collect_statistics, {"sharding_type": "table_wise"}, "adagrad", {}, 6
    )
    figures, gradient = found["user"], compute_reference_gradients(before, model, whole[-1])["user"]
    assert sum(figures["row_norm_counts"]) in range(6, 13)
    for key, whole_norm in (
        ("weight_norm", after["user"].norm()),
        ("update_norm", (after["user"] - before["user"]).norm()),
        ("gradient_norm", gradient.norm()),
    ):
        assert 0.5 < figures[key] / float(whole_norm) < 1.5
    assert figures["max_abs"] >= after["user"][collect_ids("user", whole[-1:]).unique()[:6]].abs().max() * 0.5


def test_dead_rows_are_counted_with_adam_on_cpu():
    """The dense kernel is used; rows that were never in a batch have no second moment."""
    (found, _, _, _, whole), *_ = run_on_ranks(1, collect_statistics, {"sharding_type": "row_wise"}, "adam", {}, 4096)
    assert_close(found["user"]["dead_share"], 1 - len(collect_ids("user", whole).unique()) / 23)
    assert found["user"]["state_norm"] > 0


def test_collision_estimate_matches_hashed_ids():
    generator = torch.Generator().manual_seed(0)
    for ids, rows in ((1000, 10_000), (10_000, 10_000), (50_000, 10_000)):
        taken = torch.randint(rows, (ids,), generator=generator).unique()
        estimate = float(estimate_collision_rate(torch.tensor(1 - len(taken) / rows)))
        assert abs(estimate - (1 - len(taken) / ids)) < 0.01


def assert_close(got, expected):
    assert isclose(got, float(expected), rel_tol=1e-4, abs_tol=1e-7), (got, float(expected))
