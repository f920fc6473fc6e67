"""Training with managed ids, whose rows are reassigned at most steps, compared with one process that has a
separate row for each lifetime of each id."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from managed_ids import ROWS, SEED, SPARSE, STEPS, managed_config, managed_schema, random_id_batches
from plain_ids import ReferenceIdMap, splitmix64
from ranks import run_on_ranks
from small import assert_same_state, copy_local_state

from raytrec.checks.parity import compare
from raytrec.checks.parity import reference as one_process
from raytrec.checks.parity.batches import compute_row_bounds
from raytrec.checks.parity.sharded import ShardedRun
from raytrec.embeddings.hashing import compute_initial_values
from raytrec.embeddings.tables import tables
from raytrec.models import build_model
from raytrec.worker.build import build_step


class IdLifetimes:
    """Ids of one table as rows of an unbounded table.

    Each lifetime of an id has its own row, followed by the fallback rows.
    """

    def __init__(self, batches, name):
        table = managed_schema().tables[name]
        self.plain, self.steps, self.ids, live = ReferenceIdMap(table.rows, table.ids, SEED), [], [], {}
        self.fallback = table.ids.fallback_rows
        features = [feature for feature, spec in SPARSE.items() if spec["table"] == name]
        admitted = evicted = lookups = without = 0
        for step, batch in enumerate(batches):
            seen = [i for f in features for i in batch.bags[f][0].tolist()]
            rows = self.plain.step(step, seen)
            admitted, evicted = admitted + len(self.plain.new), evicted + len(self.plain.left)
            lookups, without = lookups + len(seen), without + sum(rows[i] is None for i in seen)
            for i in self.plain.left:
                del live[i]
            for i in self.plain.new:
                live[i] = len(self.ids)
                self.ids.append(i)
            self.steps.append(dict(live))
        self.figures = {
            "occupancy": len(self.plain.rows) / self.plain.capacity,
            "admitted_ids": admitted,
            "evicted_ids": evicted,
            "fallback_share": without / lookups,
            "id_age": len(batches) - sum(row[2] for row in self.plain.rows.values()) / len(self.plain.rows),
        }

    def places(self, ids, step):
        known, rest = self.steps[step], len(self.ids)
        return torch.tensor([known.get(i, rest + splitmix64(i) % self.fallback) for i in ids.tolist()]).long()


def run_training(rank, world, sharding, optimizer, train):
    """Return, on rank 0, the trained values and the values of one process trained on the same batches."""
    batches, made = random_id_batches(), managed_config(world, sharding, optimizer, **train)
    run = ShardedRun(
        build_step, made, managed_schema(), torch.device("cpu"), compute_row_bounds(ROWS, world, "unequal")
    )
    start = {n: None if v is None else v.clone() for n, v in run.weights().items()}
    ahead = random_id_batches()[-1]  # looked up but not trained
    run.train(batches)
    figures, nothing = run.step.managed.collect_figures(), run.step.managed.collect_figures()
    assert nothing["user"]["fallback_share"] is None and nothing["user"]["admitted_ids"] == 0
    (outputs,) = run.step.evaluate(iter([run._local(ahead)]))
    evaluated = outputs["y"].logits
    parts, known = [None] * world, {}
    torch.distributed.all_gather_object(parts, evaluated[: run.bounds[rank + 1] - run.bounds[rank]])
    for name in managed_schema().managed:
        features = [feature for feature, spec in SPARSE.items() if spec["table"] == name]
        ids = torch.cat([batch.bags[feature][0] for batch in batches for feature in features]).unique()
        known[name] = dict(zip(ids.tolist(), run.step.managed.look_up_rows(name, ids).tolist(), strict=True))
    after = tables(run.step.model, run.step.optimizer)
    raw = {n: [t.weight.dense(), *(t.state[k].dense() for k in sorted(t.state))] for n, t in after.items()}
    if rank:
        return None
    one, lives = build_reference(run, start, batches)
    optimizers = list(compare._make_optimizers(run, one).values())
    whole = [renumber_batch(batch, lives, step) for step, batch in enumerate(batches)]
    one_process.train(one, whole, optimizers, max_grad_norm=train.get("max_grad_norm"))
    expected = {n: [w.detach(), *list_states(optimizers, w)] for n, w in one.tables.items()}
    logits = one(renumber_batch(ahead, lives, STEPS - 1)).detach()
    return raw, expected, known, logits, torch.cat(parts), figures


def list_states(optimizers, weight):
    kept = next((o.state[weight] for o in optimizers if weight in o.state), {})
    return [kept[k] for k in sorted(kept) if k != "step"]


def build_reference(run, start, batches):
    """Return (a Reference with a row for each lifetime, table → IdLifetimes)."""
    lives = {n: IdLifetimes(batches, n) for n in managed_schema().managed}
    begin = {}
    for name, table in managed_schema().tables.items():
        begin[name] = start[name]
        if name in lives:
            own = compute_initial_values(SEED, name, torch.tensor(lives[name].ids), range(table.dim), table.rows)
            begin[name] = torch.cat([own, start[name][table.own_rows :]])
    one = one_process.Reference(managed_schema(), begin, build_model(managed_schema(), run.config.model).train())
    with torch.no_grad():
        for name, parameter in one.model.named_parameters():
            parameter.copy_(start[name])
    return one, lives


def renumber_batch(batch, lives, step):
    bags = {}
    for feature, (ids, bag, weights) in batch.bags.items():
        table = SPARSE[feature]["table"]
        bags[feature] = lives[table].places(ids, step) if table in lives else ids, bag, weights
    return replace(batch, bags=bags)


CASES = [
    (1, "row_wise", "adagrad", {}),
    (2, "row_wise", "rowwise_adagrad", {"max_grad_norm": 0.05, "activation_checkpointing": True}),
    (2, "table_wise", "sgd", {}),
    (3, "row_wise", "sgd", {"activation_checkpointing": True}),
    pytest.param(3, "table_wise", "adagrad", {"max_grad_norm": 0.05}, marks=pytest.mark.parity),
    pytest.param(2, "data_parallel", "adagrad", {}, marks=pytest.mark.parity),
    pytest.param(2, "column_wise", "adagrad", {}, marks=pytest.mark.parity),
]


@pytest.mark.slow
@pytest.mark.parametrize("world,sharding,optimizer,train", CASES)
def test_managed_training_matches_unbounded_tables(world, sharding, optimizer, train):
    got, expected, known, logits, evaluated, figures = run_on_ranks(
        world, run_training, {"sharding_type": sharding}, optimizer, train
    )[0]
    lives = {n: IdLifetimes(random_id_batches(), n) for n in managed_schema().managed}
    assert figures == {name: pytest.approx(of_table.figures) for name, of_table in lives.items()}
    for name, spec in managed_schema().tables.items():
        assert len(got[name]) == len(expected[name])
        for whole, plain in zip(got[name], expected[name], strict=True):
            if name in lives:
                last = lives[name].steps[-1]
                rows = [known[name][i] for i in last] + list(range(spec.own_rows, spec.rows))
                places = [*last.values(), *range(len(lives[name].ids), len(plain))]
                whole, plain = whole[rows], plain[places]
                assert len(set(rows)) == len(rows) > spec.own_rows / 2
            torch.testing.assert_close(whole.float(), plain, rtol=1e-4, atol=1e-6)
    assert len(lives["user"].plain.left) and len(lives["user"].ids) > 2 * managed_schema().tables["user"].rows
    torch.testing.assert_close(evaluated.view(-1), logits.view(-1), rtol=1e-4, atol=1e-5)


def train_on_device(rank, world, device, block):
    """Return (this rank's state after training, the largest number of values initialized at once, whether the
    id exchange has a separate group)."""
    import torch.distributed as dist

    made, sizes = managed_config(world, {"sharding_type": "row_wise"}, "adagrad"), []
    run = ShardedRun(
        build_step, made, managed_schema(), torch.device(device), compute_row_bounds(ROWS, world, "unequal")
    )

    def values(seed, table, ids, columns, rows):
        sizes.append(len(ids) * len(columns))
        return compute_initial_values(seed, table, ids, columns, rows)

    groups, gather = set(), dist.all_gather_into_tensor

    def noted(*args, **options):
        if "async_op" not in options:  # TorchRec's calls pass async_op
            groups.add(options["group"] not in (None, dist.group.WORLD))
        return gather(*args, **options)

    batches, local = ("raytrec.embeddings.managed.batches", [run._local(batch) for batch in random_id_batches()])
    if device != "cpu":
        local = [batch.pin_memory() for batch in local]
    with (
        patch(f"{batches}.VALUES_PER_BLOCK", block or 2**19),
        patch(f"{batches}.compute_initial_values", values),
        patch.object(dist, "all_gather_into_tensor", noted),
    ):
        for _ in run.step.train(iter(local), len(local)):
            pass
    return copy_local_state(run.step), max(sizes), groups


@pytest.mark.slow
def test_new_rows_are_initialized_equally_in_blocks_and_on_gpus():
    plain = run_on_ranks(2, train_on_device, "cpu", None)
    for (state, most, _), (in_blocks, few, groups) in zip(
        plain, run_on_ranks(2, train_on_device, "cpu", 16), strict=True
    ):
        assert_same_state(in_blocks, state)
        assert most > few == 16 and groups == {False}
    for (state, *_), (on_gpu, few, groups) in zip(
        plain, run_on_ranks(2, train_on_device, "cuda", 16, device="cuda"), strict=True
    ):
        assert_same_state(on_gpu, state)
        assert few == 16 and groups == {True}
