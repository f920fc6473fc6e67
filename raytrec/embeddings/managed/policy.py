"""Admission and eviction policies for managed ids, which get table rows (are admitted) and lose them (are evicted).

All decisions are functions of the seed and of the sightings (occurrences in training batches) of ids on all ranks.
"""

from __future__ import annotations

from math import gcd, sqrt

import torch

from raytrec.common.collectives import Peers, to_device_tensor
from raytrec.config.schema_parts import Eviction
from raytrec.embeddings.hashing import count_tables, hash_bits, select_by_table, sort_within_tables

EXPIRY_CHECKS_PER_TTL = 8  # searches for expired ids within ttl_steps steps
MAX_SIGHTINGS = 2**31 - 1
MIN_FREED_DIVISOR = 64  # at least 1/64 of the rows is freed at once, so that searches are rare
# lru frees rows for 4 steps like the current one, up to 1/4 of the rows.
LRU_STEPS_AHEAD, LRU_MAX_FREED_DIVISOR = 4, 4
MAX_FREED_ROWS = 2**20  # maximum number of rows freed in advance; every rank keeps a list of them
HISTOGRAM_BITS = 12  # bits of a score per histogram, which all ranks sum: 32 KiB


def compute_eviction_scores(counted: torch.Tensor, sightings: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the scores of ids, int64 [n], ≥ 0; ids with the lowest scores are evicted first.

    With lru, scores order ids by the step of their last sighting. With lfu, scores order ids by their number of
    sightings, and by the step of the last sighting among equal numbers.

    Args:
        counted: Upper limit of the sightings that count, int64 [n] or [1]: 0 for tables with lru, else MAX_SIGHTINGS.
        sightings: Number of sightings of each id, int64 [n].
        last: Step of the last sighting of each id, integers [n], -1 or more.
    """
    return (torch.minimum(sightings, counted) << 31) | (last + 1)


def compute_admission_scores(keys: torch.Tensor, sightings: torch.Tensor, step: int, seed: int) -> torch.Tensor:
    """Return the scores of ids without a row, int64 [n], ≥ 0; if rows are scarce, the highest scores get rows.

    Ids with more sightings have higher scores. A uniform draw determined by (seed, step, key) breaks ties.

    Args:
        keys: Keys of the ids, int64 [n].
        sightings: Number of sightings including this step, int64 [n].
        step: Step of the run.
        seed: Seed of the draw.
    """
    seed_tensor, step_tensor = (torch.full((1,), number, device=keys.device) for number in (seed, step))
    salt = hash_bits(seed_tensor ^ hash_bits(step_tensor))
    draw = (hash_bits(keys ^ salt) >> 33) & (2**31 - 1)
    return (sightings.clamp(max=MAX_SIGHTINGS) << 31) | draw


def count_rows_to_free(eviction: Eviction, missing: int, rows: int) -> int:
    """Return the number of ids of a table to evict at a step with too few free rows.

    With lru, the missing rows are freed, plus some in advance. With lfu, only 1/64 of the rows are freed per step
    (at least 1, at most MAX_FREED_ROWS), because a batch with many new ids could otherwise displace frequent ids.

    Args:
        eviction: Eviction policy.
        missing: Number of rows needed in addition to the free rows.
        rows: Number of rows that ids can have.
    """
    min_count = min(max(1, rows // MIN_FREED_DIVISOR), MAX_FREED_ROWS)
    if eviction != "lru":
        return min_count
    return max(missing, min_count, min(LRU_STEPS_AHEAD * missing, rows // LRU_MAX_FREED_DIVISOR, MAX_FREED_ROWS))


def find_expiry_step(ttl_steps: int | None, step: int) -> int | None:
    """Return the step s such that ids last seen before s expire at `step`, or None if no ids can expire at `step`.

    Ids expire only at multiples of ttl_steps // EXPIRY_CHECKS_PER_TTL (at least 1).

    Args:
        ttl_steps: Number of steps for which an id may remain unseen; None: unlimited.
        step: Current step.
    """
    due = ttl_steps and step % max(1, ttl_steps // EXPIRY_CHECKS_PER_TTL) == 0
    return step - ttl_steps if due else None


def choose_row_stride(rows: int) -> int:
    """Return the distance between table rows that are assigned one after another.

    The distance is close to the golden section of the number of rows, so that any number of consecutive assignments
    is spread evenly over the table. The distance and `rows` are coprime, so that every row is reached.
    """
    step = max(1, round(min(rows, 2**62 // max(rows, 1)) * (sqrt(5) - 1) / 2))
    while gcd(step, rows) > 1:
        step += 1
    return step


def find_lowest_keys(
    tables: torch.Tensor, scores: torch.Tensor, keys: torch.Tensor, counts: list[int], peers: Peers
) -> torch.Tensor:
    """Return the indices, int64 [m], ascending, of this rank's keys among the `counts` lowest of each table.

    This is a collective operation: every rank must call it. The keys of all ranks are ordered by score and then by
    key.

    Histograms of all ranks' scores, each over the bin selected by the previous one, find the score of the
    last key to take. Among keys with this score, lower ranks take theirs first, because keys ascend with the rank.

    Args:
        tables: Table number of each key, int64 [n], ascending, from 0.
        scores: Scores, int64 [n], 0 or more.
        keys: Keys, int64 [n].
        counts: Number of keys to take from each table on all ranks; if a table contains fewer, all are taken.
        peers: Ranks that share the keys.
    """
    device = scores.device
    local_stats = torch.full((3, len(counts)), 2**63 - 1, device=device)
    local_stats[0], local_stats[2] = count_tables(tables, len(counts)), 0
    if len(counts) > 1:
        local_stats[1].scatter_reduce_(0, tables, scores, "amin")
        local_stats[2].scatter_reduce_(0, tables, scores, "amax")
    elif len(scores):  # faster on a CPU
        local_stats[1], local_stats[2] = scores.aminmax()
    sizes_TW, lowest_TW, highest_TW = peers.stack(local_stats).permute(1, 2, 0).tolist()
    is_exhausted = [count >= sum(sizes) for count, sizes in zip(counts, sizes_TW, strict=True)]
    lows = [0 if exhausted else min(lowest) for exhausted, lowest in zip(is_exhausted, lowest_TW, strict=True)]
    highs = [0 if exhausted else max(highest) for exhausted, highest in zip(is_exhausted, highest_TW, strict=True)]
    threshold_T, tie_counts_T = _find_thresholds(tables, scores, counts, lows, highs, peers)
    limits_T = threshold_T.masked_fill(to_device_tensor(is_exhausted, device).bool(), 2**63 - 1)
    limits = select_by_table(limits_T, tables)
    chosen = scores < limits
    ties = (scores == limits).nonzero().squeeze(1)
    tie_tables = tables[ties]
    ties = ties[sort_within_tables(tie_tables, keys[ties])[1]]
    sizes_T = count_tables(tie_tables, len(counts))
    earlier_T = peers.stack(sizes_T)[: peers.rank].sum(0)
    places = torch.arange(len(ties), device=device) - (sizes_T.cumsum(0) - sizes_T)[tie_tables]
    chosen[ties] = places < (tie_counts_T - earlier_T)[tie_tables]
    return chosen.nonzero().squeeze(1)


def _find_thresholds(
    tables: torch.Tensor, scores: torch.Tensor, counts: list[int], lows: list[int], highs: list[int], peers: Peers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each table's score of the last key to take, and the number of keys with this score to take, int64 [T].

    The number of histograms depends only on `lows` and `highs`, so the host never waits for a GPU. Further histograms
    do not change a score that has been found.

    Args:
        tables: Table number of each key, int64 [n], ascending.
        scores: Scores, int64 [n].
        counts: Number of keys to take from each table on all ranks.
        lows: Lowest score of each table on all ranks; equal to `highs` if the threshold is known.
        highs: Highest score of each table on all ranks.
        peers: Ranks that share the keys.
    """
    device, all_bins = scores.device, len(counts) << HISTOGRAM_BITS
    low_T, count_T = to_device_tensor([lows, counts], device).unbind()
    starts_T = torch.arange(len(counts), device=device) << HISTOGRAM_BITS
    widths = [(high - low).bit_length() for low, high in zip(lows, highs, strict=True)]
    while any(widths):
        # If the threshold is known, the bins of the scores are irrelevant but must be within range.
        shifts = [max(0, width - HISTOGRAM_BITS) if width else 62 for width in widths]
        widths = [max(0, width - HISTOGRAM_BITS) for width in widths]
        shift_T = to_device_tensor(shifts, device)
        bins = (scores - select_by_table(low_T, tables)) >> select_by_table(shift_T, tables)
        is_inside = None if device.type == "cpu" else (bins >= 0).logical_and_(bins < 1 << HISTOGRAM_BITS)
        bins = bins + select_by_table(starts_T, tables)
        if is_inside is not None:
            bins = bins.where(is_inside, all_bins)
        # torch.bincount would make the host wait for the GPU.
        zeros = torch.zeros(all_bins + 1, dtype=torch.int64, device=device)
        histogram = peers.sum(zeros.index_add_(0, bins, torch.ones_like(bins)))[:-1].view(len(counts), -1)
        cumulative = histogram.cumsum(1)
        crossing = torch.searchsorted(cumulative, count_T.unsqueeze(1)).clamp_(max=2**HISTOGRAM_BITS - 1)
        count_T = count_T - (cumulative - histogram).gather(1, crossing).squeeze(1)
        low_T = low_T + (crossing.squeeze(1) << shift_T)
        if is_inside is None:  # on a GPU, the host would wait
            kept = (bins == select_by_table(crossing.squeeze(1) + starts_T, tables)).nonzero().squeeze(1)
            tables, scores = tables[kept], scores[kept]
    return low_T, count_T
