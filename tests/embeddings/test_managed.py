"""Managed ids of one table on one process, compared with a plain Python dict."""

import numpy as np
import pytest
import torch
from plain_ids import ReferenceIdMap, splitmix64
from small import make_small_schema

from raytrec.common.collectives import Peers
from raytrec.config.schema_parts import ManagedIds
from raytrec.embeddings.hashing import NO_KEY, find_key_owners, hash_bits, ids_to_keys, unhash_bits
from raytrec.embeddings.managed.batches import IdExchange
from raytrec.embeddings.managed.key_map import KeyEntries, KeyMap
from raytrec.embeddings.managed.policy import find_lowest_keys
from raytrec.embeddings.managed.row_maps import RowMaps
from raytrec.planning.memory import estimate_id_map_bytes

CPU, ALONE = torch.device("cpu"), Peers(alone=True)
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
    """Return lists of ids of global batches; few ids are frequent and most are rare (Zipf)."""
    rng = np.random.default_rng(seed)
    known = np.concatenate([EDGES, rng.integers(-(2**63), 2**63, ids - len(EDGES))])
    return [known[np.minimum(rng.zipf(1.3, size) - 1 + 3 * step, ids - 1)].tolist() for step in range(steps)]


def make_exchange(rows, policy=None, seed=0):
    """Return an IdExchange of one table, t."""
    return IdExchange({"t": (rows, policy or ManagedIds())}, seed, ALONE, CPU)


def train(exchange, ids, step):
    """Train the ids of table t; return (the row of each id, NewRows)."""
    rows, new = exchange.train({"t": torch.as_tensor(ids)}, step)
    return rows["t"], new["t"]


class RowNumbering(dict):
    """A mapping from the order of row assignment to the row; each row occurs once."""

    def check(self, expected, got, fallback):
        for number, row in zip(expected, got, strict=True):
            if number is None:
                assert row >= fallback
            else:
                assert row < fallback and self.setdefault(number, row) == row
        assert len(set(self.values())) == len(self)


def test_rows_are_assigned_evenly():
    rows, _ = train(make_exchange(1001), torch.arange(250), 0)
    assert torch.bincount(rows // 250, minlength=4).min() >= 55


def test_batch_may_have_more_ids_than_rows():
    exchange, plain, numbered = make_exchange(11), ReferenceIdMap(11, ManagedIds()), RowNumbering()
    for step in range(3):
        ids = list(range(30 * step, 30 * step + 25))
        expected = plain.step(step, ids)
        numbered.check([expected[i] for i in ids], train(exchange, ids, step)[0].tolist(), 10)
    counted = {"admitted": 30, "evicted": 20, "lookups": 75, "fallback": 45}
    assert exchange.maps["t"].counted == counted


@pytest.mark.parametrize(("eviction", "left"), [("lru", 0), ("lfu", 63 - 4)])
def test_only_lfu_keeps_frequent_ids_during_a_flood(eviction, left):
    exchange = make_exchange(65, ManagedIds(eviction=eviction))
    for step in range(6):  # id 63 is seen only once
        train(exchange, torch.arange(64 if step == 0 else 63), step)
    for step in range(6, 11):
        train(exchange, torch.arange(1000 * step, 1000 * step + 200), step)
    rows = exchange.look_up({"t": torch.arange(64)})["t"]
    assert int((rows < 64).sum()) >= left and len(exchange.maps["t"]) == 64
    assert eviction == "lfu" or (rows == 64).all()


def to_plain_state(state):
    """Return a MapState as values that can be compared with ==."""
    maps = [
        [e.keys.tolist(), *(e.fields[n].tolist() for n in sorted(e.fields))]
        for e in (state.rows.in_order(), state.waiting.in_order())
    ]
    return maps, state.free.handed, state.free.left.tolist()


def test_keys_match_plain_python_and_are_invertible():
    ids = torch.tensor([*EDGES, *range(100)])
    assert ids_to_keys(ids).tolist() == [splitmix64(i) for i in ids.tolist()]
    assert torch.equal(unhash_bits(hash_bits(ids)), ids)
    assert ids_to_keys(unhash_bits(torch.tensor([NO_KEY, NO_KEY + 1]))).tolist() == [NO_KEY + 1] * 2


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_own_contiguous_key_ranges(world):
    firsts = torch.tensor([-(-rank * 2**32 // world) - 2**31 for rank in range(1, world)]).long() << 32
    keys = torch.cat([hash_bits(torch.arange(10_000)), firsts, firsts - 1]).sort().values
    owners, within = find_key_owners(keys, world)
    assert (owners.diff() >= 0).all() and (owners * 2**32 + within).diff().min() >= 0
    assert torch.equal(torch.searchsorted(firsts, keys, right=True), owners)
    assert torch.bincount(owners, minlength=world).min() > 0.9 * 10_000 / world


@pytest.mark.slow
@pytest.mark.parametrize("made_for,steps", [((500, 3), 60), ((3, 500), 30), ((90,), 60), ((0, 90, 5), 60)])
def test_key_map_matches_one_dict_per_table(made_for, steps):
    rng, tables = np.random.default_rng(1), range(len(made_for))
    map = KeyMap(made_for, {"a": torch.int64, "b": torch.int32}, 1, CPU)
    plain = [{} for _ in tables]

    def arguments(keys):  # numbers and sizes per table
        numbers = [table for table in tables for _ in keys[table]]
        return torch.tensor(numbers, dtype=torch.int64), [len(of_table) for of_table in keys]

    def joined(values):
        return torch.tensor([v for of_table in values for v in of_table], dtype=torch.int64)

    for step in range(steps):
        drawn = [{splitmix64(int(i)) for i in rng.integers(0, 2000, 60)} for _ in tables]
        new = [[k for k in drawn[table] if k not in plain[table]] for table in tables]
        values = [rng.integers(0, 2**31, len(of_table)).tolist() for of_table in new]
        entries = KeyEntries(joined(new), {"a": joined(values), "b": joined(values)})
        map.insert(*arguments(new), entries)
        for table in tables:
            plain[table] |= dict(zip(new[table], values[table], strict=True))
        if step >= 8:  # remove as many keys as were added
            gone = [
                [list(its)[i] for i in rng.choice(len(its), len(came), replace=False)]
                for its, came in zip(plain, new, strict=True)
            ]
            numbers, sizes = arguments(gone)
            map.remove(numbers, sizes, map.find(numbers, joined(gone)))
            plain = [{k: v for k, v in plain[t].items() if k not in gone[t]} for t in tables]
        sought = [[splitmix64(i) for i in range(2000)] for _ in tables]
        slots = map.find(arguments(sought)[0], joined(sought))
        there = slots >= 0
        assert there.tolist() == [k in plain[t] for t in tables for k in sought[t]]
        expected = [plain[t][k] for t in tables for k in sought[t] if k in plain[t]]
        assert map.fields["a"][slots[there]].tolist() == expected
        for table in tables:
            its = map.entries(table)
            assert dict(zip(its.keys.tolist(), its.fields["b"].tolist(), strict=True)) == plain[table]
            assert map.counts[table] == len(plain[table])
        few = [table for table in tables if table != 1]
        which, slots = map.find_below(few, "b", [2**30 + table for table in few])
        low = [(n, v) for n, t in enumerate(few) for v in plain[t].values() if v < 2**30 + t]
        assert sorted(zip(which.tolist(), map.fields["a"][slots].tolist(), strict=True)) == sorted(low)
    # Removed keys no longer count as passing.
    everything = [map.find_occupied_slots(table) for table in tables]
    map.remove(*arguments(everything), torch.cat(everything))
    assert not any(map.counts) and not map._passed.any()


@pytest.mark.parametrize("highest", [1, 3, 5000, 2**62, 2**63 - 1])
def test_lowest_matches_a_sorted_list(highest):
    rng = np.random.default_rng(2)
    scores, keys = torch.tensor(rng.integers(0, highest, 300)), torch.tensor(rng.permutation(300))

    def expected(start, end, count):
        return sorted(range(start, end), key=lambda i: (scores[i], keys[i]))[:count]

    alone = torch.zeros_like(keys)
    for count in (1, 2, 150, 299, 300, 301):
        assert find_lowest_keys(alone, scores, keys, [count], ALONE).tolist() == sorted(expected(0, 300, count))
    assert len(find_lowest_keys(alone[:0], scores[:0], keys[:0], [5], ALONE)) == 0
    tables = torch.tensor([0] * 100 + [2] * 40 + [3] * 160)  # table 1 is empty
    for counts in ([1, 1, 40, 159], [100, 3, 2, 80], [30, 9, 41, 161]):
        of_tables = zip((0, 100, 100, 140), (100, 100, 140, 300), counts, strict=True)
        chosen = [place for of_table in of_tables for place in expected(*of_table)]
        assert find_lowest_keys(tables, scores, keys, counts, ALONE).tolist() == sorted(chosen)


@pytest.mark.parametrize("ids", ["managed", {"admit_after": 2}])
def test_full_map_size_matches_the_planned_estimate(ids):
    rows = 100_001
    schema = make_small_schema(sparse={"f": {"table": "t"}}, tables={"t": {"rows": rows, "dim": 4, "ids": ids}})
    part = RowMaps([rows], [schema.tables["t"].ids], 0, ALONE, CPU)
    keys = ids_to_keys(torch.arange(rows - 1))
    entries = KeyEntries(keys, dict.fromkeys(("row", "sightings", "last"), torch.ones_like(keys)))
    part.rows.insert(torch.zeros_like(keys), [len(keys)], entries)
    maps = [value for value in vars(part).values() if isinstance(value, KeyMap)]
    held = sum(v.nbytes for m in maps for v in (m._keys, m._passed, *m.fields.values()))
    assert held == pytest.approx(estimate_id_map_bytes(schema, 1), rel=0.05)
    assert estimate_id_map_bytes(schema, 4) == -(-estimate_id_map_bytes(schema, 1) // 4)
