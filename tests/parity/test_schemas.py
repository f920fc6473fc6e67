"""Schemas and plans that hypothesis draws; the same ones in every run."""

import pytest
from design import FACTORS
from drawn import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record import assert_parity


def hold_for(place, examples):
    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(drawn(place), min_size=1, max_size=4))
    def holds(cases):
        assert_parity(cases, place)

    holds()


@pytest.mark.parametrize("place", FACTORS["place"], ids=str)
def test_drawn_schemas(place):
    hold_for(place, examples=4)


@pytest.mark.parity
@pytest.mark.parametrize("place", FACTORS["place"], ids=str)
def test_many_drawn_schemas(place):
    hold_for(place, examples=60)
