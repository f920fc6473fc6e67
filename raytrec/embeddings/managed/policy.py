"""Which ids get a row, and which lose theirs. All are functions of what all ranks have seen together."""

from __future__ import annotations

from math import gcd, sqrt

import torch

from raytrec.common.collectives import Peers, on_device
from raytrec.config.schema_parts import Eviction
from raytrec.embeddings.hashing import count_tables, hash_bits, in_order, of_table

SWEEPS = 8  # searches for expired ids in the steps after which an id expires
MOST_SIGHTINGS = 2**31 - 1
FREED = 64  # the part of the rows that is freed at least, so that ids are rarely searched
STEPS, MOST_FREED = 4, 4  # with lru: for so many steps like this one, up to this part of the rows
MOST_ROWS = 2**20  # that are freed ahead, a list of which every rank keeps
HISTOGRAM_BITS = 12  # of a score that a histogram, which ranks add up, distinguishes: 32 KiB


def counted_sightings(eviction: Eviction) -> int:
    """Of an id's sightings, how many its score distinguishes: with lru none."""
    return 0 if eviction == "lru" else MOST_SIGHTINGS


def scores(counted: torch.Tensor, sightings: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The scores of ids with rows: int64 [n], 0 or more; the lowest leave first.

    lru: the step of the last sighting. lfu: sightings, and among equals the last step.

    Args:
        counted: int64 [n], `counted_sightings` of each id's table.
        sightings: int64 [n]. last: integers [n], the step of the last one; -1 or more.
    """
    return (torch.minimum(sightings, counted) << 31) | (last + 1)


def admission_scores(keys: torch.Tensor, sightings: torch.Tensor, step: int, seed: int) -> torch.Tensor:
    """Return the scores of ids without a row if rows are too few for all: int64 [n], 0 or more.

    Ids seen more often go first; among equals an even draw decides, a function of (seed, step, key).

    Args:
        sightings: int64 [n], sightings including this step.
    """
    of_seed, of_step = (torch.full((1,), number, device=keys.device) for number in (seed, step))
    salt = hash_bits(of_seed ^ hash_bits(of_step))
    draw = (hash_bits(keys ^ salt) >> 33) & (2**31 - 1)
    return (sightings.clamp(max=MOST_SIGHTINGS) << 31) | draw


def rows_to_free(eviction: Eviction, missing: int, rows: int) -> int:
    """How many ids lose their rows at a step that lacks some.

    With lru they are as many as are missing, and some ahead. With lfu, at most a 64th of the rows changes
    hands at a step: else a batch with many new ids would take rows from ids that are seen often.

    Args:
        rows: that ids can have.
    """
    least = min(max(1, rows // FREED), MOST_ROWS)
    if eviction != "lru":
        return least
    return max(missing, least, min(STEPS * missing, rows // MOST_FREED, MOST_ROWS))


def horizon(ttl_steps: int | None, step: int) -> int | None:
    """The step before which ids must have been seen last to leave at this step; None: none leaves.

    Args:
        ttl_steps: for how many steps an id may be unseen; None: for ever.
    """
    due = ttl_steps and step % max(1, ttl_steps // SWEEPS) == 0
    return step - ttl_steps if due else None


def stride(rows: int) -> int:
    """How far apart rows are that are handed out one after the other: near the golden section of the table,
    of which any number of them in a row divides it evenly, and without a common divisor, so that all come."""
    step = max(1, round(min(rows, 2**62 // max(rows, 1)) * (sqrt(5) - 1) / 2))
    while gcd(step, rows) > 1:
        step += 1
    return step


def lowest(
    tables: torch.Tensor, scores: torch.Tensor, keys: torch.Tensor, counts: list[int], peers: Peers
) -> torch.Tensor:
    """Which of this rank's keys are among the lowest of their table on all ranks, by score and then by key:
    int64 [n], places in `keys`, ascending; a collective.

    Histograms of all ranks' scores, each of the bin that the last one has narrowed it down to, lead to the
    score of the last key that is taken. Of keys with this very score ranks take those that come first, as
    they own spans of keys in their order.

    Args:
        tables: int64 [n], ascending, from 0. scores: int64 [n], 0 or more. keys: int64 [n].
        counts: of each table, how many on all ranks; where there are fewer, all are taken.
    """
    device = scores.device
    mine = torch.full((3, len(counts)), 2**63 - 1, device=device)
    mine[0], mine[2] = count_tables(tables, len(counts)), 0
    if len(counts) > 1:
        mine[1].scatter_reduce_(0, tables, scores, "amin")
        mine[2].scatter_reduce_(0, tables, scores, "amax")
    elif len(scores):  # quicker on a CPU
        mine[1], mine[2] = scores.aminmax()
    sizes, lowest_of, highest_of = zip(*peers.stack(mine).tolist(), strict=True)
    lows = [min(of_ranks) for of_ranks in zip(*lowest_of, strict=True)]
    highs = [max(of_ranks) for of_ranks in zip(*highest_of, strict=True)]
    of_tables = zip(counts, zip(*sizes, strict=True), strict=True)
    all_of = [table for table, (count, of_ranks) in enumerate(of_tables) if count >= sum(of_ranks)]
    for table in all_of:
        lows[table] = highs[table] = 0
    found, missing = _thresholds(tables, scores, counts, lows, highs, peers)
    for table in all_of:
        found[table] = 2**63 - 1
    limits_T, missing_T = on_device([found, missing], device)
    limits = of_table(limits_T, tables)
    chosen = scores < limits
    ties = (scores == limits).nonzero().squeeze(1)
    its_tables = tables[ties]
    ties = ties[in_order(its_tables, keys[ties])[1]]
    sizes_T = count_tables(its_tables, len(counts))
    before_T = peers.stack(sizes_T)[: peers.rank].sum(0)
    places = torch.arange(len(ties), device=device) - (sizes_T.cumsum(0) - sizes_T)[its_tables]
    chosen[ties] = places < (missing_T - before_T)[its_tables]
    return chosen.nonzero().squeeze(1)


def _thresholds(
    tables: torch.Tensor,
    scores: torch.Tensor,
    counts: list[int],
    lows: list[int],
    highs: list[int],
    peers: Peers,
) -> tuple[list[int], list[int]]:
    """(of each table the score of the last of its lowest, how many with this score are among them).

    Args:
        lows, highs: the least and the greatest score of all; equal where the score is known.
    """
    counts, lows, highs, device = list(counts), list(lows), list(highs), scores.device
    while any(low < high for low, high in zip(lows, highs, strict=True)):
        widths = ((high - low).bit_length() for low, high in zip(lows, highs, strict=True))
        # Where the score is known already, what falls into bins does not matter, but not outside them.
        shifts = [max(0, width - HISTOGRAM_BITS) if width else 62 for width in widths]
        low_T, shift_T, count_T = on_device([lows, shifts, counts], device)
        starts_T = torch.arange(len(counts), device=device) << HISTOGRAM_BITS
        bins = ((scores - of_table(low_T, tables)) >> of_table(shift_T, tables)) + of_table(starts_T, tables)
        # Not by bincount, for which the host would wait.
        nothing = torch.zeros(len(counts) << HISTOGRAM_BITS, dtype=torch.int64, device=device)
        histogram = peers.sum(nothing.index_add_(0, bins, torch.ones_like(bins))).view(len(counts), -1)
        upto = histogram.cumsum(1)
        found = torch.searchsorted(upto, count_T.unsqueeze(1)).clamp_(max=2**HISTOGRAM_BITS - 1)
        before = (upto - histogram).gather(1, found)
        inside = (bins == of_table(found.squeeze(1) + starts_T, tables)).nonzero().squeeze(1)
        tables, scores = tables[inside], scores[inside]
        for table, (place, lower) in enumerate(torch.cat([found, before], 1).tolist()):
            if lows[table] < highs[table]:
                counts[table] -= lower
                lows[table] += place << shifts[table]
                highs[table] = min(highs[table], lows[table] + (1 << shifts[table]) - 1)
    return lows, counts
