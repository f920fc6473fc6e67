"""Who gets a row, and who loses it: functions of what all ranks have seen together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raytrec.config.managed import Eviction
from raytrec.embeddings.hashing import hash_bits

SWEEPS = 8  # looks for expired ids in the time after which an id expires
LARGEST = 2**31 - 1
FREED = 64  # the part of the rows that is freed at least, so that ids are rarely looked through
STEPS, MOST_FREED = 4, 4  # with lru: for so many steps like this one, up to this part of the rows
MOST_ROWS = 2**20  # that are freed ahead, a list of which every rank keeps


def scores(eviction: Eviction, sightings: torch.Tensor, last: torch.Tensor, step: int) -> torch.Tensor:
    """What ids with rows are worth: int64 [n], 0 or more; the lowest leave first.

    lru: the step of the last sighting. lfu: sightings, and among equals the last step. distance_lfu:
    sightings ÷ steps since the last one (TorchRec's DistanceLFU_EvictionPolicy with exponent 1).

    Args:
        sightings: int64 [n]. last: integers [n], the step of the last one, before `step`; -1 or more.
    """
    if eviction == "lru":
        return last.long() + 1
    if eviction == "lfu":
        return (sightings.clamp(max=LARGEST) << 31) | (last + 1)
    # The bits of doubles that are not negative are in the order of the doubles.
    return (sightings.double() / (step - last)).view(torch.int64)


def drawn(keys: torch.Tensor, counts: torch.Tensor, step: int, seed: int, probability: float) -> torch.Tensor:
    """Whether any of a key's sightings at this step gives it a row: bool [n].

    It depends on (seed, step, key) alone: nothing has to be kept of ids that were not drawn.

    Args:
        counts: int64 [n], how often each was seen at this step.
    """
    uniform = _draw(keys, step, seed, 53).double() * 2.0**-53
    return uniform < 1 - (1 - probability) ** counts.double()


def admission_scores(keys: torch.Tensor, sightings: torch.Tensor, step: int, seed: int) -> torch.Tensor:
    """What ids without a row are worth to one another, where rows are too few for all: int64 [n], 0 or more.
    Those seen more often go first; among equals a draw decides, anew at each step.

    Args:
        sightings: int64 [n], those of this step included.
    """
    return (sightings.clamp(max=LARGEST) << 31) | _draw(keys, step, seed, 31)


def rows_to_free(eviction: Eviction, missing: int, rows: int) -> int:
    """How many ids lose their rows at a step that lacks some.

    With lru they are as many as are missing, and some ahead. With the others, at most a 64th of the rows
    changes hands at a step: else a batch with many new ids would take rows from ids that are seen often.

    Args:
        rows: that ids can have.
    """
    least = min(max(1, rows // FREED), MOST_ROWS)
    if eviction != "lru":
        return least
    return max(missing, least, min(STEPS * missing, rows // MOST_FREED, MOST_ROWS))


def _draw(keys: torch.Tensor, step: int, seed: int, bits: int) -> torch.Tensor:
    """A function of (seed, step, key) alone, even: int64 [n] of so many bits."""
    salt = hash_bits(torch.tensor([seed]) ^ hash_bits(torch.tensor([step]))).to(keys.device)
    return (hash_bits(keys ^ salt) >> (64 - bits)) & (2**bits - 1)


@dataclass(frozen=True)
class Expiry:
    """When ids that were not seen for long leave.

    Args:
        ttl_steps: for how many steps an id may be unseen; ttl_s: for how many seconds. None: for ever.
        marks: (step, seconds) of sweeps so far, as far back as is needed to know which step `ttl_s` ago was.
    """

    ttl_steps: int | None
    ttl_s: float | None
    marks: tuple[tuple[int, float], ...] = ()

    def advance(self, step: int, now: float) -> tuple[Expiry, int | None]:
        """(this after a step, the step before which ids must have been seen last to leave now). None: nobody
        is looked for at this step.

        Args:
            now: seconds, the same on all ranks.
        """
        horizon, marks = None, self.marks
        if self.ttl_steps and step % max(1, self.ttl_steps // SWEEPS) == 0:
            horizon = step - self.ttl_steps
        if self.ttl_s and (not marks or now >= marks[-1][1] + self.ttl_s / SWEEPS):
            marks = (*marks, (step, now))
            old = [mark for mark in marks if mark[1] <= now - self.ttl_s]
            if old:
                horizon = max(horizon or 0, old[-1][0] + 1)
                marks = marks[len(old) - 1 :]
        return Expiry(self.ttl_steps, self.ttl_s, marks), horizon
