"""Curves of an evaluation, as few points to draw: they travel to the driver and into metrics.jsonl.

Each point is found on the rank that has its rows, so that points, not rows, meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytrec.metrics.over_ranks.ranked import Ranked

POINTS = 200  # of the ROC curve
BINS = 20  # of about equally many rows


def roc(ranked: Ranked) -> dict[str, list] | None:
    """The ROC curve: fpr, tpr, from (0, 0) to (1, 1); None when labels are not both 0 and 1. A collective."""
    import torch

    if not ranked.both_classes:
        return None
    positive, negative = ranked.before(0), ranked.before(1)
    of_ranks = ranked.exchange.stack(torch.tensor([len(positive)], device=positive.device)).squeeze(1)
    before, distinct = int(of_ranks[: ranked.exchange.rank].sum()), int(of_ranks.sum())
    # The rates of what is predicted at least as high as each distinct prediction; of more than POINTS, of as
    # many, evenly spread. Where two ranks have a point of one place, the lower one's counts.
    order = torch.arange(before, before + len(positive), device=positive.device)
    places = (order * (POINTS / max(POINTS, distinct))).ceil().long()
    first = torch.ones_like(places, dtype=torch.bool)
    first[1:] = places[1:] != places[:-1]
    found = positive.new_zeros(POINTS + 1, 3)
    rates = 1 - negative / ranked.total[1], 1 - positive / ranked.total[0], torch.ones_like(positive)
    found[places[first]] = torch.stack(rates, 1)[first]
    all_found = ranked.exchange.stack(found)
    points = all_found[all_found[:, :, 2].argmax(0), torch.arange(POINTS + 1)]
    rising = points[points[:, 2] > 0, :2].flip(0).unique_consecutive(dim=0)
    fpr, tpr = torch.cat([rising.new_zeros(1, 2), rising]).unique_consecutive(dim=0).T.tolist()
    return {"fpr": fpr, "tpr": tpr}


def reliability(ranked: Ranked) -> dict[str, list] | None:
    """Of each bin of predictions the mean prediction (predicted), the mean label (actual), both weighted, and
    the rows; None when labels are not both 0 and 1. A collective."""
    import torch

    if not ranked.both_classes:
        return None
    ties = ranked.ties
    places = (ranked.before(2) / ranked.total[2] * BINS).long().clamp(max=BINS - 1)
    weights = ties.positive + ties.negative
    values = torch.stack([ties.predictions * weights, ties.positive, weights, ties.rows], 1)
    sums = ranked.exchange.add(values.new_zeros(BINS, 4).index_add_(0, places, values))
    predicted, positive, weights, rows = sums[sums[:, 3] > 0].T
    return {
        "predicted": (predicted / weights).tolist(),
        "actual": (positive / weights).tolist(),
        "rows": rows.long().tolist(),
    }
