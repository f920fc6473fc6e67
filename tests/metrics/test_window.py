"""Metrics of training over the last steps, resumed on any number of ranks."""

import pytest
import torch
from ranks import on_ranks
from test_metrics import BATCHES, TWO, batches, selection

STEPS = 3


def windowed(rank, world, window, first=0, record=None, reports=()):
    """(total and last steps at step 4, figures of each report)."""
    from raytrec.metrics.sums import Sums

    of = selection(TWO)
    sums = Sums(of, torch.device("cpu"), window)
    if record:
        sums.resume(*record)
    saved, figures = None, []
    for step, outputs in enumerate(batches(of, rank, world)):
        if step >= first:
            sums.add(outputs)
        if step == 3:
            saved = sums.total(), sums.last_steps()
        if step in reports:
            figures.append(sums.reduce())
    return saved, [*figures, sums.reduce()]


def over(first):
    """Figures of the batches from `first` on, by themselves."""
    return on_ranks(1, windowed, None, first)[0][1][-1]


@pytest.mark.parametrize("world", [1, 3])
def test_figures_are_of_the_last_steps_and_rows_since_the_last_report(world):
    for _, (at_2, end) in on_ranks(world, windowed, STEPS, 0, None, (2,)):
        expected, since = over(BATCHES - STEPS), over(3)
        assert {**end, "rows": 0} == pytest.approx({**expected, "rows": 0}, rel=1e-6)
        assert end["rows"] == since["rows"] > expected["rows"] and at_2["rows"] > 0
    for _, (end,) in on_ranks(world, windowed, 100):
        assert end == pytest.approx(over(0), rel=1e-6), "fewer steps than the window has"


@pytest.mark.parametrize(("before", "after", "window"), [(1, 3, 5), (3, 1, 5), (2, 2, 4), (1, 2, 2)])
def test_a_window_goes_on_with_any_number_of_ranks_and_of_another_size(before, after, window):
    (record, _), *_ = on_ranks(before, windowed, 5)
    assert len(record[1]["steps"]) == 4
    for _, (end,) in on_ranks(after, windowed, window, 4, record):
        expected, rows = over(BATCHES - window), over(0)["rows"]
        assert {**end, "rows": rows} == pytest.approx({**expected, "rows": rows}, rel=1e-6)
        assert end["rows"] == rows
    for _, (end,) in on_ranks(after, windowed, window, 4, (record[0], None)):
        assert end["click.ne"] == pytest.approx(over(max(4, BATCHES - window))["click.ne"], rel=1e-6), (
            "an old one"
        )
