"""Managed ids of one table on one process, against a dict in plain Python."""

import numpy as np
import pytest
import torch
from plain_ids import PlainIds, key

from raytrec.common.collectives import Peers
from raytrec.config.managed import ManagedIds
from raytrec.embeddings.hashing import hash_bits, unhash_bits
from raytrec.embeddings.managed.batches import IdExchange
from raytrec.embeddings.managed.key_map import Entries, KeyMap
from raytrec.embeddings.managed.keys import NO_KEY, first_keys, keys_of, shares
from raytrec.embeddings.managed.policy import lowest
from raytrec.embeddings.managed.row_map import RowMap

CPU = torch.device("cpu")
EDGES = [0, 1, -1, 2**63 - 1, -(2**63), 2**62, 12345678901234567]
POLICIES = {
    "lru": {},
    "lfu": {"eviction": "lfu"},
    "none": {"eviction": "none"},
    "after": {"admit_after": 3},
    "after, lfu": {"admit_after": 2, "eviction": "lfu", "fallback_rows": 3},
    "ttl in steps": {"ttl_steps": 5, "eviction": "none"},
    "long ttl in steps": {"ttl_steps": 17, "admit_after": 2},
}


def random_batches(steps, seed=0, ids=400, size=60):
    """Lists of ids of global batches; few are in many, most in few."""
    rng = np.random.default_rng(seed)
    known = np.concatenate([EDGES, rng.integers(-(2**63), 2**63, ids - len(EDGES))])
    return [known[np.minimum(rng.zipf(1.3, size) - 1 + 3 * step, ids - 1)].tolist() for step in range(steps)]


def make(rows, policy, seed=0):
    return RowMap(rows, policy, seed, Peers(alone=True), CPU)


class Rows(dict):
    """The how many-th row that was handed out → the row; each row once."""

    def check(self, expected, got, fallback):
        for number, row in zip(expected, got, strict=True):
            if number is None:
                assert row >= fallback
            else:
                assert row < fallback and self.setdefault(number, row) == row
        assert len(set(self.values())) == len(self)


@pytest.mark.parametrize("name", POLICIES)
def test_a_map_is_that_of_a_dict(name):
    policy, size = ManagedIds(**POLICIES[name]), 140 if name == "lru" else 90  # two leave at a time, or one
    plain, numbered = PlainIds(size, policy, 7), Rows()
    exchange = IdExchange({"t": make(size, policy, 7)}, Peers(alone=True), CPU)
    left = admitted = 0
    for step, ids in enumerate(random_batches(60)):
        expected = plain.step(step, ids)
        rows, new = exchange.train({"t": torch.tensor(ids)}, step)
        numbered.check([expected[i] for i in ids], rows["t"].tolist(), plain.capacity)
        new = dict(zip(new["t"].ids.tolist(), new["t"].rows.tolist(), strict=True))
        assert new == {i: numbered[number] for i, number in plain.new.items()}
        left, admitted = left + len(plain.left), admitted + len(plain.new)
        one = exchange.maps["t"]
        assert len(one) == len(plain.rows) and one.waiting == len(plain.waiting)
    assert one.counted["admitted"] == admitted and one.counted["evicted"] == left
    assert admitted > 40 and bool(left) == (name != "none")
    seen = sorted({i for ids in random_batches(60) for i in ids})
    found = exchange.look_up({"t": torch.tensor(seen)})["t"].tolist()
    numbered.check([plain.rows.get(i, [None])[0] for i in seen], found, plain.capacity)


def test_all_rows_are_used():
    one = IdExchange({"t": make(101, ManagedIds())}, Peers(alone=True), CPU)
    rows, _ = one.train({"t": torch.arange(100)}, 0)
    assert sorted(rows["t"].tolist()) == list(range(100))
    halves = one.train({"t": torch.arange(1000, 1050)}, 1)[0]["t"]
    assert len(set(halves.tolist())) == 50 and len(one.maps["t"]) == 100


def test_rows_are_handed_out_evenly():
    rows, _ = IdExchange({"t": make(1001, ManagedIds())}, Peers(alone=True), CPU).train(
        {"t": torch.arange(250)}, 0
    )
    in_quarters = torch.bincount(rows["t"] // 250, minlength=4)
    assert in_quarters.min() >= 55


def test_a_batch_with_more_ids_than_rows():
    one, plain = make(11, ManagedIds()), PlainIds(11, ManagedIds())
    exchange, numbered = IdExchange({"t": one}, Peers(alone=True), CPU), Rows()
    for step in range(3):
        ids = list(range(30 * step, 30 * step + 25))
        expected = plain.step(step, ids)
        rows = exchange.train({"t": torch.tensor(ids)}, step)[0]["t"]
        numbered.check([expected[i] for i in ids], rows.tolist(), 10)
    assert one.counted == {"admitted": 30, "evicted": 20, "lookups": 75, "fallback": 45}


@pytest.mark.parametrize(("eviction", "left"), [("lru", 0), ("lfu", 63 - 4)])
def test_a_flood_of_new_ids(eviction, left):
    one = IdExchange({"t": make(65, ManagedIds(eviction=eviction))}, Peers(alone=True), CPU)
    for step in range(6):  # the last one is seen once only
        one.train({"t": torch.arange(64 if step == 0 else 63)}, step)
    for step in range(6, 11):
        one.train({"t": torch.arange(1000 * step, 1000 * step + 200)}, step)
    rows = one.look_up({"t": torch.arange(64)})["t"]
    assert int((rows < 64).sum()) >= left and len(one.maps["t"]) == 64
    if eviction == "lru":
        assert (rows == 64).all()


def test_ids_seen_most_often_are_first_where_rows_are_few():
    one = IdExchange({"t": make(11, ManagedIds(eviction="none"))}, Peers(alone=True), CPU)
    rows, new = one.train({"t": torch.tensor([*range(40), *range(30, 37), *range(30, 33)])}, 0)
    assert set(range(30, 37)) <= set(new["t"].ids.tolist()) and int((rows["t"][:40] < 10).sum()) == 10


def plain_state(state):
    """A MapState as values that == compares."""
    maps = [
        [e.keys.tolist(), *(e.fields[n].tolist() for n in sorted(e.fields))]
        for e in (state.rows.in_order(), state.waiting.in_order())
    ]
    return maps, state.free.handed, state.free.left.tolist()


@pytest.mark.parametrize("name", ["after, lfu", "long ttl in steps"])
def test_a_state_that_is_loaded_goes_on_as_the_other(name):
    policy, batches = ManagedIds(**POLICIES[name]), random_batches(40)
    maps = [make(70, policy), make(70, policy)]
    one, other = (IdExchange({"t": m}, Peers(alone=True), CPU) for m in maps)
    for step, ids in enumerate(batches):
        if step == 20:
            maps[1].load(maps[0].state())
        expected = one.train({"t": torch.tensor(ids)}, step)[0]["t"]
        if step >= 20:
            assert torch.equal(other.train({"t": torch.tensor(ids)}, step)[0]["t"], expected)
    assert plain_state(maps[0].state()) == plain_state(maps[1].state())


def test_keys_are_those_of_plain_python_and_lead_back_to_ids():
    ids = torch.tensor([*EDGES, *range(100)])
    assert keys_of(ids).tolist() == [key(i) for i in ids.tolist()]
    assert torch.equal(unhash_bits(hash_bits(ids)), ids)
    assert keys_of(unhash_bits(torch.tensor([NO_KEY, NO_KEY + 1]))).tolist() == [NO_KEY + 1] * 2


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_own_spans_of_keys(world):
    keys = torch.cat([hash_bits(torch.arange(10_000)), first_keys(world, CPU), first_keys(world, CPU) - 1])
    keys = keys.sort().values
    owners, within = shares(keys, world)
    assert (owners.diff() >= 0).all() and (owners * 2**32 + within).diff().min() >= 0
    assert torch.equal(torch.searchsorted(first_keys(world, CPU), keys, right=True), owners)
    assert torch.bincount(owners, minlength=world).min() > 0.9 * 10_000 / world


@pytest.mark.parametrize("made_for,steps", [(500, 60), (3, 30), (90, 60)])
def test_a_key_map_is_a_dict(made_for, steps):
    rng = np.random.default_rng(1)
    map, plain = KeyMap(made_for, {"a": torch.int64, "b": torch.int32}, 1, CPU), {}
    for step in range(steps):
        new = [k for k in {key(int(i)) for i in rng.integers(0, 2000, 60)} if k not in plain]
        values = rng.integers(0, 2**31, len(new)).tolist()
        map.insert(Entries(torch.tensor(new), {"a": torch.tensor(values), "b": torch.tensor(values)}))
        plain |= dict(zip(new, values, strict=True))
        if step >= 8:  # as many leave as come
            gone = [list(plain)[i] for i in rng.choice(len(plain), len(new), replace=False)]
            map.remove(map.find(torch.tensor(gone)))
            plain = {k: v for k, v in plain.items() if k not in gone}
        sought = torch.tensor([key(i) for i in range(2000)])
        slots = map.find(sought)
        assert (slots >= 0).tolist() == [k in plain for k in sought.tolist()]
        there = slots >= 0
        assert map.fields["a"][slots[there]].tolist() == [plain[k] for k in sought[there].tolist()]
        everything = map.entries()
        assert dict(zip(everything.keys.tolist(), everything.fields["b"].tolist(), strict=True)) == plain
        assert map.count == len(plain)
    # Keys that have left no longer count as passing.
    map.remove(map.occupied())
    assert map.count == 0 and not map._passed.any()


@pytest.mark.parametrize("highest", [1, 3, 5000, 2**62, 2**63 - 1])
def test_the_lowest_are_those_of_a_sorted_list(highest):
    rng = np.random.default_rng(2)
    scores, keys = torch.tensor(rng.integers(0, highest, 300)), torch.tensor(rng.permutation(300))
    order = sorted(range(300), key=lambda i: (scores[i], keys[i]))
    for count in (1, 2, 150, 299, 300, 301):
        assert sorted(lowest(scores, keys, count, Peers(alone=True)).tolist()) == sorted(order[:count])
    assert len(lowest(scores[:0], keys[:0], 5, Peers(alone=True))) == 0


@pytest.mark.parametrize("ids", ["managed", {"admit_after": 2}])
def test_a_full_map_takes_what_a_plan_counts(ids):
    from raytrec.config.schema import Schema
    from raytrec.embeddings.planner.footprint import map_share

    rows, parts = 100_001, {"labels": ["y"], "sparse": {"f": {"table": "t"}}}
    schema = Schema.parse({**parts, "tables": {"t": {"rows": rows, "dim": 4, "ids": ids}}}, "here")
    part = RowMap(rows, schema.tables["t"].ids, 0, Peers(alone=True), torch.device("cpu"))
    keys = keys_of(torch.arange(rows - 1))
    part._rows.insert(Entries(keys, dict.fromkeys(("row", "sightings", "last"), torch.ones_like(keys))))
    maps = [value for value in vars(part).values() if isinstance(value, KeyMap)]
    held = sum(v.nbytes for m in maps for v in (m._keys, m._passed, *m.fields.values()))
    assert held == pytest.approx(map_share(schema, 1), rel=0.05)
    assert map_share(schema, 4) == -(-map_share(schema, 1) // 4)
