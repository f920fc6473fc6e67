"""Ids of sequences without padding between them.

train.compile leaves out (torch.compiler.disable) what takes groups of rows: it would be compiled again for
other lengths, in step after step.
"""

from __future__ import annotations

from typing import Any

import torch

GROUPS = 8  # of rows of about the same length


@torch.compiler.disable
def pack_ids(present: torch.Tensor, lengths: torch.Tensor | None = None) -> Packed:
    """The ids of sequences as layers take them; while torch exports, in shapes that no values decide.

    Args: see Packed.
    """
    return Padded(present) if torch.compiler.is_exporting() else Packed(present, lengths)


class Packed:
    """Where the N ids that are present in a batch of sequences are, and their way there and back.

    Layers that look at one id at a time take [N, D], which is much less than [B, L, D] where few sequences
    are long. What holds ids of a row against each other takes groups of b rows of about the same length, each
    padded to its longest, in order of time with the oldest id first. What is not there comes last in them,
    where causal attention never looks: no row needs a separate mask.

    Args:
        present: bool [B, L], the first `length` of each row, the most recent first.
        lengths: int [B], these lengths on the host, from which it knows all sizes; default: it waits until
            the device has them.

    Attributes:
        recency: int64 [N], how many ids of the row are more recent. order: int64 [N], how many are older.
        there: bool [b, T] of each group, where there is an id.
    """

    def __init__(self, present: torch.Tensor, lengths: torch.Tensor | None = None):
        lengths_B, self._count = present.sum(1), len(present)
        known_B = lengths_B.cpu() if lengths is None else lengths.clamp(max=present.shape[1])
        self._size = max(-(-self._count // GROUPS), 1)
        of_groups = known_B.sort(descending=True).values[:: self._size].clamp(min=1).tolist()
        ids, rows = int(known_B.sum()), int(known_B.count_nonzero())
        starts_B = lengths_B.cumsum(0) - lengths_B
        rows_B = torch.arange(self._count, device=present.device)
        self._rows_N = rows_N = rows_B.repeat_interleave(lengths_B, output_size=ids)
        self.recency = torch.arange(ids, device=present.device) - starts_B[rows_N]
        self._recent_first = rows_N * present.shape[1] + self.recency
        self.order = lengths_B[rows_N] - 1 - self.recency
        sorted_B, self._by_length = lengths_B.sort(descending=True, stable=True)
        longest = sorted_B[:: self._size].clamp(min=1)  # of each group
        widths_B = longest.repeat_interleave(self._size)[: self._count]
        padded_B = torch.empty_like(widths_B)
        padded_B[self._by_length] = widths_B.cumsum(0) - widths_B
        self._by_time = padded_B[rows_N] + self.order
        groups = zip(of_groups, sorted_B.split(self._size), strict=True)
        self.there = [_first(lengths_b.unsqueeze(1), length) for length, lengths_b in groups]
        self._rows = self._by_length[:rows]
        self._newest = starts_B[self._rows]

    @torch.compiler.disable
    def pack(self, values_BLD: torch.Tensor) -> torch.Tensor:
        """[B, L, D], the most recent first → [N, D]."""
        return _Take.apply(values_BLD.flatten(0, 1), self._recent_first)

    @torch.compiler.disable
    def newest(self, values_ND: torch.Tensor) -> torch.Tensor:
        """The most recent one's of each row: [N, D] → [B, D], 0 where there is none."""
        return _Put.apply(_Take.apply(values_ND, self._newest), self._rows, self._count)

    def by_time(self, values_ND: torch.Tensor) -> list[torch.Tensor]:
        """[N, D] → [b, T, D] of each group, the oldest first; 0 where there is none."""
        sizes = [there_bT.numel() for there_bT in self.there]
        parts = _Put.apply(values_ND, self._by_time, sum(sizes)).split(sizes)
        return [part.view(*there_bT.shape, -1) for part, there_bT in zip(parts, self.there, strict=True)]

    def from_time(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """[b, T, D] of each group, the oldest first → [N, D]."""
        return _Take.apply(torch.cat([group.flatten(0, 1) for group in groups]), self._by_time)

    def sum_rows(self, values_N: torch.Tensor) -> torch.Tensor:
        """Sums of the ids of each row: [N] → [B]."""
        return values_N.new_zeros(self._count).index_add(0, self._rows_N, values_N)

    def in_groups(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What rows have: [B, …] → [b, …] of each group."""
        return values.index_select(0, self._by_length).split(self._size)

    def in_rows(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """The reverse: [b] of each group → [B]."""
        values_B = torch.cat(groups)
        return torch.empty_like(values_B).index_copy(0, self._by_length, values_B)


class Padded(Packed):
    """The same with N = B · L ids: those that are not there, too, with some finite numbers, which no other
    id's depend on. One group has all rows, L ids long; `in_groups` and `in_rows` are for training alone.

    Args, Attributes: see Packed.
    """

    def __init__(self, present: torch.Tensor):
        self._lengths_B, self._length = present.sum(1), present.shape[1]
        recency_BL = torch.arange(self._length, device=present.device).expand_as(present)
        self.recency = recency_BL.flatten()
        self.order = (self._lengths_B.unsqueeze(1) - 1 - recency_BL).clamp(min=0).flatten()
        self.there = [present]

    def pack(self, values_BLD: torch.Tensor) -> torch.Tensor:
        """[B, L, D], the most recent first → [N, D]."""
        return values_BLD.flatten(0, 1)

    def newest(self, values_ND: torch.Tensor) -> torch.Tensor:
        """The most recent one's of each row: [N, D] → [B, D], 0 where there is none."""
        newest_BD = values_ND.unflatten(0, (-1, self._length))[:, 0]
        return newest_BD.where(self._lengths_B.unsqueeze(1) > 0, 0)

    def by_time(self, values_ND: torch.Tensor) -> list[torch.Tensor]:
        """[N, D] → [B, L, D], the oldest first."""
        return [turn(values_ND.unflatten(0, (-1, self._length)), self._lengths_B)]

    def from_time(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """[B, L, D], the oldest first → [N, D]."""
        return turn(groups[0], self._lengths_B).flatten(0, 1)


def turn(values_BLx: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """The first `length` entries of each row in the reverse order, what is behind them after them: [B, L, …].

    It makes what is most recent first what is oldest first, and the reverse.
    """
    places_L = torch.arange(values_BLx.shape[1], device=values_BLx.device)
    turned_BL = lengths_B.unsqueeze(1) - 1 - places_L
    places_BL = torch.where(turned_BL >= 0, turned_BL, places_L)
    if values_BLx.dim() == 2:
        return values_BLx.gather(1, places_BL)
    return values_BLx.gather(1, places_BL.unsqueeze(2).expand_as(values_BLx))


def _first(lengths_b1: torch.Tensor, length: int) -> torch.Tensor:
    """The first so many of T: bool [b, T]."""
    return torch.arange(length, device=lengths_b1.device) < lengths_b1


class _Take(torch.autograd.Function):
    """Rows at places that are all different, so that the gradient needs no adding up: [M, D] → [N, D]."""

    @staticmethod
    def forward(ctx: Any, values_MD: torch.Tensor, places_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places_N)
        ctx.size = len(values_MD)
        return values_MD.index_select(0, places_N)

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _put(grad_ND, ctx.saved_tensors[0], ctx.size), None


class _Put(torch.autograd.Function):
    """The reverse: [N, D] → [M, D], 0 elsewhere."""

    @staticmethod
    def forward(ctx: Any, values_ND: torch.Tensor, places_N: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(places_N)
        return _put(values_ND, places_N, size)

    @staticmethod
    def backward(ctx: Any, grad_MD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad_MD.index_select(0, ctx.saved_tensors[0]), None, None


def _put(values_ND: torch.Tensor, places_N: torch.Tensor, size: int) -> torch.Tensor:
    return values_ND.new_zeros(size, values_ND.shape[1]).index_copy_(0, places_N, values_ND)
