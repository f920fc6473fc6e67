"""Bags of ids taken apart, for the parity check."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raytrec.embeddings.taps import Key

LONGEST_BAG = 1024  # ids in a bag that is compared


@dataclass(frozen=True)
class Bags:
    """Bags of one feature; a sequence that is read id by id counts as L bags of one id, or none, each.

    Attributes:
        at: int64 [R], which rows of the batch.
        ids: int64 [N]. bag: int64 [N], the bag of each id, from 0 to S − 1, where S = R; for sequences L·R.
        factors: float32 [N], what each row is multiplied with: w, for means w ÷ Σ w of its bag.
        doubt: float32 [S], how much larger a rounding error may be than that of weights that are all
            positive: Σ|w| ÷ |Σ w| (1 for sums).
        share: float32 [S], what the sum of a bag is multiplied with: 1 ÷ |Σ w| for means.
    """

    at: torch.Tensor
    ids: torch.Tensor
    bag: torch.Tensor
    factors: torch.Tensor
    doubt: torch.Tensor
    share: torch.Tensor


def factors_of(
    weights_N: torch.Tensor, bag_N: torch.Tensor, bags: int, mean: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each row of a bag is multiplied with; doubt and share of each bag; see Bags."""
    if not mean:
        return weights_N, weights_N.new_ones(bags), weights_N.new_ones(bags)
    totals_B = weights_N.new_zeros(bags).index_add_(0, bag_N, weights_N)
    sizes_B = weights_N.new_zeros(bags).index_add_(0, bag_N, weights_N.abs())
    totals_B = totals_B.masked_fill(totals_B == 0, 1)
    doubt_B, share_B = (sizes_B / totals_B.abs()).clamp(min=1), 1 / totals_B.abs()
    return weights_N / totals_B[bag_N], doubt_B, share_B


def slots(key: Key, length: int | None) -> torch.Tensor:
    """Of each id, where its vector goes: int64 [N]. Into its bag; or, of sequences of at most `length` ids,
    into the place among the bag's `length` that it has in the bag."""
    if length is None:
        return key.bag
    starts = key.lengths.cumsum(0) - key.lengths
    return key.bag * length + torch.arange(len(key.bag), device=key.bag.device) - starts[key.bag]


def flat(values: torch.Tensor) -> torch.Tensor:
    """[R, dim], or [R, L, dim] as [L·R, dim]."""
    return values if values.dim() == 2 else values.flatten(0, 1)


def some_bags(
    key: Key,
    first: torch.Tensor,
    mean: bool,
    device: torch.device,
    longest: bool = True,
    sequence: int | None = None,
) -> Bags:
    """The `first` bags of a feature, and the longest; without those of more than `LONGEST_BAG` ids.

    Args:
        sequence: the most ids of one that is read id by id.
    """
    short = key.lengths.masked_fill(key.lengths > LONGEST_BAG, 0)
    at = torch.cat([first, short.argmax().view(1)]) if longest else first
    at = at[key.lengths[at] <= LONGEST_BAG]
    lengths = key.lengths[at]
    starts = (key.lengths.cumsum(0) - key.lengths)[at] - (lengths.cumsum(0) - lengths)
    bag = torch.arange(len(at)).repeat_interleave(lengths)
    places = torch.arange(len(bag)) + starts[bag]
    some = Key(key.ids[places], bag, key.weights[places], lengths)
    slot, count = slots(some, sequence), len(at) * (sequence or 1)
    factors, doubt, share = factors_of(some.weights, slot, count, mean)
    return Bags(*(x.to(device) for x in (at, some.ids, slot, factors, doubt, share)))
