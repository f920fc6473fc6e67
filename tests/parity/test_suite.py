"""The sharded run against one plain torch process, over every factor that could tell them apart.

In a pairwise choice of cases, every two values of two factors meet. `make test` runs those of its cases that
are on 1 and 2 ranks, and of the corners that are known to be bad; `make parity` runs every one.
"""

from dataclasses import replace

import pytest
from design import CORNERS, FACTORS, HALVES, every_combination, pairwise
from record import assert_parity

CHUNK = 50
FEW = [(1, 1), (2, 1)]  # the places that `make test` runs


def places(of):
    return [pytest.param(p, marks=[pytest.mark.parity] if p not in FEW else [], id=str(p)) for p in of]


@pytest.mark.parametrize("place", places(FACTORS["place"]))
def test_pairs(place):
    assert_parity([case for case in pairwise() if case.place == place], place)


@pytest.mark.parametrize("place", places(sorted({case.place for case in CORNERS})))
def test_corners(place):
    assert_parity([case for case in CORNERS if case.place == place], place)


def few_halves():
    """On 2 ranks, each way of sharding once, with every optimizer among them."""
    of = {}
    for case in HALVES:
        if case.place == (2, 1):
            of.setdefault(case.sharding, []).append(case)
    few = [cases[-1 - number % len(cases)] for number, cases in enumerate(of.values())]
    assert {case.optimizer for case in few} == {case.optimizer for case in HALVES}
    return few


def test_fp16_tables():
    """Within LIMITS["fp16"] of a reference in fp32 that starts from the same fp16 values."""
    assert_parity(few_halves(), (2, 1))


@pytest.mark.parity
@pytest.mark.parametrize("place", [(1, 1), (2, 1), (4, 2)], ids=str)
def test_all_fp16_tables(place):
    few = few_halves()
    assert_parity([case for case in HALVES if case.place == place and case not in few], place)


def chunks():
    everything = every_combination()
    for place in FACTORS["place"]:
        cases = [case for case in everything if case.place == place]
        for start in range(0, len(cases), CHUNK):
            yield pytest.param(cases[start : start + CHUNK], place, id=f"{place[0]} ranks, from case {start}")


@pytest.mark.parity
@pytest.mark.parametrize("cases,place", chunks())
def test_every_combination(cases, place):
    assert_parity(cases, place)


def managed(cases):
    """These cases with managed ids, in whose rows ids come to be in any order; compared by id."""
    return [replace(case, ids="managed") for case in cases]


def test_corners_of_managed_ids():
    """Means, weights, checkpoints of activations, clipping and sequences; tables that features share."""
    few = [case for case in CORNERS if case.place == (3, 1) and case.recomputed]
    assert_parity(managed(few), (3, 1))


@pytest.mark.parity
@pytest.mark.parametrize("place", FACTORS["place"], ids=str)
def test_pairs_of_managed_ids(place):
    assert_parity(managed([case for case in pairwise() if case.place == place]), place)
