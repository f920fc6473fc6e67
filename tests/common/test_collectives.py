"""Collectives on real ranks, compared with the inputs of the ranks."""

import pytest
import torch
from ranks import run_on_ranks

from raytrec.common import collectives
from raytrec.common.collectives import Peers, compute_regrouping


def send_rows(rank, world, at_once):
    mine = torch.arange(rank * 100, rank * 100 + (7, 0, 30)[rank])
    collectives.ROWS_PER_EXCHANGE = at_once
    peers = Peers(torch.device("cpu"))
    numbers, halves = peers.send([mine, mine / 2], mine % world)
    assert (halves == numbers / 2).all()
    assert peers.union(mine % 50).tolist() == [*range(30)]
    return sorted(numbers.tolist()), peers.max_number(rank), peers.sum(mine[:1].sum()).item()


@pytest.mark.parametrize("at_once", [4, 1000])
def test_send_delivers_rows_to_their_ranks(at_once):
    everything = [*range(7), *range(200, 230)]
    for rank, (numbers, most, total) in enumerate(run_on_ranks(3, send_rows, at_once)):
        assert numbers == [n for n in everything if n % 3 == rank] and (most, total) == (2, 200)


def gather_rows(rank, world, device):
    peers = Peers(device)
    mine = torch.arange(rank * 10, rank * 10 + (7, 0, 3)[rank])
    rows, wide = peers.gather([mine, torch.stack([mine, -mine], 1).float()])
    assert wide.tolist() == [[n, -n] for n in rows.tolist()]
    values = torch.tensor([rank, -rank])
    assert peers.max(values).tolist() == [2, 0] and peers.stack(values).tolist() == [[0, 0], [1, -1], [2, -2]]
    assert values.tolist() == [rank, -rank], "max and stack changed their input"
    parts = torch.randn(world, 2, 3, generator=torch.Generator().manual_seed(rank))
    assert torch.equal(peers.reduce_scatter_sum(parts), peers.sum(parts)[rank])
    return rows.tolist()


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_gather_keeps_the_order_of_ranks(device):
    assert run_on_ranks(3, gather_rows, device) == [[*range(7), 20, 21, 22]] * 3


def compare_values(rank, world):
    peers, odd = Peers(), rank == 1
    same = [{"a": 1, "b": [2.5, "x"]}, ("x", None, 2**80), []]
    other = [{"a": 1 + odd}, [None] * (1 + odd), "x" * odd, -(2**70) * (1 + odd)]
    assert peers.objects(rank) == [0, 1, 2]
    return [peers.is_same_on_all(value) for value in same], [peers.is_same_on_all(value) for value in other]


def test_same_detects_values_that_differ_between_ranks():
    assert run_on_ranks(3, compare_values) == [([True] * 3, [False] * 4)] * 3


def test_single_process_exchanges_nothing():
    peers, values = Peers(), torch.tensor([3, 1, 3])
    assert peers.world == 1 and peers.is_same_on_all(values) and peers.objects(5) == [5]
    assert peers.sum(values) is values and peers.send([values], values)[0] is values
    assert peers.stack(values).tolist() == [[3, 1, 3]] and peers.union(values).tolist() == [1, 3]


def test_regrouping_equals_a_stable_sort():
    sizes_AB = torch.tensor([[2, 0, 1], [1, 3, 0]])
    of_b = torch.tensor([0, 0, 2, 0, 1, 1, 1])
    assert compute_regrouping(sizes_AB, 7).tolist() == of_b.argsort(stable=True).tolist()
