"""What ranks have seen on its way to all: counted bytes, and the outcomes that the looks of all give."""

import pickle
import random
from types import SimpleNamespace

import pytest
from loops import COPIES, run
from ranks import on_ranks

from raytrec.checks.live import conservation, exchange, finite, numerics, probe
from raytrec.checks.live.exchange import Repeated, join
from raytrec.checks.live.outcome import Position, odd_ones
from raytrec.checks.live.replicas import Replicas
from raytrec.checks.live.same_environment import SameEnvironment
from raytrec.checks.live.shards import Shards
from raytrec.config.sections import PlanSection

WORLD, TABLES = 256, 40
NAMES = [f"t{i}" for i in range(TABLES)]


def up_the_tree(check, looks):
    """What arrives at rank 0, and the most bytes that a rank sends."""
    seen, most = [[Repeated(look)] for look in looks], 0
    while len(seen) > 1:
        most = max(most, *(len(pickle.dumps(runs)) for runs in seen[1::2]))
        seen = [join(check, *pair) if len(pair) == 2 else pair[0] for pair in zip_pairs(seen)]
    return [look for run in seen[0] for look in [run.look] * run.count], most


def zip_pairs(values):
    return [values[i : i + 2] for i in range(0, len(values), 2)]


def watched():
    whole = {"t1"}
    weights = {n: SimpleNamespace(replicated=n in whole, shards=[]) for n in NAMES}
    for weight in weights.values():
        weight.shards = [SimpleNamespace(columns=range(8), rows=range(9))]
    tables = {n: SimpleNamespace(weight=weight) for n, weight in weights.items()}
    sparse = {f"f{n}": SimpleNamespace(table=n) for n in NAMES}
    config = SimpleNamespace(plan=PlanSection())
    return SimpleNamespace(config=config, tables=tables, schema=SimpleNamespace(sparse=sparse))


def conservation_look(draw, rank, bad):
    sent = {f"f{n}": draw.randint(1, 9) for n in NAMES}
    received = {f: n for f, n in sent.items() if f != "ft1"}
    kept = {"ft1": sent["ft1"]}
    if bad and rank in (3, 200):
        received["ft2"] -= 1
        kept["ft1"] += 1
    batch_step = 7 if bad and rank == 100 else 6
    return conservation.Look(Position(7, batch_step, 8 * WORLD), sent, received, kept, 8, rank)


def numerics_look(draw, rank, bad):
    values = {f"table {n}": float(draw.randint(1, 9)) for n in NAMES}
    squares = {f"table {n}": float(draw.randint(1, 9)) for n in NAMES} | {"dense layers' top": 4.0}
    if bad and rank == 9:
        values["table t3"], squares["table t4"] = 1e9, float("nan")
    return numerics.Look(values, squares, {"calibration": (1.0, 10.0)}, rank)


def parity_look(draw, rank, bad):
    forward = {f"f{n}": (draw.randint(1, 9) * 1e-8, rank) for n in NAMES}
    gradient = {n: (draw.randint(1, 9) * 1e-8, rank) for n in NAMES}
    if bad and rank == 77:
        forward["ft5"], gradient["t6"] = (0.5, rank), (0.5, 3)
    return probe.Look(forward, gradient)


def finite_look(draw, rank, bad):
    values = {f"table {n}": draw.random() for n in NAMES}
    if bad and rank in (5, 6):
        values["table t3"] = float("nan")
    return finite.Look(values, {f"{name}'s sum": 1.0 for name in values}, rank)


DIFFERENT = {
    finite.Finite: finite_look,
    conservation.Conservation: conservation_look,
    numerics.Numerics: numerics_look,
    probe.Parity: parity_look,
}


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("kind", DIFFERENT)
def test_looks_that_differ_are_folded(kind, bad):
    draw = random.Random(3)
    looks = [DIFFERENT[kind](draw, rank, bad) for rank in range(WORLD)]
    one, other = kind(watched()), kind(watched())
    for earlier in [numerics_look(draw, 0, False) for _ in range(4)] if kind is numerics.Numerics else ():
        one.judge([earlier], 1)
        other.judge([earlier], 1)
    seen, most = up_the_tree(one, looks)
    found = one.judge(seen, 7)
    assert found == other.judge(looks, 7) and found.passed != bad, found.text
    assert len({id(look) for look in seen}) == 1
    assert most < 6 * len(pickle.dumps(looks[0])) < most * WORLD


ALIKE = {
    Shards: {f"{n}'s weight": ("a" * 16, []) for n in NAMES},
    Replicas: {f"dense/{n}/value": 2**60 for n in NAMES},
    SameEnvironment: {"config": "x" * 9999, "torch": "2.13"},
}
ODD = {
    Shards: {"t3's weight": ("b" * 16, ["rows are missing"])},
    Replicas: {"dense/t3/value": 1},
    SameEnvironment: {"torch": "2.12"},
}


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("kind", ALIKE)
def test_looks_that_are_alike_are_sent_once(kind, odd):
    look = ALIKE[kind]
    other = look | ODD[kind]
    looks = [pickle.loads(pickle.dumps(other if odd and rank == 37 else look)) for rank in range(WORLD)]
    check = kind(watched())
    seen, most = up_the_tree(check, looks)
    assert seen == looks and most < 4 * len(pickle.dumps([Repeated(look)])) + 100
    found = check.judge(seen, 1)
    assert found == check.judge(looks, 1) and found.passed != odd
    assert not odd or "rank 37" in found.text


def test_odd_ones_of_many_ranks_compare_each_once():
    class Value(int):
        compared = 0

        def __eq__(self, other):
            Value.compared += 1
            return int(self) == int(other)

        __hash__ = None

    assert odd_ones([Value(rank == 500) for rank in range(1000)]) == [500]
    assert Value.compared < 5_000


def a_copy_and_an_id(scene):
    if scene.rank == 1:
        scene.state.tables["tag"].weight.local[0].values[-1, -1] += 1


def through_the_tree(*args):
    before, exchange.FEW = exchange.FEW, 0
    try:
        return run(*args)
    finally:
        exchange.FEW = before


@pytest.mark.parametrize("fault", [None, a_copy_and_an_id])
def test_ranks_hear_the_same_through_the_tree(fault):
    plain, folded = (on_ranks(3, loop, COPIES, fault, {}) for loop in (run, through_the_tree))
    assert repr(folded) == repr(plain)


def test_the_probe_compares_the_bags_of_few_ranks_at_a_time():
    assert all(probe.is_looking(rank, 8, turn) for rank in range(8) for turn in range(3)), "few: all, always"
    for world in (9, 64, 1000):
        turns = [{r for r in range(world) if probe.is_looking(r, world, turn)} for turn in range(world)]
        assert max(map(len, turns)) <= probe.LOOKING and set.union(*turns) == set(range(world))
