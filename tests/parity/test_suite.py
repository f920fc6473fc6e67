"""The sharded run against one plain torch process, over every factor that could tell them apart.

`make test` runs a pairwise choice of cases and the corners that are known to be bad; `make parity` every one.
"""

import pytest
from design import CORNERS, FACTORS, HALVES, every_combination, pairwise
from record import assert_parity

CHUNK = 50


@pytest.mark.parametrize("place", FACTORS["place"], ids=str)
def test_pairs_and_corners(place):
    assert_parity([case for case in [*CORNERS, *pairwise()] if case.place == place], place)


@pytest.mark.parametrize(
    "place",
    [pytest.param(p, marks=[pytest.mark.parity] if p != (2, 1) else []) for p in [(1, 1), (2, 1), (4, 2)]],
    ids=str,
)
def test_fp16_tables(place):
    """Within LIMITS["fp16"] of a reference in fp32 that starts from the same fp16 values."""
    assert_parity([case for case in HALVES if case.place == place], place)


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
