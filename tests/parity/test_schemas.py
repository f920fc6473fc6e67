"""Schemas and plans that hypothesis draws; the same ones in every run."""

import pytest
from design import FACTORS
from drawn import Drawn, drawn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from record import assert_parity


def hold_for(place, examples):
    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failure may be a hang: making it smaller would take hours
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(drawn(place), min_size=1, max_size=4))
    def holds(cases):
        assert_parity(cases, place)

    holds()


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param({"user": 1}, marks=pytest.mark.parity),
        {"user": 9, "item": 2},
        pytest.param({"user": 2, "item": 9}, marks=pytest.mark.parity),
    ],
    ids=str,
)
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.parity)])
def test_ranks_without_a_row(tables, half):
    """Alone in their kernel, behind another table, before another table.

    The first half has each pair of an optimizer, a kernel and a limit of the gradient's norm.
    """
    features = tuple((table, "mean", False) for table in [*tables, *tables])
    cases = [
        Drawn(
            tables=tables,
            features=features,
            sharding=dict.fromkeys(tables, "row_wise"),
            dim=8,
            dense=1,
            optimizer=optimizer,
            kernel=kernel,
            place=(3, 1),
            balance="unequal",
            recomputed=False,
            max_grad_norm=max_grad_norm,
        )
        for number, optimizer in enumerate(FACTORS["optimizer"])
        for kernel in ("fused", "dense")
        for max_grad_norm in (None, 0.05)
        if kernel == "dense" or optimizer != "adam"
        if (optimizer == "adam" or (number + (kernel == "dense") + (max_grad_norm is None)) % 2 == 0) != half
    ]
    assert_parity(cases, (3, 1))


@pytest.mark.parametrize(
    "place",
    [pytest.param(p, marks=[] if p == (2, 1) else [pytest.mark.parity]) for p in FACTORS["place"]],
    ids=str,
)
def test_drawn_schemas(place):
    hold_for(place, examples=4)


@pytest.mark.parity
@pytest.mark.parametrize("place", FACTORS["place"], ids=str)
def test_many_drawn_schemas(place):
    hold_for(place, examples=60)
