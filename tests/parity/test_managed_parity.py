"""Tables with managed ids, in whose rows ids come to be in any order, are those of one process by id."""

from dataclasses import replace

import pytest
from design import CORNERS, FACTORS, pairwise
from record import assert_parity


def managed(cases):
    return [replace(case, ids="managed") for case in cases]


def test_corners():
    """Means, weights, checkpoints of activations, clipping and sequences; tables that features share."""
    few = [case for case in CORNERS if case.place == (3, 1) and case.recomputed]
    assert_parity(managed(few), (3, 1))


@pytest.mark.parity
@pytest.mark.parametrize("place", FACTORS["place"], ids=str)
def test_pairs(place):
    assert_parity(managed([case for case in pairwise() if case.place == place]), place)
