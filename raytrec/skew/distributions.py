"""How far apart two samples are, and how far chance alone takes them. No torch."""

from __future__ import annotations

from math import sqrt

import numpy as np

MODERATE = 0.1  # psi, from which a change is worth a look (Siddiqi 2006); 0.25: it is large
DECILES = 10  # of training: the bins of numbers
TOP = 20  # ids that are compared one by one, all others together
LENGTHS = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256])  # upper bounds of the bins of bags' lengths


def psi(found_B: np.ndarray, expected_B: np.ndarray) -> float:
    """The population stability index Σ (p − q) ln(p / q) of two samples' counts in the same bins.

    It is the symmetrical divergence of Jeffreys ("An invariant form for the prior probability in estimation
    problems", 1946); the name and the bounds 0.1 and 0.25 are those of N. Siddiqi, "Credit Risk Scorecards"
    (2006). Half a count is added to each bin, so that an empty one gives a number.

    Args:
        found_B, expected_B: [bins], counts.
    """
    p_B, q_B = ((each + 0.5) / (each.sum() + 0.5 * len(each)) for each in (found_B, expected_B))
    return float(((p_B - q_B) * np.log(p_B / q_B)).sum())


def chance(bins: int, found: int, expected: int) -> float:
    """What the index of two samples of one distribution exceeds once in a thousand times.

    psi ÷ (1/n + 1/m) is about χ² with bins − 1 degrees of freedom (B. Yurdakul, "Statistical properties of
    population stability index", 2018), whose quantile is that of Wilson and Hilferty ("The distribution of
    chi-square", 1931).

    Args:
        found, expected: independent values of the two samples.
    """
    k, z = max(1, bins - 1), 3.09
    quantile = k * (1 - 2 / (9 * k) + z * sqrt(2 / (9 * k))) ** 3
    return quantile * (1 / max(1, found) + 1 / max(1, expected))


def of_numbers(found_N: np.ndarray, expected_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts of two samples of numbers, between the quantiles of the second: [bins] each."""
    bounds = np.unique(np.quantile(expected_M, np.linspace(0, 1, DECILES + 1)))
    return in_bins(found_N, bounds), in_bins(expected_M, bounds)


def in_bins(values_N: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """How many values are at most each bound, and beyond the one before; the last count is of those above
    all."""
    return np.bincount(np.searchsorted(bounds, values_N), minlength=len(bounds) + 1)


def of_ids(found: Ids, expected: Ids) -> tuple[np.ndarray, np.ndarray]:
    """Counts of two samples of ids: the second's most frequent ones, then all others."""
    top = expected.ids[np.argsort(-expected.counts, kind="stable")[:TOP]]
    return found.of_each(top), expected.of_each(top)


class Ids:
    """Ids and how often each was looked up.

    Attributes:
        ids: int64, ascending. counts: int64. total: their sum.
    """

    def __init__(self) -> None:
        self.ids, self.counts = np.empty(0, np.int64), np.empty(0, np.int64)

    @property
    def total(self) -> int:
        """Lookups."""
        return int(self.counts.sum())

    def add(self, ids_N: np.ndarray) -> None:
        """Counts more of them."""
        new, counts = np.unique(ids_N, return_counts=True)
        self.ids, places = np.unique(np.concatenate([self.ids, new]), return_inverse=True)
        self.counts = np.bincount(places, np.concatenate([self.counts, counts])).astype(np.int64)

    def count(self, ids_N: np.ndarray) -> np.ndarray:
        """How often each of some ids was looked up: int64 [N]."""
        if not len(self.ids):
            return np.zeros(len(ids_N), np.int64)
        places = np.searchsorted(self.ids, ids_N).clip(max=len(self.ids) - 1)
        return np.where(self.ids[places] == ids_N, self.counts[places], 0)

    def of_each(self, ids_N: np.ndarray) -> np.ndarray:
        """How often each of some ids was looked up, and last all others together: int64 [N + 1]."""
        counts_N = self.count(ids_N)
        return np.append(counts_N, self.total - counts_N.sum())

    def unseen(self) -> float:
        """The share of further lookups of the same distribution whose ids are not among these: that of ids
        that are there once (I. J. Good, "The population frequencies of species", 1953)."""
        return float((self.counts == 1).sum()) / max(1, self.total)
