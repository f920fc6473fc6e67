"""The lowest of all ranks' keys by their scores, found without bringing them together."""

from __future__ import annotations

import torch

from raytrec.embeddings.managed.peers import Peers

BITS = 12  # of a score that a histogram, which ranks add up, tells apart: 32 KiB


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
    ends = [int(scores.min()), int(scores.max())] if len(scores) else [2**63 - 1, 0]
    sizes, lows, highs = peers.gather(torch.tensor([len(scores), *ends], device=device)).T.tolist()
    if count >= sum(sizes):
        return torch.arange(len(scores), device=device)
    score, missing = _threshold(scores, count, min(lows), max(highs), peers)
    ties = (scores == score).nonzero().squeeze(1)
    before = peers.gather(torch.tensor([len(ties)], device=device))[: peers.rank].sum()
    mine = min(max(missing - int(before), 0), len(ties))
    ties = ties[keys[ties].argsort()[:mine]]
    return torch.cat([(scores < score).nonzero().squeeze(1), ties])


def _threshold(scores: torch.Tensor, count: int, low: int, high: int, peers: Peers) -> tuple[int, int]:
    """The score of the last of the `count` lowest, and how many with this score are among them.

    Args:
        low, high: the least and the greatest score of all.
    """
    while low < high:
        shift = max(0, (high - low).bit_length() - BITS)
        bins = (scores - low) >> shift
        histogram = peers.sum(torch.bincount(bins, minlength=2**BITS))
        upto = histogram.cumsum(0)
        place = int(torch.searchsorted(upto, count))
        count -= int(upto[place] - histogram[place])
        low, high = low + (place << shift), min(high, low + ((place + 1) << shift) - 1)
        scores = scores[bins == place]
    return low, count
