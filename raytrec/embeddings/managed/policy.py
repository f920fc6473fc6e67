"""Which ids get a row, and which lose theirs. All are functions of what all ranks have seen together."""

from __future__ import annotations

import torch

from raytrec.common.collectives import Peers
from raytrec.config.managed import Eviction
from raytrec.embeddings.hashing import hash_bits

SWEEPS = 8  # searches for expired ids in the steps after which an id expires
MOST_SIGHTINGS = 2**31 - 1
FREED = 64  # the part of the rows that is freed at least, so that ids are rarely searched
STEPS, MOST_FREED = 4, 4  # with lru: for so many steps like this one, up to this part of the rows
MOST_ROWS = 2**20  # that are freed ahead, a list of which every rank keeps
HISTOGRAM_BITS = 12  # of a score that a histogram, which ranks add up, distinguishes: 32 KiB


def scores(eviction: Eviction, sightings: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The scores of ids with rows: int64 [n], 0 or more; the lowest leave first.

    lru: the step of the last sighting. lfu: sightings, and among equals the last step.

    Args:
        sightings: int64 [n]. last: integers [n], the step of the last one; -1 or more.
    """
    if eviction == "lru":
        return last.long() + 1
    return (sightings.clamp(max=MOST_SIGHTINGS) << 31) | (last + 1)


def admission_scores(keys: torch.Tensor, sightings: torch.Tensor, step: int, seed: int) -> torch.Tensor:
    """The scores of ids without a row, where rows are too few for all: int64 [n], 0 or more. Those seen more
    often go first; among equals a draw decides, another one at each step.

    Args:
        sightings: int64 [n], those of this step included.
    """
    return (sightings.clamp(max=MOST_SIGHTINGS) << 31) | _draw(keys, step, seed, 31)


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


def _draw(keys: torch.Tensor, step: int, seed: int, bits: int) -> torch.Tensor:
    """A function of (seed, step, key) alone, even: int64 [n] of so many bits."""
    of_seed, of_step = (torch.full((1,), number, device=keys.device) for number in (seed, step))
    salt = hash_bits(of_seed ^ hash_bits(of_step))
    return (hash_bits(keys ^ salt) >> (64 - bits)) & (2**bits - 1)


def horizon(ttl_steps: int | None, step: int) -> int | None:
    """The step before which ids must have been seen last to leave at this step; None: none leaves.

    Args:
        ttl_steps: for how many steps an id may be unseen; None: for ever.
    """
    due = ttl_steps and step % max(1, ttl_steps // SWEEPS) == 0
    return step - ttl_steps if due else None


def lowest(scores: torch.Tensor, keys: torch.Tensor, count: int, peers: Peers) -> torch.Tensor:
    """Which of this rank's keys are among the `count` lowest of all ranks, by score and then by key: int64
    [n], places in `keys`, in no particular order; a collective.

    Histograms of all ranks' scores, each of the bin that the last one has narrowed it down to, lead to the
    score of the last key that is taken. Of keys with this very score ranks take those that come first, as
    they own spans of keys in their order.

    Args:
        scores: int64 [n], 0 or more. keys: int64 [n].
        count: how many on all ranks; where there are fewer, all are taken.
    """
    device = scores.device
    mine = torch.full((3,), len(scores), device=device)
    mine[1], mine[2] = scores.aminmax() if len(scores) else (2**63 - 1, 0)
    sizes, lows, highs = peers.stack(mine).T.tolist()
    if count >= sum(sizes):
        return torch.arange(len(scores), device=device)
    score, missing = _threshold(scores, count, min(lows), max(highs), peers)
    ties = (scores == score).nonzero().squeeze(1)
    before = peers.stack(torch.full((1,), len(ties), device=device))[: peers.rank].sum()
    mine = min(max(missing - int(before), 0), len(ties))
    ties = ties[keys[ties].argsort()[:mine]]
    return torch.cat([(scores < score).nonzero().squeeze(1), ties])


def _threshold(scores: torch.Tensor, count: int, low: int, high: int, peers: Peers) -> tuple[int, int]:
    """The score of the last of the `count` lowest, and how many with this score are among them.

    Args:
        low, high: the least and the greatest score of all.
    """
    while low < high:
        shift = max(0, (high - low).bit_length() - HISTOGRAM_BITS)
        bins = (scores - low) >> shift
        # Not by bincount, for which the host would wait.
        nothing = torch.zeros(2**HISTOGRAM_BITS, dtype=torch.int64, device=scores.device)
        histogram = peers.sum(nothing.index_add_(0, bins, torch.ones_like(bins)))
        upto = histogram.cumsum(0)
        found = torch.searchsorted(upto, torch.full((1,), count, device=scores.device))
        place, before = torch.cat([found, (upto - histogram).index_select(0, found)]).tolist()
        count -= before
        low, high = low + (place << shift), min(high, low + ((place + 1) << shift) - 1)
        scores = scores[bins == place]
    return low, count
