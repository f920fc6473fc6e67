"""Places where the host may wait for its GPU in an ordinary step; a new place fails the test.

A step is ordinary if it has no record, check, checkpoint or evaluation.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import Mock, patch

import loop
import managed_ids
import pytest
from ranks import run_on_ranks
from small import SCHEMA, make_small_config, make_small_schema
from standin.clock import use_simulated_clock

from raytrec.config.run_config import load_config
from raytrec.deltas.chain import open_stream

# (Waiting place, callers in raytrec, innermost first, as many as needed to identify it) → reason.
SPLITS = "TorchRec reads on the host how many ids go to each rank; on the stream of the ids' exchange"
THROTTLE = "the host is nonfinite.MAX_STEPS_IN_FLIGHT steps ahead; the GPU has work for them"
SKIP = "on_nan=skip: the forward pass decides whether optimizers step; the backward pass is queued behind it"
DISTINCT = "how many distinct ids there are; on the stream of the ids' exchange"
TO_CPU = "torchrec/sparse/jagged_tensor.py:_cuda_to_cpu_safe"
ALLOWED_WAITS = {
    (TO_CPU, "pipeline.py:__call__"): SPLITS,
    (TO_CPU, "pipeline.py:_receive_splits"): SPLITS,
    (TO_CPU, "pooling.py:forward"): SPLITS,
    ("torchrec/distributed/dist_data.py:_get_recat", "pipeline.py:wait_sparse_data_dist"): SPLITS,
    ("nonfinite.py:wait", "nonfinite.py:poll_status", "checkpointing.py:after_step"): THROTTLE,
    ("nonfinite.py:wait", "progress.py:_read_pending", "progress.py:report"): THROTTLE,
    ("nonfinite.py:wait", "nonfinite.py:step"): SKIP,
}
SEQUENCE_WAITS = {
    (TO_CPU, "pooling.py:<listcomp>"): SPLITS,
    ("torchrec/distributed/embedding.py:_dedup_indices", "pipeline.py:start_sparse_data_dist"): DISTINCT,
}
PREFETCH_WAITS = {(TO_CPU, "pipeline.py:_prefetch"): SPLITS}
# In `assign`, on the copy stream: the host needs the numbers of new and evicted ids.
MAX_ASSIGN_WAITS = 40  # per step, two evicting tables
MAX_WAITS, MAX_COLLECTIVES = 65, 21  # per step, for any number of tables
ITEM_TABLES = {"user": {"rows": 23, "dim": 8}, "item": {"rows": 31, "dim": 8}}
SEQUENCE = {"table": "item", "pooling": "sequence"}
PAIRS = {"user": {"table": "user"}, "item": {"table": "item"}, "negatives": SEQUENCE}
SCHEMAS = {
    "bags": SCHEMA,
    "managed ids": managed_ids.managed_schema(),
    "sequences": make_small_schema(dense=[], sparse=PAIRS | {"history": SEQUENCE}, tables=ITEM_TABLES),
    "pairs": make_small_schema(dense=[], sparse=PAIRS, tables=ITEM_TABLES),
}
NEXT_ITEM = {"max_length": 4, "negatives": "negatives", "max_negatives": 3}
TOWERS = {"towers": {"query": ["user", "a"], "item": ["friends", "tags", "b"]}, "tower_mlp": [6]}
PAIR_TOWERS = {"towers": {"query": ["user"], "item": ["item"]}, "tower_mlp": [6]}
# Negatives outnumber the queries of a rank, so queries are sent to all ranks.
SHARED = {"negatives": "negatives", "max_negatives": 3, "share_negatives": True}
OWN_LOSS = ({"loss": "from_model"},)
DELTAS = ("export.deltas.every_s=1000", "export.deltas.to={folder}/deltas")


@dataclass(frozen=True)
class Case:
    """A training configuration and its additional allowed waits."""

    changes: tuple = ()
    schema: str = "bags"
    model: dict | None = None
    tasks: tuple = ({},)
    kernel: str = "fused"
    more: dict = field(default_factory=dict)  # additional waits that must occur

    @classmethod
    def of_sequences(cls, name, schema="sequences", tasks=tasks, **model):
        return cls(schema=schema, model={"name": name, **model}, tasks=tasks, more=SEQUENCE_WAITS)


CONFIGURATIONS = {
    "default": Case(),
    "max_grad_norm": Case(("train.max_grad_norm=0.5",)),
    "skip": Case(("train.on_nan=skip",)),
    "skip and max_grad_norm": Case(("train.on_nan=skip", "train.max_grad_norm=0.5")),
    "averages": Case(("train.ema=0.99",)),
    "caches": Case(kernel="fused_uvm_caching", more=PREFETCH_WAITS),
    "managed ids": Case(schema="managed ids"),
    "deltas": Case(DELTAS),
    "deltas of managed ids": Case(DELTAS, schema="managed ids"),
    "sasrec": Case.of_sequences("sasrec", **NEXT_ITEM),
    "hstu": Case.of_sequences("hstu", **NEXT_ITEM),
    "hstu_rank": Case.of_sequences("hstu_rank", max_length=4, dim=8),
    "dien": Case.of_sequences("dien", max_length=4, target="item", negatives="negatives", top_mlp=[6]),
    "bst": Case.of_sequences("bst", max_length=4, target="item", top_mlp=[6]),
    "sasrec shared": Case.of_sequences("sasrec", tasks=OWN_LOSS, max_length=4, **SHARED),
    "two_tower shared": Case.of_sequences("two_tower", "pairs", OWN_LOSS, **PAIR_TOWERS, **SHARED),
    "in-batch softmax": Case(model={"name": "two_tower", **TOWERS}, tasks=({"loss": "in_batch_softmax"},)),
}
# Cases of `make test`, and cases of `make test-survive`, whose parts are in other cases. The others are slow.
MARKS = dict.fromkeys(("default",), ())
MARKS |= dict.fromkeys(
    ("deltas", "deltas of managed ids", "max_grad_norm", "skip", "hstu", "hstu_rank", "dien", "bst"),
    pytest.mark.survive,
)
FIRST_STEP, LAST_STEP = 5, 25  # range of ordinary steps of 30: checks run before it, the last step is saved
MAX_UPSTREAM_WAITS = 7  # maximum waits of TorchRec per step
BACKWARD_S = 0.03  # GPU work after each backward pass, so that the host runs ahead


def shift_managed_ids(rank, batches):
    """Shift the ids of managed tables at each step, so that new ids appear."""
    for step, batch in enumerate(batches):
        of_keys = batch.sparse.values().split(batch.sparse.length_per_key())
        for ids, key in zip(of_keys, batch.sparse.keys(), strict=True):
            if key != "city":
                ids += 2 * step


def make_slow_loop(rank, world, case, steps, folder, slow_steps):
    """Return a case's training loop, in which the GPU needs BACKWARD_S for the backward pass of each slow step."""
    from standin import StandInGpu

    changes = [change.replace("{folder}", folder) for change in case.changes]
    made = loop.make_worker_loop(
        *(rank, world, steps, changes, folder, shift_managed_ids if case.schema == "managed ids" else None),
        schema=SCHEMAS[case.schema],
        kernel=case.kernel,
        model=case.model,
        tasks=list(case.tasks),
    )
    pipeline = made.step._pipeline
    backward = pipeline._backward

    def take_longer(losses):
        backward(losses)
        StandInGpu.active.work(BACKWARD_S * (made.progress.step in slow_steps))

    pipeline._backward = take_longer
    return made


def collect_waits(rank, world, case, folder):
    """Return (waits of the ordinary steps, id assignment waits per step).

    A wait is (place, callers in raytrec, whether the GPU ran out of work).
    """
    from standin import StandInGpu

    gpu, found, assigned = StandInGpu.active, set(), []
    made = make_slow_loop(rank, world, case, 30, folder, range(FIRST_STEP, LAST_STEP))

    def after(made):
        if made.progress.step == FIRST_STEP:
            gpu.waits.clear()
        if made.progress.step == LAST_STEP:
            place = "managed/batches.py:map_and_admit_ids"
            assigned[:] = [w for w in gpu.waits if any(c.endswith(place) for c in w.callers)]
            found.update((w.where, w.callers, w.drains) for w in gpu.waits if w not in assigned or w.drains)
            of_torchrec = sum(not w.where.startswith("raytrec/") for w in gpu.waits if w not in assigned)
            assert case.schema != "bags" or of_torchrec <= MAX_UPSTREAM_WAITS * (LAST_STEP - FIRST_STEP), of_torchrec

    with use_simulated_clock():
        made.train(30, after)
    assert made.error is None, made.error
    return found, len(assigned) / (LAST_STEP - FIRST_STEP)


def find_allowed_key(where, callers, more=()):
    """Return the matching key of ALLOWED_WAITS or of the additional waits, or None."""
    ours = where.startswith("raytrec/")
    for key in (*ALLOWED_WAITS, *more):
        places = callers if ours else (where, *callers)
        if len(places) >= len(key) and all(p.endswith(k) for p, k in zip(places, key, strict=False)):
            return key
    return None


def create_stream(folder):
    """Create the stream of deltas of a run, with an export, so that no checkpoint is saved after the first step."""
    changes = [change.replace("{folder}", str(folder)) for change in DELTAS]
    open_stream(load_config(make_small_config(1, {}), ["run.name=run", f"run.dir={folder}", *changes]))
    export = folder / "deltas/exports/000000000000"
    export.mkdir(parents=True)
    (export / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in CONFIGURATIONS]
)
def test_ordinary_steps_wait_only_at_allowed_places(name, tmp_path):
    case = CONFIGURATIONS[name]
    if case.changes == DELTAS:
        create_stream(tmp_path)
    for found, assigned in run_on_ranks(2, collect_waits, case, str(tmp_path), device="cuda"):
        keys = {(where, *callers): find_allowed_key(where, callers, case.more) for where, callers, _ in found}
        new = sorted(places for places, key in keys.items() if not key)
        assert not new, "the host waits for the GPU in every step, at a place that is not in ALLOWED_WAITS"
        skips = {key for key in ALLOWED_WAITS if key[1] == "nonfinite.py:step"}
        expected = set(ALLOWED_WAITS) - (skips if "skip" not in name else set()) | set(case.more)
        if case.more is PREFETCH_WAITS:  # other cases read this in forward
            expected.remove((TO_CPU, "pooling.py:forward"))
        assert set(keys.values()) == expected, "an allowed wait no longer occurs"
        dry = {keys[where, *callers] for where, callers, drains in found if drains}
        assert not dry, "the GPU is idle during the wait"
        assert (0 < assigned <= MAX_ASSIGN_WAITS) if case.schema == "managed ids" else not assigned


def make_table_pairs_schema(copies):
    """Return a Schema with this many pairs of tables; in each pair one table evicts by LRU, one by LFU."""
    names = [f"{name}_{copy}" for copy in range(copies) for name in ("user", "tag")]
    return make_small_schema(
        sparse={f"of_{name}": {"table": name, "pooling": "mean"} for name in names},
        tables={name: {**managed_ids.TABLES[name.split("_")[0]], "rows": 60} for name in names},
    )


def measure_id_costs(rank, world, copies, folder):
    """Measure id assignment when each pair of tables sees the same ids.

    Return ([waits, collectives] of each step, evicted ids per table).
    """
    import torch
    import torch.distributed as dist
    from standin import StandInGpu
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    def same_ids(rank, batches):
        drawn = torch.Generator().manual_seed(rank)
        for step, batch in enumerate(batches):
            of_pair = torch.randint(0, 6, (2 * len(batch.weights),), generator=drawn)
            ids = torch.randint(15 * step, 15 * step + 45, (int(of_pair.sum()),), generator=drawn)
            lengths = of_pair.int().repeat(copies)
            batch.sparse = KeyedJaggedTensor(batch.sparse.keys(), ids.repeat(copies), lengths=lengths)
            batch.lengths = lengths

    made = loop.make_worker_loop(rank, world, 12, (), folder, same_ids, schema=make_table_pairs_schema(copies))
    assign, counts, gpu = made.step.managed.map_and_admit_ids, [], StandInGpu.active
    names = "all_reduce", "all_gather_into_tensor", "all_to_all_single"

    def counted(batch, step):
        with ExitStack() as stack:
            its = [stack.enter_context(patch.object(dist, n, Mock(wraps=getattr(dist, n)))) for n in names]
            before = len(gpu.waits)
            out = assign(batch, step)
            counts.append([len(gpu.waits) - before, sum(one.call_count for one in its)])
        return out

    made.step.managed.map_and_admit_ids = counted
    made.train(12)
    assert made.error is None, made.error
    return counts[FIRST_STEP:], {table: part.counted["evicted"] for table, part in made.step.maps.items()}


@pytest.mark.survive
def test_id_assignment_cost_is_independent_of_table_count(tmp_path):
    (of_two, evicted), (of_six, _) = (
        run_on_ranks(2, measure_id_costs, copies, str(tmp_path / str(copies)), device="cuda")[0] for copies in (1, 3)
    )
    assert all(evicted.values()) and of_six == of_two
    assert max(waits for waits, _ in of_two) <= MAX_WAITS
    assert max(collectives for _, collectives in of_two) <= MAX_COLLECTIVES


def record_forwards_before_ids(rank, world, changes, folder):
    """Return (pipeline class name, number of launched forward passes at each id assignment)."""
    made = loop.make_worker_loop(rank, world, 8, changes, folder, shift_managed_ids, schema=SCHEMAS["managed ids"])
    managed, launched, at = made.step.managed, [], []
    assign = managed.map_and_admit_ids

    def noted(batch, step):
        at.append(len(launched))
        return assign(batch, step)

    managed.map_and_admit_ids = noted
    made.step.model.register_forward_hook(lambda *_: launched.append(1))
    made.train(8)
    assert made.error is None, made.error
    return type(made.step._pipeline).__name__, at


CACHED = ("plan.tables.city.sharding_type=row_wise", "plan.tables.city.compute_kernel=fused_uvm_caching")


@pytest.mark.slow
@pytest.mark.parametrize("changes,kind", [((), "TimedPipeline"), (CACHED, "TimedPrefetchPipeline")])
def test_ids_are_assigned_during_a_forward_pass(changes, kind, tmp_path):
    # A step's ids are assigned after the forward pass two steps earlier; the first two before any.
    expected = kind, [0, 0, 1, 2, 3, 4, 5, 6]
    assert run_on_ranks(2, record_forwards_before_ids, changes, str(tmp_path), device="cuda") == [expected] * 2


def collect_prediction_waits(rank, world, folder):
    """Return the waits while batches are predicted, without the first and the last batches."""
    from standin import StandInGpu

    from raytrec.prediction.worker import _SpanCollector

    gpu, found = StandInGpu.active, []
    made = loop.make_worker_loop(rank, world, 30, (), folder)
    batches, rows = [batch.pin_memory() for batch in made.local], len(made.local[0].weights)
    whole = SimpleNamespace(rows=30 * rows)
    spans = _SpanCollector([whole], SimpleNamespace(put=lambda span, scores, *_: found.extend(scores)), [])
    gpu.waits.clear()
    with use_simulated_clock():
        for number, outputs in enumerate(made.step.evaluate(spans.watch(iter(batches)))):
            if number == FIRST_STEP:
                gpu.waits.clear()
            if number == LAST_STEP:
                waited = {(w.where, w.callers, w.drains) for w in gpu.waits}
            gpu.work(BACKWARD_S)
            spans.take(outputs, rows)
        spans.finish()
    assert len(found[0]) == whole.rows
    return waited


def test_reading_predictions_does_not_stall_the_gpu(tmp_path):
    for waited in run_on_ranks(2, collect_prediction_waits, str(tmp_path), device="cuda"):
        ours = [callers for where, callers, _ in waited if where.startswith("raytrec/")]
        assert ours and all("raytrec/prediction/worker.py:_read_pending" in callers for callers in ours)
        assert not any(drains for *_, drains in waited)
