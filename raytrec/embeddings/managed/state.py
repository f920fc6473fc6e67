"""What a map of managed ids consists of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raytrec.embeddings.managed.key_map import Entries
from raytrec.embeddings.managed.policy import Expiry


@dataclass(frozen=True)
class Free:
    """Rows without an id; the same on all ranks.

    Attributes:
        handed: how many rows have been handed out for the first time.
        left: int64 [n], those whose ids have left, in the order in which they are handed out again.
        expiry: when ids expire.
    """

    handed: int
    left: torch.Tensor
    expiry: Expiry


@dataclass(frozen=True)
class MapState:
    """What a map is, of all ranks or of some.

    Attributes:
        rows: keys with a row: row, sightings, last (the step of the last one).
        waiting: keys that have been seen, but not often enough: sightings, last.
        free: rows without an id.
    """

    rows: Entries
    waiting: Entries
    free: Free


@dataclass(frozen=True)
class Sighting:
    """The ids that a step brings to this rank.

    Attributes:
        step: its number.
        keys: int64 [n], ascending, each once. counts: int64 [n], how often each is in the global batch.
        rows: int64 [n], the row of each; -1 where it has none.
        wanted: int64 [m], places of those that are to be admitted. sightings: int64 [m], theirs so far.
    """

    step: int
    keys: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor
    wanted: torch.Tensor
    sightings: torch.Tensor
