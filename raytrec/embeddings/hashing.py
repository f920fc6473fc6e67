"""Hashes of integers, and ids as keys, on any device.

Arithmetic of int64 wraps around on CPU and GPU, and nothing is rounded, so both give the same bits.
data/hashing.py does the same in NumPy.

The key of an id is its hash by splitmix64, which maps the integers of 64 bits one to one, so that keys are
spread evenly whatever the ids are, and an id is found again from its key (`unhash_bits`). Ranks own equal
spans of keys in their order: what is in the order of keys on each rank is so over all ranks, however many
there are.
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # constants of 64 bits as torch's signed integers have them
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
UNDO_FIRST, UNDO_SECOND = 0x96DE1B173F119089 - 2**64, 0x319642B2D24D8EC3  # their inverses
NO_KEY = -(2**63)  # in the place of a key where there is none
_BITS = 32  # of a key that decide on its owner


def hash_bits(values: torch.Tensor) -> torch.Tensor:
    """splitmix64 (Steele, Lea, Flood 2014): int64 [...] → well-mixed int64 [...], one to one."""
    bits = values + GOLDEN
    bits ^= _shifted(bits, 30)
    bits *= FIRST
    bits ^= _shifted(bits, 27)
    bits *= SECOND
    bits ^= _shifted(bits, 31)
    return bits


def unhash_bits(hashed: torch.Tensor) -> torch.Tensor:
    """What `hash_bits` has made these of: int64 [...] → int64 [...]."""
    bits = _unshifted(hashed, 31) * UNDO_SECOND
    bits = _unshifted(bits, 27) * UNDO_FIRST
    return _unshifted(bits, 30) - GOLDEN


def _unshifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """x of x ^ (x shifted by 22 to 31 bits)."""
    return bits ^ _shifted(bits, count) ^ _shifted(bits, 2 * count)


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """To the right, with zeros from the left: torch's own shift repeats the sign."""
    return (bits >> count).bitwise_and_(2 ** (64 - count) - 1)


def keys_of(ids: torch.Tensor) -> torch.Tensor:
    """The keys of ids: int64 [...] → int64 [...], none of them NO_KEY.

    Of the 2⁶⁴ ids two have the same key, that of NO_KEY's neighbour; all others have different keys.
    """
    return hash_bits(ids).clamp_(min=NO_KEY + 1)


def shares(keys: torch.Tensor, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the rank that owns each key, where in that rank's span of keys it is: 0 to 2³² - 1); both int64, and
    both together ascend with the keys."""
    scaled = ((keys >> _BITS) + 2 ** (_BITS - 1)) * world
    return scaled >> _BITS, scaled & (2**_BITS - 1)


def fallback_of(keys: torch.Tensor, first: int | torch.Tensor, rows: int | torch.Tensor) -> torch.Tensor:
    """The row that each key [n] has as long as it has no own row: int64 [n].

    Args:
        first: of the fallback's rows. rows: how many there are. Of all keys, or of each: int64 [n].
    """
    return first + keys.remainder(rows)
