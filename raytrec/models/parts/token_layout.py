"""Layouts of the tokens of HstuRank: context, history and candidates."""

from __future__ import annotations

from typing import Any

import torch

from raytrec.models.inputs import RequestInputs
from raytrec.models.parts.packed_sequences import PackedSequences, PaddedSequences


@torch.compiler.disable
def make_layout(*args: Any) -> TokenLayout:
    """Return a TokenLayout outside compiled code, because its sizes change in every step.

    For arguments, see TokenLayout.
    """
    return TokenLayout(*args)


class TokenLayout:
    """Positions of the tokens of a batch, and conversions between layouts.

    Tokens of users are packed: tokens of the context, [R · C, …], precede tokens of the history, [N · k, …],
    where N is the number of events.

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
        """Return the tokens of each group of rows in chronological order, [b, C + kT, E]; padding is 0."""
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
        """Return packed tokens of users, [R · C + N · k, E], the inverse of `group_users`."""
        _, count = self._shape
        events = [group_bTE[:, count:].unflatten(1, (-1, self._per_event)).flatten(2) for group_bTE in groups]
        events_NE = self._packed.from_chronological(events).unflatten(1, (self._per_event, -1)).flatten(0, 1)
        if not count:
            return events_NE
        context_RCE = self._packed.from_groups([group_bTE[:, :count] for group_bTE in groups])
        return torch.cat([context_RCE.flatten(0, 1), events_NE])

    def group_candidates(self, candidates_NE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the candidates by group of rows, [b, M, E], padded with 0 to the maximum number M per request."""
        if self._places_N is not None:
            padded_NE = candidates_NE.new_zeros(self._shape[0] * self._most, candidates_NE.shape[1])
            candidates_NE = padded_NE.index_copy(0, self._places_N, candidates_NE)
        return self._packed.to_groups(candidates_NE.unflatten(0, (-1, self._most)))

    def ungroup_candidates(self, groups: list[torch.Tensor]) -> torch.Tensor:
        """Return the candidates without padding, [candidates, E], the inverse of `group_candidates`."""
        candidates_NE = self._packed.from_groups(groups).flatten(0, 1)
        return candidates_NE if self._places_N is None else candidates_NE.index_select(0, self._places_N)
