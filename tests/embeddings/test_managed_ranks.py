"""Managed ids are independent of the number of ranks that share them."""

import pytest
import torch
from plain_ids import ReferenceIdMap
from ranks import run_on_ranks
from test_managed import CPU, POLICIES, RowNumbering, random_batches, to_plain_state

from raytrec.common.collectives import Peers
from raytrec.config.schema_parts import ManagedIds
from raytrec.embeddings.managed.batches import IdExchange

ROWS = {"one": 90, "other": 41}
STEPS = 30


def take_part(ids, rank, world):
    """Return a rank's part of a global batch; parts are unequal, and rank 0's part is sometimes empty."""
    shares = [0 if len(ids) % 2 and world > 1 else 1, *range(2, world + 1)]
    ends = [len(ids) * sum(shares[: r + 1]) // sum(shares) for r in range(world)]
    return ids[ends[rank - 1] if rank else 0 : ends[rank]]


def make_table_batches(policy):
    return {"one": random_batches(STEPS), "other": random_batches(STEPS, seed=5, size=45 if policy else 44)}


def remap(rank, world, names):
    """Return, for each policy, (table → (ids, rows, new rows) of each step, final states, counts)."""
    out = {}
    for name in names:
        peers, policy = Peers(), ManagedIds(**POLICIES[name])
        exchange = IdExchange({table: (rows, policy) for table, rows in ROWS.items()}, 7, peers, CPU)
        maps, steps = exchange.maps, []
        for step in range(STEPS):
            ids = {table: take_part(lists[step], rank, world) for table, lists in make_table_batches(name).items()}
            given = {table: torch.tensor(part, dtype=torch.int64) for table, part in ids.items()}
            rows, new = exchange.train(given, step)
            assert torch.equal(exchange.look_up(given)["one"], rows["one"])
            told = {t: sorted(zip(n.ids.tolist(), n.rows.tolist(), strict=True)) for t, n in new.items()}
            steps.append({t: (ids[t], rows[t].tolist(), told[t]) for t in maps})
        states = {table: to_plain_state(m.state()) for table, m in maps.items()}
        counts = {table: (m.counted["admitted"], m.counted["evicted"]) for table, m in maps.items()}
        out[name] = steps, states, counts
    return out


@pytest.mark.parametrize("name", POLICIES)
def test_id_map_matches_a_dict(name):
    check_answers(name, [remap(0, 1, [name])[name]])


CASES = [
    (2, ["long ttl in steps"]),
    (3, ["lru", "after, lfu"]),
    *(pytest.param(world, list(POLICIES), marks=pytest.mark.parity) for world in (2, 3, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("world,names", CASES)
def test_rows_are_independent_of_the_number_of_ranks(world, names):
    answers, alone = run_on_ranks(world, remap, names), remap(0, 1, names)
    for name in names:
        check_answers(name, [answer[name] for answer in answers])
        for table, whole in alone[name][1].items():
            held = [answer[name][1][table] for answer in answers]
            for number in range(2):
                columns = zip(*(state[0][number] for state in held), strict=True)
                assert [[v for part in column for v in part] for column in columns] == whole[0][number]
            assert held[0][1:] == whole[1:]


def check_answers(name, answers):
    policy = ManagedIds(**POLICIES[name])
    for table, rows in ROWS.items():
        plain, numbered, admitted, evicted = ReferenceIdMap(rows, policy, 7), RowNumbering(), 0, 0
        for step, ids in enumerate(make_table_batches(name)[table]):
            expected = plain.step(step, ids)
            admitted, evicted = admitted + len(plain.new), evicted + len(plain.left)
            of_ranks = [steps[step][table] for steps, *_ in answers]
            assert [i for part, _, _ in of_ranks for i in part] == ids
            for part, got, _ in of_ranks:
                numbered.check([expected[i] for i in part], got, plain.capacity)
            for _, _, told in of_ranks:
                assert told == sorted((i, numbered[number]) for i, number in plain.new.items())
        counts = zip(*(counts[table] for *_, counts in answers), strict=True)
        assert [sum(of_ranks) for of_ranks in counts] == [admitted, evicted]
        assert admitted > rows / 2 and bool(evicted) == (name != "none")
        held = [states[table] for _, states, _ in answers]
        assert sum(len(waiting[0]) for (_, waiting), *_ in held) == len(plain.waiting)
        ids_of_ranks = [ids for (one, _), *_ in held for ids in one[0]]
        assert len(ids_of_ranks) == len(plain.rows) and ids_of_ranks == sorted(ids_of_ranks)
        assert all(state[1:] == held[0][1:] for state in held)
