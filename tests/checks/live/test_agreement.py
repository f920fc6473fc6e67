"""Agreement of many ranks on outcomes: by sums and maxima, and by objects only after a failure."""

import random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from loops import DATA_PARALLEL, failed_outcomes, train_with_checks
from rank_threads import run_in_threads
from ranks import run_on_ranks

from raytrec.checks.live import probe
from raytrec.checks.live.agreement import NETWORK, Replicas, SameEnvironment
from raytrec.checks.live.conservation import Conservation, IdCounts, _describe_step_mismatches
from raytrec.checks.live.numerics import Finite, Numerics, Sizes
from raytrec.checks.live.outcome import Position

WORLD, TABLES = 48, 6
NAMES = [f"t{i}" for i in range(TABLES)]


def make_checked_run(peers):
    """Return a run with one feature per table and one shard per table; t1 is replicated on every rank."""
    tables = {}
    for name in NAMES:
        shards = [SimpleNamespace(columns=range(8), rows=range(9))]
        tables[name] = SimpleNamespace(weight=SimpleNamespace(replicated=name == "t1", shards=shards))
    sparse = {f"f{name}": SimpleNamespace(table=name) for name in NAMES}
    return SimpleNamespace(peers=peers, tables=tables, schema=SimpleNamespace(sparse=sparse))


def make_conservation(run, rank, bad):
    draw = random.Random(rank)
    sent = {f"f{name}": draw.randint(1, 9) for name in NAMES}
    looked_up = dict(sent)
    if bad and rank in (3, 40):
        looked_up["ft2"] -= 1
        looked_up["ft1"] += 1
    one = Conservation(run)
    one._counts = lambda _: IdCounts(7, 7 if bad and rank == 10 else 6, sent, looked_up, 8, 8 * WORLD)
    return one, Position(7, expected_rows=8 * WORLD)


def make_numerics(run, rank, bad):
    values = {f"table {name}": 1.0 + rank / 100 for name in NAMES}
    squares = {f"table {name}": 1.0 for name in NAMES} | {"dense layers' top": 4.0}
    one = Numerics(run)
    for _ in range(4):
        assert one.judge(Sizes(values, squares, {}), 1).passed
    if bad and rank == 9:
        values, squares = values | {"table t3": 1e9}, squares | {"table t4": float("nan")}
    one.sizes = lambda *_: Sizes(values, squares, {})
    return one, Position(7)


def make_finite(run, rank, bad):
    sizes = dict.fromkeys(NAMES, 1.0)
    if bad and rank in (5, 6):
        sizes["t3"] = float("nan")
    if bad and rank == 30:
        sizes["t5"] = float("inf")
    one = Finite(run)
    one.sizes = lambda _: sizes
    return one, Position(7)


def make_replicas(run, rank, bad):
    one = Replicas(run)
    one.hashes = lambda: dict.fromkeys(NAMES, 2**60) | ({"t3": 1} if bad and rank == 37 else {})
    return one, Position(7)


def make_same_environment(run, rank, bad):
    about = {"config": "x" * 9999, "torch": "2.12" if bad and rank == 37 else "2.13"}
    about[NETWORK] = "Socket" if bad and rank == 37 else "IB"
    return SameEnvironment(run), Position(7, about=about)


FAILURE_TEXTS = {
    make_conservation: [
        "rank 10 trained the batch of step 8 at step 7",
        "ft1: rank 3 looked up 10 ids, but its batches contain 9",
    ],
    make_numerics: ["table t4: the gradient is NaN or infinite on rank 9", "max |value| is 1e+09 (on rank 9)"],
    make_finite: ["t5: a value is NaN or infinite on rank 30; t3: a value is NaN or infinite on ranks 5 and 6"],
    make_replicas: ["t3 on rank 37 differs from the other ranks"],
    make_same_environment: ["torch is '2.12' on rank 37 and '2.13' on ranks 0, 1,", "'Socket' on rank 37"],
}
SUCCESS_TEXTS = {make_same_environment: "3 facts are the same on all ranks; NCCL's network is IB"}


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("kind", FAILURE_TEXTS)
def test_ranks_exchange_objects_only_after_a_failure(kind, bad):
    def evaluated(peers):
        one, position = kind(make_checked_run(peers), peers.rank, bad)
        return one.evaluate(position, True), peers.spoken

    (outcome, spoken), *others = run_in_threads(WORLD, evaluated)
    assert all(other == (outcome, spoken) for other in others), "outcomes are equal on all ranks"
    assert outcome.passed != bad and spoken == bad
    for text in FAILURE_TEXTS[kind] if bad else [SUCCESS_TEXTS.get(kind, "")]:
        assert text in outcome.text, outcome.text


def test_ranks_with_other_values_are_named_apart():
    def evaluated(peers):
        about = {"torch": ("2.13", "2.12", "2.13", "2.11")[peers.rank]}
        return SameEnvironment(make_checked_run(peers)).evaluate(Position(0, about=about), False).text

    assert run_in_threads(4, evaluated)[0] == (
        "torch is '2.12' on rank 1 and '2.13' on ranks 0 and 2, and has other values on rank 3"
    )


def test_ranks_at_other_steps_are_named_with_their_steps():
    counts = [IdCounts(step, None, {}, {}, 0) for step in (9, 8, 9, 7, 9)]
    assert _describe_step_mismatches(counts) == ["ranks 1 and 3 completed 8 or 7 steps instead of 9"]


def test_ranks_that_expect_other_numbers_of_rows_fail_together():
    def evaluated(peers):
        run, features, counts = make_checked_run(peers), [f"f{name}" for name in NAMES], torch.ones(TABLES).long()
        lookup = SimpleNamespace(features=features, received=counts)
        run.taps = SimpleNamespace(lookups=[lookup], features=features, sent=counts, rows=torch.tensor(8))
        return Conservation(run).evaluate(Position(7, expected_rows=32 + (peers.rank == 2)), True)

    outcome, *others = run_in_threads(4, evaluated)
    assert not outcome.passed and all(other == outcome for other in others)
    assert "the batches have 33 rows, but 32 were trained" in outcome.text


def loop_without_objects(rank, world, fault):
    """Run a loop whose ranks cannot exchange objects."""
    with patch("raytrec.common.collectives.Peers.objects", side_effect=RuntimeError("nothing is wrong")):
        return train_with_checks(rank, world, DATA_PARALLEL, fault)


def change_one_copy(scene):
    if scene.rank == 1:
        scene.state.tables["tag"].weight.local[0].values[-1, -1] += 1


def test_passing_checks_exchange_no_objects():
    assert not failed_outcomes(run_on_ranks(3, loop_without_objects, None))
    with pytest.raises(RuntimeError, match="nothing is wrong"):
        run_on_ranks(3, loop_without_objects, change_one_copy)


def test_probe_compares_bags_of_few_ranks_per_turn():
    assert all(probe.is_comparing(rank, 8, turn) for rank in range(8) for turn in range(3)), (
        "with few ranks, all ranks compare in every turn"
    )
    for world in (9, 64, 1000):
        turns = [{r for r in range(world) if probe.is_comparing(r, world, turn)} for turn in range(world)]
        assert max(map(len, turns)) <= probe.MAX_COMPARING_RANKS and set.union(*turns) == set(range(world))
