"""Losses against negatives (drawn items) that all rows of the global batch share.

Each rank looks up the negatives of its rows. If the negatives of all ranks do not outnumber the maximum number
of queries of one rank, the negatives are sent to all ranks. Otherwise, the queries are sent to all ranks. Each
rank then compares all queries with its negatives, and sends the negatives' contributions to the losses back to the
ranks of the queries. Thus no rank needs memory for all items of a large table.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from raytrec.common.collectives import Peers, get_collective_device
from raytrec.config.models.retrieval import SampledSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import IDS, Sequence
from raytrec.models.parts.sampled_loss import ABSENT, SampledLoss

# Maximum number of scores in memory. Above it, queries are split into blocks, and backward recomputes the scores.
MAX_SCORES_PER_BLOCK = {"cpu": 1 << 24, "cuda": 1 << 27}
# A score takes 20 bytes (scores, bias, mask, masked copy, gradient). A block takes up to a quarter of the free memory.
FREE_BYTES_PER_SCORE = 80


class ItemBatch(NamedTuple):
    """Vectors and ids of N items.

    Attributes:
        vectors: Item vectors, float [N, D].
        ids: Item ids, int64 [N]; -1 for a missing item.
        log_share: ln(sampling probability ÷ uniform probability) of each item, which is subtracted from the
            item's scores; float32 [N]. None: nothing is subtracted.
    """

    vectors: torch.Tensor
    ids: torch.Tensor
    log_share: torch.Tensor | None = None


class SharedNegatives(nn.Module):
    """Loss of queries and their items against the negatives of all rows in the global batch.

    A negative that equals the query's own item is ignored. If the negatives are all items, the softmax loss
    is thus the cross-entropy over all items.

    Args:
        loss: Loss of a single query.
        negatives: Feature that contains the negatives.
        log_share: Index of the side feature of `negatives` that contains ItemBatch.log_share, which is subtracted from
            their scores; None: nothing is subtracted.

    Attributes:
        peers: Ranks that share the global batch; initially this process alone (see
            `share_negatives_across_ranks`).
    """

    def __init__(self, loss: SampledLoss, negatives: str = "", log_share: int | None = None):
        super().__init__()
        self.loss, self.peers = loss, Peers(alone=True)
        self.negatives, self.log_share = negatives, log_share
        self._max_scores: int | None = None  # chosen in the first step, when the tables are in memory

    def collect_negatives(self, vectors: torch.Tensor, inputs: dict[str, Any]) -> ItemBatch:
        """Return the negatives of this rank's rows as one ItemBatch.

        Args:
            vectors: Vectors of the negatives, float [..., D].
            inputs: Inputs of the model, from which the ids and, if configured, log_share are read.
        """
        ids_K, share_K = inputs[IDS][self.negatives].flatten(), None
        if self.log_share is not None:
            share_K = inputs[self.negatives].side_features[:, :, self.log_share].flatten().float()
        return ItemBatch(vectors.reshape(-1, vectors.shape[-1]), ids_K, share_K)

    @torch.compiler.disable
    def forward(
        self,
        query_ND: torch.Tensor,
        query_items: ItemBatch,
        negatives: ItemBatch,
        max_queries: int,
        bias_N: torch.Tensor | None = None,
        is_max_reached: bool = False,
    ) -> torch.Tensor:
        """Return the loss of each query, float32 [N].

        This is a collective operation: every rank must call it.

        Args:
            query_ND: Query vectors, float [N, D]; a score is the dot product with an item's vector.
            query_items: Item of each query, with vectors [N, D]; its `log_share` is ignored.
            negatives: Negatives of this rank's rows, with vectors [K, D]; K must be equal on all ranks.
            max_queries: Upper bound on N over all ranks; must be equal on all ranks.
            bias_N: Bias added to all scores of each query, float [N] (SampledLoss.remove_canceling_bias); None: 0.
            is_max_reached: True if at least one rank has `max_queries` queries, which saves an exchange of the
                numbers of queries; must be equal on all ranks.
        """
        own_N = (query_ND * query_items.vectors).sum(1).float()
        bias_N = torch.zeros_like(own_N) if bias_N is None else self.loss.remove_canceling_bias(bias_N)
        queries_NE = torch.cat([query_ND.float(), (own_N + bias_N).unsqueeze(1), bias_N.unsqueeze(1)], 1)
        if self.peers.world == 1:
            added_N, count_N = self._compare_with_negatives(queries_NE, query_items.ids, negatives).unbind(1)
        elif self.peers.world * len(negatives.ids) <= max_queries:
            vectors = _Gather.apply(negatives.vectors, self.peers)
            others = (each if each is None else self.peers.stack(each).flatten() for each in negatives[1:])
            gathered = ItemBatch(vectors, *others)
            added_N, count_N = self._compare_with_negatives(queries_NE, query_items.ids, gathered).unbind(1)
        else:
            # Numbers of queries are exchanged in host memory, because the host would wait for a value on the GPU.
            longest = max_queries if is_max_reached else int(self._host_peers.max_number(len(query_ND)))
            added_N, count_N = self._compare_on_all_ranks(queries_NE, query_items.ids, negatives, longest)
        return self.loss.finish(own_N + bias_N, added_N, count_N)

    @cached_property
    def _host_peers(self) -> Peers:
        """Return the ranks as Peers that exchange host tensors. The first access is a collective operation."""
        is_host = get_collective_device().type == "cpu"
        return self.peers if is_host else Peers(group=dist.new_group(backend="gloo"))

    def _compare_on_all_ranks(
        self, queries_NE: torch.Tensor, ids_N: torch.Tensor, negatives: ItemBatch, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contribution and the number of all ranks' negatives for each query, float32 [N] each.

        Queries are sent to all ranks, padded to `longest`, the largest number of queries on any rank.
        """
        count = len(ids_N)
        padding = longest - count
        queries_ME = nn.functional.pad(queries_NE, (0, 0, 0, padding))
        ids_M = nn.functional.pad(ids_N, (0, padding), value=-1)
        gathered = _Gather.apply(queries_ME, self.peers), self.peers.stack(ids_M).flatten()
        local = self._compare_with_negatives(*gathered, negatives)
        parts_WN2 = _Transpose.apply(local.view(self.peers.world, longest, 2), self.peers)[:, :count]
        return self.loss.join(parts_WN2[..., 0]), parts_WN2[..., 1].sum(0)

    def _compare_with_negatives(
        self, queries_NE: torch.Tensor, ids_N: torch.Tensor, negatives: ItemBatch
    ) -> torch.Tensor:
        """Return (contribution of the negatives, number of negatives) for each query, float32 [N, 2]."""
        if self._max_scores is None:
            self._max_scores = choose_block_scores(queries_NE.device)
        if len(ids_N) * len(negatives.ids) <= self._max_scores:
            return self._block(queries_NE, ids_N, *negatives)
        size = max(1, self._max_scores // len(negatives.ids))
        blocks = zip(queries_NE.split(size), ids_N.split(size), strict=True)
        return torch.cat([checkpoint(self._block, *b, *negatives, use_reentrant=False) for b in blocks])

    def _block(
        self,
        queries_nE: torch.Tensor,
        ids_n: torch.Tensor,
        vectors_KD: torch.Tensor,
        ids_K: torch.Tensor,
        log_share_K: torch.Tensor | None,
    ) -> torch.Tensor:
        query_nD, own_n, bias_n = queries_nE[:, :-2], queries_nE[:, -2], queries_nE[:, -1:]
        absent_nK = (ids_K < 0) | (ids_K == ids_n.unsqueeze(1))
        scores_nK = (query_nD.to(vectors_KD.dtype) @ vectors_KD.T).float() + bias_n
        if log_share_K is not None:
            scores_nK = scores_nK - log_share_K
        added_n = self.loss.reduce(own_n, scores_nK.masked_fill(absent_nK, ABSENT))
        return torch.stack([added_n, (~absent_nK).sum(1).float()], 1)


def build_losses(schema: Schema, config: SampledSection, item: str) -> tuple[SampledLoss, SharedNegatives | None]:
    """Return (loss of a query against its negatives, loss against shared negatives or None without share_negatives).

    Args:
        schema: Schema of the data.
        config: Section of the model.
        item: Feature that contains the items, whose table determines the number of items.

    Raises:
        ConfigError: model.log_share is not a side feature of the negatives.
    """
    loss = SampledLoss(config.loss, config.gbce, schema.tables[schema.sparse[item].table].rows)
    if not config.share_negatives:
        return loss, None
    return loss, SharedNegatives(loss, config.negatives, config.find_log_share_index(schema))


def compute_pair_losses(
    loss: SampledLoss,
    shared: SharedNegatives | None,
    query_BD: torch.Tensor,
    item_BD: torch.Tensor,
    item: str,
    drawn: Sequence,
    inputs: dict[str, Any],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the loss of each row's query and item against negatives, float32 [B].

    If negatives are shared, this is a collective operation, which every rank must call.

    Args:
        loss: Loss of a query against its negatives, used if `shared` is None.
        shared: Loss against the negatives of the global batch; None: a row is compared only with its own negatives.
        query_BD: Query vectors, float [B, D].
        item_BD: Item vectors, float [B, D].
        item: Feature that contains the items.
        drawn: Negatives of each row, with vectors [B, K, D].
        inputs: Inputs of the model.
        bias: Bias added to all scores of a row, [B, 1] or [1, 1] (SampledLoss.remove_canceling_bias); None: 0.
    """
    if shared is None:
        return loss.loss_of_vectors(query_BD.unsqueeze(1), item_BD.unsqueeze(1), drawn, bias).squeeze(1)
    items = ItemBatch(item_BD, inputs[IDS][item].squeeze(1))
    bias_B = None if bias is None else bias.expand(len(item_BD), 1).squeeze(1)
    negatives = shared.collect_negatives(drawn.vectors, inputs)
    return shared(query_BD, items, negatives, len(item_BD), bias_B, is_max_reached=True)  # ranks pad to equal sizes


def choose_block_scores(device: torch.device) -> int:
    """Return the maximum number of scores in memory: a constant per device type, or less if GPU memory is scarce."""
    scores = MAX_SCORES_PER_BLOCK[device.type]
    if device.type == "cuda":
        scores = min(scores, torch.cuda.mem_get_info(device)[0] // FREE_BYTES_PER_SCORE)
    return max(1, scores)


def share_negatives_across_ranks(model: nn.Module, peers: Peers) -> None:
    """Make all SharedNegatives of a model compare queries with the negatives of all ranks in `peers`."""
    for module in model.modules():
        if isinstance(module, SharedNegatives):
            module.peers = peers


class _Gather(torch.autograd.Function):
    """All-gather with gradients: [N, ...] on each rank → [ranks · N, ...]; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return peers.stack(values).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.peers.reduce_scatter_sum(grad.unflatten(0, (ctx.peers.world, -1))), None


class _Transpose(torch.autograd.Function):
    """All-to-all with gradients: [ranks, ...], one part for each rank → [ranks, ...], one part from each rank."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return peers.transpose(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.peers.transpose(grad.contiguous()), None
