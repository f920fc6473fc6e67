"""Every place where an ordinary step may make the host wait for its GPU; a new one fails here.

A step is ordinary when nothing is recorded, checked, saved or evaluated at it.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import Mock, patch

import loop
import managed_ids
import pytest
from ranks import on_ranks
from small import SCHEMA, a_schema
from standin.clock import simulated

# A place that waits, and its callers in raytrec, the innermost first (as many as identify it) → why it may.
SPLITS = "TorchRec reads on the host how many ids go to each rank; on the stream of the ids' exchange"
THROTTLE = "the host is nonfinite.LATE steps ahead; the GPU has work for as many"
ALLOWED = {
    ("torchrec/sparse/jagged_tensor.py:_cuda_to_cpu_safe", "pipeline.py:start_sparse_data_dist"): SPLITS,
    ("torchrec/sparse/jagged_tensor.py:_cuda_to_cpu_safe", "pipeline.py:wait_sparse_data_dist"): SPLITS,
    ("torchrec/sparse/jagged_tensor.py:_cuda_to_cpu_safe", "pooling.py:forward"): SPLITS,
    ("train_pipeline/runtime_forwards.py:<listcomp>", "pipeline.py:start_sparse_data_dist"): SPLITS,
    ("train_pipeline/runtime_forwards.py:__call__", "pipeline.py:start_sparse_data_dist"): SPLITS,
    ("torchrec/distributed/dist_data.py:_get_recat", "pipeline.py:wait_sparse_data_dist"): SPLITS,
    ("nonfinite.py:wait", "nonfinite.py:_read", "nonfinite.py:look", "checkpointing.py:after_step"): THROTTLE,
    ("nonfinite.py:wait", "progress.py:_read_pending", "progress.py:report"): THROTTLE,
    (
        "nonfinite.py:wait",
        "nonfinite.py:step",
    ): "on_nan=skip: the forward pass decides whether optimizers step; the backward pass is queued behind it",
}
BY_ID = {
    ("torchrec/sparse/jagged_tensor.py:_cuda_to_cpu_safe", "pooling.py:<listcomp>"): SPLITS,
    (
        "torchrec/distributed/embedding.py:_dedup_indices",
        "pipeline.py:start_sparse_data_dist",
    ): "how many distinct ids there are; on the stream of the ids' exchange",
}
AHEAD = {("torchrec/sparse/jagged_tensor.py:_cuda_to_cpu_safe", "pipeline.py:_prefetch"): SPLITS}
# In `assign`, on the stream that copies batches: how many ids come and go decides what is done next.
ASSIGNED = 56  # in a step, with tables that both evict
MOST_WAITS, MOST_COLLECTIVES = 65, 21  # in a step, of any number of tables
SCHEMAS = {
    "bags": SCHEMA,
    "managed ids": managed_ids.schema(),
    "sequences": a_schema(
        dense=[],
        sparse={
            "user": {"table": "user"},
            "item": {"table": "item"},
            "history": {"table": "item", "pooling": "sequence"},
            "negatives": {"table": "item", "pooling": "sequence"},
        },
        tables={"user": {"rows": 23, "dim": 8}, "item": {"rows": 31, "dim": 8}},
    ),
}
NEXT_ITEM = {"max_length": 4, "negatives": "negatives", "max_negatives": 3}
TOWERS = {"towers": {"query": ["user", "a"], "item": ["friends", "tags", "b"]}, "tower_mlp": [6]}


@dataclass(frozen=True)
class Case:
    """A configuration."""

    changes: tuple = ()
    schema: str = "bags"
    model: dict | None = None
    tasks: tuple = ({},)
    kernel: str = "fused"
    more: dict = field(default_factory=dict)  # that is allowed, and happens


CONFIGURATIONS = {
    "default": Case(),
    "max_grad_norm": Case(("train.max_grad_norm=0.5",)),
    "skip": Case(("train.on_nan=skip",)),
    "skip and max_grad_norm": Case(("train.on_nan=skip", "train.max_grad_norm=0.5")),
    "averages": Case(("train.ema=0.99",)),
    "caches": Case(kernel="fused_uvm_caching", more=AHEAD),
    "managed ids": Case(schema="managed ids"),
    "sasrec": Case(schema="sequences", model={"name": "sasrec", **NEXT_ITEM}, more=BY_ID),
    "hstu": Case(schema="sequences", model={"name": "hstu", **NEXT_ITEM}, more=BY_ID),
    "dien": Case(
        schema="sequences",
        model={"name": "dien", "max_length": 4, "target": "item", "negatives": "negatives", "top_mlp": [6]},
        more=BY_ID,
    ),
    "bst": Case(
        schema="sequences",
        model={"name": "bst", "max_length": 4, "target": "item", "top_mlp": [6]},
        more=BY_ID,
    ),
    "in-batch softmax": Case(model={"name": "two_tower", **TOWERS}, tasks=({"loss": "in_batch_softmax"},)),
}
SLOWER = ["max_grad_norm", "skip", "hstu", "dien", "bst"]  # whose parts others have, too
FIRST, LAST = 5, 25  # ordinary steps of 30: checks begin before them, the last is saved
UPSTREAM = 13  # waits of TorchRec's in a step, at most
BACKWARD_S = 0.03  # of work that the GPU has after each backward pass, so that the host gets ahead


def new_ids(rank, batches):
    """Ids of managed tables that are others from step to step."""
    for step, batch in enumerate(batches):
        of_keys = batch.sparse.values().split(batch.sparse.length_per_key())
        for ids, key in zip(of_keys, batch.sparse.keys(), strict=True):
            if key != "city":
                ids += 2 * step


def waits(rank, world, case, folder):
    """({(where, callers in raytrec, whether the GPU ran dry)} of the ordinary steps; how many of them a step
    has where ids are given rows)."""
    from standin import Gpu

    gpu, found, assigned = Gpu.active, set(), []
    made = loop.make(
        *(rank, world, 30, case.changes, folder, new_ids if case.schema == "managed ids" else None),
        schema=SCHEMAS[case.schema],
        kernel=case.kernel,
        model=case.model,
        tasks=list(case.tasks),
    )
    pipeline = made.step._pipeline
    backward = pipeline._backward

    def longer(losses):
        backward(losses)
        gpu.work(BACKWARD_S * (FIRST <= made.progress.step < LAST))

    def after(made):
        if made.progress.step == FIRST:
            gpu.waits.clear()
        if made.progress.step == LAST:
            assigned[:] = [
                w for w in gpu.waits if any(c.endswith("managed/batches.py:assign") for c in w.callers)
            ]
            found.update((w.where, w.callers, w.drains) for w in gpu.waits if w not in assigned or w.drains)
            of_torchrec = sum(not w.where.startswith("raytrec/") for w in gpu.waits if w not in assigned)
            assert case.schema != "bags" or of_torchrec <= UPSTREAM * (LAST - FIRST), of_torchrec

    pipeline._backward = longer
    with simulated():
        made.train(30, after)
    assert made.error is None, made.error
    return found, len(assigned) / (LAST - FIRST)


def allowed(where, callers, more=()):
    """The key of ALLOWED, or of those that this case may have, that a wait belongs to; None: of none."""
    ours = where.startswith("raytrec/")
    for key in (*ALLOWED, *more):
        places = callers if ours else (where, *callers)
        if len(places) >= len(key) and all(p.endswith(k) for p, k in zip(places, key, strict=False)):
            return key
    return None


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.survive] if name in SLOWER else []) for name in CONFIGURATIONS],
)
def test_ordinary_steps_wait_only_where_they_may(name, tmp_path):
    case = CONFIGURATIONS[name]
    for found, assigned in on_ranks(2, waits, case, str(tmp_path), device="cuda"):
        keys = {(where, *callers): allowed(where, callers, case.more) for where, callers, _ in found}
        new = sorted(places for places, key in keys.items() if not key)
        assert not new, "the host waits for the GPU in every step, at a place that is not in ALLOWED"
        skips = {key for key in ALLOWED if key[1] == "nonfinite.py:step"}
        expected = set(ALLOWED) - (skips if "skip" not in name else set()) | set(case.more)
        if case.more is AHEAD:  # what is read in forward elsewhere
            expected.remove(("torchrec/sparse/jagged_tensor.py:_cuda_to_cpu_safe", "pooling.py:forward"))
        assert set(keys.values()) == expected, "nothing waits there any more"
        dry = {keys[where, *callers] for where, callers, drains in found if drains}
        assert not dry, "the GPU has nothing to do meanwhile"
        assert (0 < assigned <= ASSIGNED) if case.schema == "managed ids" else not assigned


def alike(copies):
    """A Schema of so many pairs of tables, one of each evicting by lru, and one by lfu."""
    names = [f"{name}_{copy}" for copy in range(copies) for name in ("user", "tag")]
    return a_schema(
        sparse={f"of_{name}": {"table": name, "pooling": "mean"} for name in names},
        tables={name: {**managed_ids.TABLES[name.split("_")[0]], "rows": 60} for name in names},
    )


def costs_of_ids(rank, world, copies, folder):
    """([waits, collectives] of each step where ids are given rows, the same ones in each pair of tables;
    table → ids that have lost their row)."""
    import torch
    import torch.distributed as dist
    from standin import Gpu
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    def same_ids(rank, batches):
        drawn = torch.Generator().manual_seed(rank)
        for step, batch in enumerate(batches):
            of_pair = torch.randint(0, 6, (2 * len(batch.weights),), generator=drawn)
            ids = torch.randint(15 * step, 15 * step + 45, (int(of_pair.sum()),), generator=drawn)
            lengths = of_pair.int().repeat(copies)
            batch.sparse = KeyedJaggedTensor(batch.sparse.keys(), ids.repeat(copies), lengths=lengths)
            batch.lengths = lengths

    made = loop.make(rank, world, 12, (), folder, same_ids, schema=alike(copies))
    assign, counts, gpu = made.step.managed.assign, [], Gpu.active
    names = "all_reduce", "all_gather_into_tensor", "all_to_all_single"

    def counted(batch, step):
        with ExitStack() as stack:
            its = [stack.enter_context(patch.object(dist, n, Mock(wraps=getattr(dist, n)))) for n in names]
            before = len(gpu.waits)
            out = assign(batch, step)
            counts.append([len(gpu.waits) - before, sum(one.call_count for one in its)])
        return out

    made.step.managed.assign = counted
    made.train(12)
    assert made.error is None, made.error
    return counts[FIRST:], {table: part.counted["evicted"] for table, part in made.step.maps.items()}


def test_ids_of_more_tables_take_no_more_waits_and_collectives(tmp_path):
    (of_two, evicted), (of_six, _) = (
        on_ranks(2, costs_of_ids, copies, str(tmp_path / str(copies)), device="cuda")[0] for copies in (1, 3)
    )
    assert all(evicted.values()) and of_six == of_two
    assert max(waits for waits, _ in of_two) <= MOST_WAITS
    assert max(collectives for _, collectives in of_two) <= MOST_COLLECTIVES


def forwards_before_ids(rank, world, changes, folder):
    """(name of the pipeline, of each step how many forward passes have been launched when ids get rows)."""
    made = loop.make(rank, world, 8, changes, folder, new_ids, schema=SCHEMAS["managed ids"])
    managed, launched, at = made.step.managed, [], []
    assign = managed.assign

    def noted(batch, step):
        at.append(len(launched))
        return assign(batch, step)

    managed.assign = noted
    made.step.model.register_forward_hook(lambda *_: launched.append(1))
    made.train(8)
    assert made.error is None, made.error
    return type(made.step._pipeline).__name__, at


CACHED = ("plan.tables.city.sharding_type=row_wise", "plan.tables.city.compute_kernel=fused_uvm_caching")


@pytest.mark.parametrize("changes,kind", [((), "TimedPipeline"), (CACHED, "TimedPrefetchPipeline")])
def test_ids_get_rows_while_a_forward_pass_runs(changes, kind, tmp_path):
    # A step's ids after the forward pass of the step two before; those of the first two before any.
    expected = kind, [0, 0, 1, 2, 3, 4, 5, 6]
    assert on_ranks(2, forwards_before_ids, changes, str(tmp_path), device="cuda") == [expected] * 2


def waits_of_prediction(rank, world, folder):
    """The same, while batches are predicted and the first and the last are not among them."""
    from standin import Gpu

    from raytrec.prediction.worker import _SpanCollector

    gpu, found = Gpu.active, []
    made = loop.make(rank, world, 30, (), folder)
    batches, rows = [batch.pin_memory() for batch in made.local], len(made.local[0].weights)
    whole = SimpleNamespace(rows=30 * rows)
    spans = _SpanCollector([whole], SimpleNamespace(put=lambda span, scores, *_: found.extend(scores)), [])
    gpu.waits.clear()
    with simulated():
        for number, outputs in enumerate(made.step.evaluate(spans.watch(iter(batches)))):
            if number == FIRST:
                gpu.waits.clear()
            if number == LAST:
                waited = {(w.where, w.callers, w.drains) for w in gpu.waits}
            gpu.work(BACKWARD_S)
            spans.take(outputs, rows)
        spans.finish()
    assert len(found[0]) == whole.rows
    return waited


def test_predictions_come_late_enough(tmp_path):
    for waited in on_ranks(2, waits_of_prediction, str(tmp_path), device="cuda"):
        ours = [callers for where, callers, _ in waited if where.startswith("raytrec/")]
        assert ours and all("raytrec/prediction/worker.py:_read_pending" in callers for callers in ours)
        assert not any(drains for *_, drains in waited)
