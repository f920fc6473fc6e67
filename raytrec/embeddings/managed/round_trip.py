"""Values of several tables to the ranks that they belong to, and the answers back."""

from __future__ import annotations

import torch

from raytrec.embeddings.managed.peers import Peers


class RoundTrip:
    """One exchange there, and one back; both are collectives.

    Args:
        parts: of each table, values [n, ...], in the order of the ranks that they go to.
        sizes: of each table, how many go to each rank: int64 [ranks].

    Attributes:
        received: of each table, the values [m, ...] of all ranks, in their order.
    """

    def __init__(self, parts: list[torch.Tensor], sizes: list[torch.Tensor], peers: Peers):
        self._peers = peers
        sent_TW = torch.stack(sizes)
        one_each = [1] * peers.world
        received_WT = peers.exchange(sent_TW.T.contiguous(), one_each, one_each)
        self._sent, self._received = sent_TW.sum(0).tolist(), received_WT.sum(1).tolist()
        self._of_tables = [sent_TW.sum(1).tolist(), received_WT.sum(0).tolist()]
        self._by_rank, self._by_table = regrouped(sent_TW), regrouped(received_WT)
        arrived = peers.exchange(torch.cat(parts)[self._by_rank], self._sent, self._received)
        self.received = list(arrived[self._by_table].split(self._of_tables[1]))

    def back(self, answers: list[torch.Tensor]) -> list[torch.Tensor]:
        """The answers to what this rank has sent, of each table in the order of its values.

        Args:
            answers: of each table [m], in the order of `received`.
        """
        by_table = torch.cat(answers)
        by_rank = torch.empty_like(by_table)
        by_rank[self._by_table] = by_table
        arrived = self._peers.exchange(by_rank, self._received, self._sent)
        by_table = torch.empty_like(arrived)
        by_table[self._by_rank] = arrived
        return list(by_table.split(self._of_tables[0]))


def regrouped(sizes_AB: torch.Tensor) -> torch.Tensor:
    """Places of values that stand in groups a, and within them in groups b, in the order of b, and within
    them of a: int64 [Σ sizes].

    Args:
        sizes_AB: how many values each group has.
    """
    flat = sizes_AB.flatten()
    starts_BA = (flat.cumsum(0) - flat).view(sizes_AB.shape).T.flatten()
    sizes_BA = sizes_AB.T.flatten()
    total = int(flat.sum())
    shifts = starts_BA - (sizes_BA.cumsum(0) - sizes_BA)
    return shifts.repeat_interleave(sizes_BA, output_size=total) + torch.arange(total, device=flat.device)
