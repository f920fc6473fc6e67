"""Select individual bags of ids, and compute the factors of their ids, for the parity check."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raytrec.embeddings.taps import KeyLookups

LONGEST_BAG = 1024  # maximum number of ids in a compared bag


@dataclass(frozen=True)
class Bags:
    """Selected bags of one feature; a sequence read id by id counts as L bags of at most one id each.

    A bag contains the ids of a feature in one row of a batch; w is the weight of an id. A sum Σ w of 0 counts as 1.

    Attributes:
        at: Rows of the batch whose bags are selected, int64 [R].
        ids: Ids, int64 [N].
        bag: Bag of each id, int64 [N], from 0 to S − 1, where S = R, or L·R for sequences.
        factors: Factor of each id's vector, float32 [N]: w, or for means w ÷ Σ w of its bag.
        doubt: Factor by which rounding errors may exceed those for positive weights, float32 [S]: for means
            Σ|w| ÷ |Σ w|, at least 1; otherwise 1.
        share: Magnitude of the factor that turns a bag's sum into its result, float32 [S]: 1 ÷ |Σ w| for means,
            otherwise 1.
    """

    at: torch.Tensor
    ids: torch.Tensor
    bag: torch.Tensor
    factors: torch.Tensor
    doubt: torch.Tensor
    share: torch.Tensor


def compute_bag_factors(
    weights_N: torch.Tensor, bag_N: torch.Tensor, bags: int, mean: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the factor of each id's vector, and the doubt and share of each bag, as defined in `Bags`."""
    if not mean:
        return weights_N, weights_N.new_ones(bags), weights_N.new_ones(bags)
    totals_B = weights_N.new_zeros(bags).index_add_(0, bag_N, weights_N)
    sizes_B = weights_N.new_zeros(bags).index_add_(0, bag_N, weights_N.abs())
    totals_B = totals_B.masked_fill(totals_B == 0, 1)
    doubt_B, share_B = (sizes_B / totals_B.abs()).clamp(min=1), 1 / totals_B.abs()
    return weights_N / totals_B[bag_N], doubt_B, share_B


def compute_slots(key: KeyLookups, length: int | None) -> torch.Tensor:
    """Return the slot of each id's vector in the flattened output, int64 [N].

    If `length` is None, the slot is the number of the id's bag. For sequences, each bag has `length` slots, one for
    each position.
    """
    if length is None:
        return key.bag
    starts = key.lengths.cumsum(0) - key.lengths
    return key.bag * length + torch.arange(len(key.bag), device=key.bag.device) - starts[key.bag]


def flatten_vectors(values: torch.Tensor) -> torch.Tensor:
    """Reshape values [R, L, dim] to [R·L, dim]; return values [R, dim] unchanged."""
    return values if values.dim() == 2 else values.flatten(0, 1)


def select_bags(
    key: KeyLookups, first: torch.Tensor, mean: bool, device: torch.device, sequence: int | None = None
) -> Bags:
    """Select the bags of some rows, and the longest bag; bags of more than `LONGEST_BAG` ids are omitted.

    Args:
        key: Ids and bags of the feature, in CPU memory.
        first: Rows of the batch whose bags are selected, int64 [n]; if there are none, no bag is selected.
        mean: True if the feature is mean-pooled.
        device: Device of the result.
        sequence: Maximum number of ids if the feature is read id by id; None if bags are pooled.
    """
    short = key.lengths.masked_fill(key.lengths > LONGEST_BAG, 0)
    at = torch.cat([first, short.argmax().view(1)]) if len(first) else first
    at = at[key.lengths[at] <= LONGEST_BAG]
    lengths = key.lengths[at]
    starts = (key.lengths.cumsum(0) - key.lengths)[at] - (lengths.cumsum(0) - lengths)
    bag = torch.arange(len(at)).repeat_interleave(lengths)
    places = torch.arange(len(bag)) + starts[bag]
    some = KeyLookups(key.ids[places], bag, key.weights[places], lengths)
    slot, count = compute_slots(some, sequence), len(at) * (sequence or 1)
    factors, doubt, share = compute_bag_factors(some.weights, slot, count, mean)
    return Bags(*(x.to(device) for x in (at, some.ids, slot, factors, doubt, share)))
