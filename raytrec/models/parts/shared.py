"""Negatives that all rows of the global batch share.

Each rank has looked up those of its rows. Where they are fewer than the queries, they go to all ranks. Else
queries do: each rank holds all of them against its own negatives, and what these add to the losses goes
back to the queries' ranks. So no rank has all items of a table that no rank has room for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raytrec.common.collectives import Peers
from raytrec.config.models.retrieval import SampledSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import IDS, Sequence
from raytrec.models.parts.sampled import ABSENT, SampledLoss

# Scores that are there at once, of some of the queries. Of more than these, backward computes each again.
SCORES_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 27}


class ItemBatch(NamedTuple):
    """Some items.

    Attributes:
        vectors: float [N, D]. ids: int64 [N]; -1: there is none.
        log_share: float32 [N], subtracted from their scores; None: nothing.
    """

    vectors: torch.Tensor
    ids: torch.Tensor
    log_share: torch.Tensor | None = None


class SharedNegatives(nn.Module):
    """The loss of queries, each with its own item, against the negatives of the global batch.

    A negative that is the query's own item does not count. So where negatives are all items, softmax is the
    cross-entropy of the softmax over all of them.

    Args:
        loss: what is learned.
        negatives: their feature. log_share: which of its side features is subtracted from scores; None: none.

    Attributes:
        peers: the ranks that have the global batch; at first this process alone (see `join_ranks`).
    """

    def __init__(self, loss: SampledLoss, negatives: str = "", log_share: int | None = None):
        super().__init__()
        self.loss, self.peers = loss, Peers(alone=True)
        self.negatives, self.log_share = negatives, log_share

    @classmethod
    def of(cls, schema: Schema, config: SampledSection, loss: SampledLoss) -> SharedNegatives | None:
        """The configuration's; None: rows do not share negatives."""
        if not config.share_negatives:
            return None
        return cls(loss, config.negatives, config.log_share_place(schema))

    def drawn(self, vectors: torch.Tensor, inputs: dict[str, Any]) -> ItemBatch:
        """The negatives of this rank's rows, of their vectors: float [..., D]."""
        ids_K, share_K = inputs[IDS][self.negatives].flatten(), None
        if self.log_share is not None:
            share_K = inputs[self.negatives].side_features[:, :, self.log_share].flatten().float()
        return ItemBatch(vectors.reshape(-1, vectors.shape[-1]), ids_K, share_K)

    @torch.compiler.disable
    def forward(
        self,
        query_ND: torch.Tensor,
        own: ItemBatch,
        negatives: ItemBatch,
        most: int,
        bias_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Float32 [N]; a collective.

        Args:
            query_ND: float [N, D]; a score is the dot product with an item.
            own: each query's item, [N, D].
            negatives: of this rank's rows, [K, D], as many on every rank.
            most: that N cannot exceed on any rank; the same on all of them.
            bias_N: added to all scores of a query; see SampledLoss.bias_of.
        """
        own_N = (query_ND * own.vectors).sum(1).float()
        bias_N = torch.zeros_like(own_N) if bias_N is None else self.loss.bias_of(bias_N)
        asked_NE = torch.cat([query_ND.float(), (own_N + bias_N).unsqueeze(1), bias_N.unsqueeze(1)], 1)
        if self.peers.world == 1:
            added_N, count_N = self._held_against(asked_NE, own.ids, negatives).unbind(1)
        elif self.peers.world * len(negatives.ids) <= most:
            vectors = _Gather.apply(negatives.vectors, self.peers)
            others = (each if each is None else self.peers.stack(each).flatten() for each in negatives[1:])
            everyone = ItemBatch(vectors, *others)
            added_N, count_N = self._held_against(asked_NE, own.ids, everyone).unbind(1)
        else:
            added_N, count_N = self._elsewhere(asked_NE, own.ids, negatives)
        return self.loss.finish(own_N + bias_N, added_N, count_N)

    def _elsewhere(
        self, asked_NE: torch.Tensor, ids_N: torch.Tensor, negatives: ItemBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the negatives of all ranks add to the losses of this rank's queries, and how many they are:
        float32 [N] each. The host learns how many queries others have."""
        count = len(ids_N)
        longest = int(self.peers.max(torch.tensor([count], device=ids_N.device)))
        padding = longest - count
        asked_ME = nn.functional.pad(asked_NE, (0, 0, 0, padding))
        ids_M = nn.functional.pad(ids_N, (0, padding), value=-1)
        of_all = _Gather.apply(asked_ME, self.peers), self.peers.stack(ids_M).flatten()
        here = self._held_against(*of_all, negatives)
        parts_WN2 = _Transpose.apply(here.view(self.peers.world, longest, 2), self.peers)[:, :count]
        return self.loss.join(parts_WN2[..., 0]), parts_WN2[..., 1].sum(0)

    def _held_against(
        self, asked_NE: torch.Tensor, ids_N: torch.Tensor, negatives: ItemBatch
    ) -> torch.Tensor:
        """What negatives add to the loss of each query, and how many they are: float32 [N, 2]."""
        cells, most = len(ids_N) * len(negatives.ids), SCORES_AT_ONCE[asked_NE.device.type]
        if cells <= most:
            return self._block(asked_NE, ids_N, *negatives)
        size = max(1, most // len(negatives.ids))
        blocks = zip(asked_NE.split(size), ids_N.split(size), strict=True)
        return torch.cat([checkpoint(self._block, *b, *negatives, use_reentrant=False) for b in blocks])

    def _block(
        self,
        asked_nE: torch.Tensor,
        ids_n: torch.Tensor,
        vectors_KD: torch.Tensor,
        ids_K: torch.Tensor,
        log_share_K: torch.Tensor | None,
    ) -> torch.Tensor:
        query_nD, own_n, bias_n = asked_nE[:, :-2], asked_nE[:, -2], asked_nE[:, -1:]
        absent_nK = (ids_K < 0) | (ids_K == ids_n.unsqueeze(1))
        scores_nK = (query_nD.to(vectors_KD.dtype) @ vectors_KD.T).float() + bias_n
        if log_share_K is not None:
            scores_nK = scores_nK - log_share_K
        added_n = self.loss.reduce(own_n, scores_nK.masked_fill(absent_nK, ABSENT))
        return torch.stack([added_n, (~absent_nK).sum(1).float()], 1)


def losses_of_pairs(
    loss: SampledLoss,
    shared: SharedNegatives | None,
    query_BD: torch.Tensor,
    item_BD: torch.Tensor,
    item: str,
    drawn: Sequence,
    inputs: dict[str, Any],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the loss of each row's query and item: float32 [B]; a collective with shared negatives.

    Args:
        shared: Negatives of the global batch; None if each row has its own.
        item: Feature of the items.
        drawn: Negatives of the rows, vectors [B, K, D].
        inputs: Inputs of the model.
        bias: [B, 1] or [1, 1], added to all scores of a row; see SampledLoss.bias_of.
    """
    if shared is None:
        return loss.of_vectors(query_BD.unsqueeze(1), item_BD.unsqueeze(1), drawn, bias).squeeze(1)
    own = ItemBatch(item_BD, inputs[IDS][item].squeeze(1))
    bias_B = None if bias is None else bias.expand(len(item_BD), 1).squeeze(1)
    return shared(query_BD, own, shared.drawn(drawn.vectors, inputs), len(item_BD), bias_B)


def join_ranks(model: nn.Module, peers: Peers) -> None:
    """Has a model's rows share their negatives with those of other ranks."""
    for module in model.modules():
        if isinstance(module, SharedNegatives):
            module.peers = peers


class _Gather(torch.autograd.Function):
    """[N, ...] of one shape on all ranks → [ranks · N, ...]; gradients are added up."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return peers.stack(values).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.peers.sum_own(grad.unflatten(0, (ctx.peers.world, -1))), None


class _Transpose(torch.autograd.Function):
    """[ranks, ...], a part for each rank → [ranks, ...], each rank's part for this one."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return peers.transpose(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.peers.transpose(grad.contiguous()), None
