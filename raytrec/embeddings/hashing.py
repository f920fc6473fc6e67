"""Hashes of integers on the device where they are: the same bits on CPU and GPU.

Arithmetic of int64 wraps around on both, and nothing is rounded. data/hashing.py does the same in NumPy.
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # constants of 64 bits as torch's signed integers have them
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
UNDO_FIRST, UNDO_SECOND = 0x96DE1B173F119089 - 2**64, 0x319642B2D24D8EC3  # their inverses


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
