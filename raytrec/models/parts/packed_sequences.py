"""Packed sequences, which store the values of all ids of a batch without padding, and token layouts of HstuRank.

Operations on groups of rows are excluded from train.compile (torch.compiler.disable). The lengths of groups
change with every step, and each change would recompile these operations.
"""

from __future__ import annotations

from typing import Any

import torch

from raytrec.models.inputs import RequestInputs

# Approximate number of groups of rows with similar lengths. More groups have less padding, but need more kernels.
CPU_GROUPS, GPU_GROUPS = 8, 2
MIN_SPLIT_LENGTH = 64  # on CPU, a group with a longer row contains no row shorter than half of that row


@torch.compiler.disable
def pack_ids(present: torch.Tensor, lengths: torch.Tensor | None = None) -> PackedSequences:
    """Return the PackedSequences of a batch, or a PaddedSequences during torch.export. See these for the arguments."""
    return PaddedSequences(present) if torch.compiler.is_exporting() else PackedSequences(present, lengths)


class PackedSequences:
    """Positions of the N ids in a batch of sequences, and conversions between layouts.

    Layers that process ids independently take [N, D], which is much smaller than [B, L, D] if few sequences
    are long. Layers that compare the ids of a row take groups of b rows with similar lengths, each group
    padded to its longest row. In a group, ids are ordered by time, oldest first. Padding comes last and is thus
    ignored by causal attention, so rows need no separate masks.

    In the shapes, B is the number of rows, L the maximum number of ids of a row, b the number of rows of a group, and
    T the number of ids of its longest row.

    Args:
        present: True at positions with an id, bool [B, L]. Ids occupy the first positions of a row, most recent
            first.
        lengths: Number of ids in each row, int [B], on the host; default: computed from `present`, which blocks the
            host if `present` is on a GPU.

    Attributes:
        recency: Number of more recent ids in the same row, int64 [N].
        order: Number of older ids in the same row, int64 [N].
        group_masks: Mask of each group, bool [b, T], True at positions with an id.
    """

    def __init__(self, present: torch.Tensor, lengths: torch.Tensor | None = None):
        lengths_B, self._count = present.sum(1), len(present)
        host_B = lengths_B.cpu() if lengths is None else lengths.clamp(max=present.shape[1])
        sorted_host_B = host_B.sort(descending=True).values
        self._sizes = _choose_group_sizes(sorted_host_B, present.is_cuda)
        group_lengths = [part_b.clamp(min=1)[0].item() for part_b in sorted_host_B.split(self._sizes)]
        ids, rows = int(host_B.sum()), int(host_B.count_nonzero())
        starts_B = lengths_B.cumsum(0) - lengths_B
        rows_B = torch.arange(self._count, device=present.device)
        self._rows_N = rows_N = rows_B.repeat_interleave(lengths_B, output_size=ids)
        self.recency = torch.arange(ids, device=present.device) - starts_B[rows_N]
        self._recent_first = rows_N * present.shape[1] + self.recency
        self.order = lengths_B[rows_N] - 1 - self.recency
        sorted_B, self._by_length = lengths_B.sort(descending=True, stable=True)
        parts = sorted_B.split(self._sizes)
        widths_B = torch.cat([lengths_b[:1].clamp(min=1).expand_as(lengths_b) for lengths_b in parts])
        padded_B = torch.empty_like(widths_B)
        padded_B[self._by_length] = widths_B.cumsum(0) - widths_B
        self._by_time = padded_B[rows_N] + self.order
        groups = zip(group_lengths, parts, strict=True)
        places_L = torch.arange(present.shape[1], device=present.device)
        self.group_masks = [places_L[:length] < lengths_b.unsqueeze(1) for length, lengths_b in groups]
        self._rows = self._by_length[:rows]
        self._newest = starts_B[self._rows]

    @torch.compiler.disable
    def pack(self, values_BLD: torch.Tensor) -> torch.Tensor:
        """Return the values of all ids without padding, row by row, most recent first: [B, L, D] → [N, D]."""
        return _Take.apply(values_BLD.flatten(0, 1), self._recent_first)

    @torch.compiler.disable
    def select_newest(self, values_ND: torch.Tensor) -> torch.Tensor:
        """Return the vector of the most recent id in each row: [N, D] → [B, D]; 0 for empty sequences."""
        return _Put.apply(_Take.apply(values_ND, self._newest), self._rows, self._count)

    def to_chronological(self, values_ND: torch.Tensor) -> list[torch.Tensor]:
        """Return the values of each group, oldest first: [N, D] → [b, T, D] each; 0 at positions without an id."""
        sizes = [mask_bT.numel() for mask_bT in self.group_masks]
        parts = _Put.apply(values_ND, self._by_time, sum(sizes)).split(sizes)
        return [part.view(*mask_bT.shape, -1) for part, mask_bT in zip(parts, self.group_masks, strict=True)]

    def from_chronological(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """Return packed values (the inverse of `to_chronological`): [b, T, D] for each group → [N, D]."""
        return _Take.apply(torch.cat([group.flatten(0, 1) for group in groups]), self._by_time)

    def sum_rows(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values of each row's ids: [N] → [B]; 0 for empty sequences."""
        return values_N.new_zeros(self._count).index_add(0, self._rows_N, values_N)

    def to_groups(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split per-row values into groups: [B, …] → [b, …] for each group."""
        return values.index_select(0, self._by_length).split(self._sizes)

    def from_groups(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """Return per-row values in the batch's order (the inverse of `to_groups`): [b, …] for each group → [B, …]."""
        values_B = torch.cat(groups)
        return torch.empty_like(values_B).index_copy(0, self._by_length, values_B)


class PaddedSequences(PackedSequences):
    """Variant of PackedSequences for torch.export, which keeps the padding (N = B · L).

    Shapes thus do not depend on the lengths. Values at positions without an id are finite and do not affect the
    values of ids. There is a single group of all rows, padded to L ids. The argument and the attributes are those
    of PackedSequences. `sum_rows` is not supported.
    """

    def __init__(self, present: torch.Tensor):
        self._lengths_B, self._length = present.sum(1), present.shape[1]
        recency_BL = torch.arange(self._length, device=present.device).expand_as(present)
        self.recency = recency_BL.flatten()
        self.order = (self._lengths_B.unsqueeze(1) - 1 - recency_BL).clamp(min=0).flatten()
        self.group_masks = [present]

    def pack(self, values_BLD: torch.Tensor) -> torch.Tensor:
        """Return the values of all positions, including padding: [B, L, D], most recent first → [B · L, D]."""
        return values_BLD.flatten(0, 1)

    def select_newest(self, values_ND: torch.Tensor) -> torch.Tensor:
        """Return the vector of the most recent id in each row: [N, D] → [B, D]; 0 for empty sequences."""
        newest_BD = values_ND.unflatten(0, (-1, self._length))[:, 0]
        return newest_BD.where(self._lengths_B.unsqueeze(1) > 0, 0)

    def to_chronological(self, values_ND: torch.Tensor) -> list[torch.Tensor]:
        """Return one group of all rows, oldest first: [B · L, D] → [[B, L, D]]; padding is kept."""
        return [reverse_sequences(values_ND.unflatten(0, (-1, self._length)), self._lengths_B)]

    def from_chronological(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """Return the values of all positions (the inverse of `to_chronological`): [[B, L, D]] → [B · L, D]."""
        return reverse_sequences(groups[0], self._lengths_B).flatten(0, 1)

    def to_groups(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return per-row values as a single group, unchanged."""
        return (values,)

    def from_groups(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """Return the per-row values of the single group, unchanged."""
        return groups[0]


@torch.compiler.disable
def make_layout(*args: Any) -> TokenLayout:
    """Return TokenLayout(*args), created outside compiled code because its sizes change in every step."""
    return TokenLayout(*args)


class TokenLayout:
    """Positions of the tokens of a batch of HstuRank, and conversions between layouts.

    Tokens of users are packed: tokens of the context, [R · C, …], precede tokens of the history, [N · k, …],
    where N is the number of events. Candidates are ordered by request.

    Args:
        packed: Positions of the events in the history.
        rows: R, the number of requests.
        context: C, the number of context tokens of a request.
        per_event: k, the number of tokens of an event.
        requests: Requests of the candidates; None: each row is a request with one candidate.
    """

    def __init__(
        self, packed: PackedSequences, rows: int, context: int, per_event: int, requests: RequestInputs | None
    ):
        self._packed, self._shape, self._per_event = packed, (rows, context), per_event
        self._is_padded, self._places_N, self._most = isinstance(packed, PaddedSequences), None, 1
        if requests is not None:
            requests_N, self._most = requests.example_requests, requests.max_examples
            places_N, places_R = (torch.arange(n, device=requests_N.device) for n in (len(requests_N), rows))
            starts_R = torch.searchsorted(requests_N, places_R)
            self._places_N = requests_N * self._most + places_N - starts_R[requests_N]

    def group_users(self, users_NE: torch.Tensor) -> list[torch.Tensor]:
        """Return the tokens of each group of requests, context first, then events, oldest first, [b, C + kT, E].

        Padding is 0.
        """
        count = self._shape[0] * self._shape[1]
        context_NE, events_NE = users_NE.split([count, users_NE.shape[0] - count])
        groups = self._packed.to_chronological(events_NE.unflatten(0, (-1, self._per_event)).flatten(1))
        if self._is_padded:
            masks = self._packed.group_masks
            groups = [group_bTE * mask_bT.unsqueeze(2) for group_bTE, mask_bT in zip(groups, masks, strict=True)]
        events = [group_bTE.unflatten(2, (self._per_event, -1)).flatten(1, 2) for group_bTE in groups]
        if not self._shape[1]:
            return events
        context = self._packed.to_groups(context_NE.unflatten(0, self._shape))
        return [torch.cat(pair, dim=1) for pair in zip(context, events, strict=True)]

    def ungroup_users(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """Return packed tokens of users, [R · C + N · k, E] (the inverse of `group_users`)."""
        _, count = self._shape
        events = [group_bTE[:, count:].unflatten(1, (-1, self._per_event)).flatten(2) for group_bTE in groups]
        events_NE = self._packed.from_chronological(events).unflatten(1, (self._per_event, -1)).flatten(0, 1)
        if not count:
            return events_NE
        context_RCE = self._packed.from_groups([group_bTE[:, :count] for group_bTE in groups])
        return torch.cat([context_RCE.flatten(0, 1), events_NE])

    def group_candidates(self, candidates_NE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the candidates of each group of requests, [b, M, E], padded with 0 to M, the most of any request."""
        if self._places_N is not None:
            padded_NE = candidates_NE.new_zeros(self._shape[0] * self._most, candidates_NE.shape[1])
            candidates_NE = padded_NE.index_copy(0, self._places_N, candidates_NE)
        return self._packed.to_groups(candidates_NE.unflatten(0, (-1, self._most)))

    def ungroup_candidates(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """Return the candidates without padding, [candidates, E] (the inverse of `group_candidates`)."""
        candidates_NE = self._packed.from_groups(groups).flatten(0, 1)
        return candidates_NE if self._places_N is None else candidates_NE.index_select(0, self._places_N)


def reverse_sequences(values_BLx: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return each row with its first `lengths_B` entries reversed, [B, L] or [B, L, D]; later entries stay in place.

    The function converts from most recent first to oldest first and vice versa.
    """
    places_L = torch.arange(values_BLx.shape[1], device=values_BLx.device)
    turned_BL = lengths_B.unsqueeze(1) - 1 - places_L
    places_BL = torch.where(turned_BL >= 0, turned_BL, places_L)
    if values_BLx.dim() == 2:
        return values_BLx.gather(1, places_BL)
    return values_BLx.gather(1, places_BL.unsqueeze(2).expand_as(values_BLx))


def _choose_group_sizes(sorted_B: torch.Tensor, is_cuda: bool) -> list[int]:
    """Return the number of rows in each group of PackedSequences.

    Args:
        sorted_B: Lengths of the rows in descending order, int [B], on the host.
        is_cuda: True if the model is on a GPU, where all groups except the last have the same size.
    """
    count, first, sizes = len(sorted_B), 0, list[int]()
    most, ascending_B = -(-count // (GPU_GROUPS if is_cuda else CPU_GROUPS)), -sorted_B
    while first < count:
        longest, stop = int(sorted_B[first]), first + most
        if longest > MIN_SPLIT_LENGTH and not is_cuda:
            stop = min(stop, int(torch.searchsorted(ascending_B, -(longest // 2), right=True)))
        sizes.append(min(stop, count) - first)
        first += sizes[-1]
    return sizes


class _Take(torch.autograd.Function):
    """Selection of distinct rows, [M, D] → [N, D]. As no row is selected twice, backward accumulates no gradients."""

    @staticmethod
    def forward(ctx: Any, values_MD: torch.Tensor, places_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places_N)
        ctx.size = len(values_MD)
        return values_MD.index_select(0, places_N)

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _put(grad_ND, ctx.saved_tensors[0], ctx.size), None


class _Put(torch.autograd.Function):
    """Placement of rows at distinct positions, [N, D] → [M, D]; all other rows are 0."""

    @staticmethod
    def forward(ctx: Any, values_ND: torch.Tensor, places_N: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(places_N)
        return _put(values_ND, places_N, size)

    @staticmethod
    def backward(ctx: Any, grad_MD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad_MD.index_select(0, ctx.saved_tensors[0]), None, None


def _put(values_ND: torch.Tensor, places_N: torch.Tensor, size: int) -> torch.Tensor:
    return values_ND.new_zeros(size, values_ND.shape[1]).index_copy_(0, places_N, values_ND)
