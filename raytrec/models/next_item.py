"""SASRec and HSTU: causal sequence models that predict the next item."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import log
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, layer_norm, scaled_dot_product_attention, silu

from raytrec.config.models.sequences import HstuSection, NextItemSection, SasrecSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import IDS, Sequence, encode_requests_once
from raytrec.models.parts.layers import Dropout
from raytrec.models.parts.packed_sequences import PackedSequences, pack_ids
from raytrec.models.parts.sampled_loss import Queries, combine_outputs
from raytrec.models.parts.shared_negatives import ItemBatch, build_losses

NUM_TIME_BUCKETS = 128  # number of buckets for times between items; the last bucket is unbounded
LOG_BUCKET_RATIO = log(1.35)  # the upper bound of a bucket is 1.35 × its lower bound


class NextItem(nn.Module, ABC):
    """Base class of causal sequence models in which the state after each item is a query for the next item.

    The logit is ⟨state after the most recent item of the history, item⟩ ÷ temperature. With `normalize`, both
    vectors are scaled to length 1. A row without a history has the state 0 and thus the logit 0 for every item.

    The model's own loss is a sum over the row's item and all items of the history except the oldest. Each
    of these items is predicted from the preceding items and compared with the row's negatives (with
    share_negatives, the negatives of the global batch). The sum is divided by max_length rather than by the
    length of the history, so all positions of all rows have the same weight.

    Args:
        schema: Schema with a history and an item feature that share a table of dim D; other features are not read.
        config: Names of the features, layer sizes and loss settings.
        outputs: Number of logits per row; with several outputs, each has its own query (sampled_loss.Queries).
        vectors: True to also return query and item vectors; the query is divided by the temperature.

    Raises:
        ConfigError: model.log_share is not a side feature of the negatives.
    """

    def __init__(self, schema: Schema, config: NextItemSection, outputs: int = 1, vectors: bool = False):
        super().__init__()
        self.config, self.outputs, self.vectors = config, outputs, vectors
        self.dim = schema.get_feature_dim(config.item)
        self.queries = Queries(outputs, vectors, self.dim)
        self.positions = nn.Parameter(torch.randn(config.max_length, self.dim) * 0.02)
        self.dropout = Dropout(config.dropout)
        self.loss, self.shared = build_losses(schema, config, config.item)

    @abstractmethod
    def states(self, history: Sequence, packed: PackedSequences) -> torch.Tensor:
        """Return the state after each of the N items in a batch's histories, float32 [N, D].

        A state depends only on the item and on older items of the same row. `packed` contains the positions of the
        N items in `history`.
        """

    def embed_positions(self, history: Sequence, packed: PackedSequences) -> torch.Tensor:
        """Return √D · e + p after dropout for each item's embedding e and learned position vector p, [N, D]."""
        places_N = packed.recency if self.config.positions == "recency" else packed.order
        x_ND = packed.pack(history.vectors) * self.dim**0.5
        return self.dropout(x_ND + embedding(places_N, self.positions))

    def query(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        """Return the query vectors of the histories, float32 [B, D], or [B, n, D] if there are n (see Queries)."""
        history = inputs[self.config.history]
        packed = pack_ids(history.present, history.lengths)
        return self._query(self.states(history, packed), packed)

    def item(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        """Return the item vectors, float32 [B, D]."""
        return self._normalize(inputs[self.config.item])

    def forward(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        """Return the logits, float32 [B]; with several outputs, `vectors` or an own loss, see combine_outputs.

        In training with share_negatives, this is a collective operation: every rank must call it.
        """
        history, item_BD = inputs[self.config.history], self.item(dense, inputs)
        packed = pack_ids(history.present, history.lengths)
        states_ND, own_B = self.states(history, packed), None
        if self.config.own_loss and self.training:
            own_B = self._own_loss(states_ND, packed, inputs)
        elif self.config.own_loss:
            own_B = item_BD.new_zeros(item_BD.shape[0], dtype=torch.float32)
        query = self._scale(encode_requests_once(lambda *_: self._query(states_ND, packed), dense, inputs))
        return combine_outputs(query, item_BD, self.outputs, self.vectors, own_B)

    @torch.compiler.disable
    def _own_loss(self, states_ND: torch.Tensor, packed: PackedSequences, inputs: dict) -> torch.Tensor:
        history = inputs[self.config.history]
        query_ND = self._scale(self._normalize(self.queries.own_loss_query(states_ND)))
        # The successor of each item; the most recent item is followed by the row's item.
        next_BLD = torch.cat([inputs[self.config.item].unsqueeze(1), history.vectors[:, :-1]], dim=1)
        next_ND = self._normalize(packed.pack(next_BLD))
        if self.shared is None:
            losses_B = self._sampled_losses(query_ND, next_ND, packed, inputs[self.config.negatives])
        else:
            losses_B = self._shared_losses(query_ND, next_ND, packed, inputs)
        return losses_B / self.config.max_length

    def _sampled_losses(
        self, query_ND: torch.Tensor, next_ND: torch.Tensor, packed: PackedSequences, drawn: Sequence
    ) -> torch.Tensor:
        """Return the sum of the losses of each row's queries against the row's own negatives, float32 [B]."""
        groups = zip(
            packed.to_chronological(query_ND),
            packed.to_chronological(next_ND),
            packed.to_groups(self._normalize(drawn.vectors)),
            packed.to_groups(drawn.present),
            packed.group_masks,
            strict=True,
        )
        losses = [
            (self.loss.loss_of_vectors(query_bTD, next_bTD, Sequence(vectors, present)) * mask_bT).sum(1)
            for query_bTD, next_bTD, vectors, present, mask_bT in groups
        ]
        return packed.from_groups(losses)

    def _shared_losses(
        self, query_ND: torch.Tensor, next_ND: torch.Tensor, packed: PackedSequences, inputs: dict
    ) -> torch.Tensor:
        """Return the sum of the losses of each row's queries against the global batch's negatives, float32 [B]."""
        ids, limit = inputs[IDS], inputs[self.config.history].present.numel()
        next_BL = torch.cat([ids[self.config.item], ids[self.config.history][:, :-1]], dim=1)
        items = ItemBatch(next_ND, packed.pack(next_BL.unsqueeze(2)).squeeze(1))
        negatives = self._normalize(inputs[self.config.negatives].vectors)
        return packed.sum_rows(self.shared(query_ND, items, self.shared.collect_negatives(negatives, inputs), limit))

    def _query(self, states_ND: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        return self._normalize(self.queries(packed.select_newest(states_ND)))

    def _scale(self, queries: torch.Tensor) -> torch.Tensor:
        return queries if self.config.temperature == 1 else queries / self.config.temperature

    def _normalize(self, vectors: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(vectors, dim=-1) if self.config.normalize else vectors


class SASRec(NextItem):
    """Causal transformer over a history (Kang and McAuley 2018, arXiv:1808.09781).

    Initially, x = √D · e + p for each item's embedding e and the learned vector p of its position (the factor √D is
    from the authors' code). Each block then computes, with layer norm N and dropout d (sections III.A to III.C):

        x ← x + d(attention(N x))         multi-head, causal
        x ← x + d(W₂ · d(relu(W₁ N x)))

    The state is N of the last block's x. The arguments and errors are those of NextItem. D must be divisible by the
    number of heads.
    """

    def __init__(self, schema: Schema, config: SasrecSection, outputs: int = 1, vectors: bool = False):
        super().__init__(schema, config, outputs, vectors)
        self.blocks = nn.ModuleList(Block(self.dim, config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(self.dim)

    def states(self, history: Sequence, packed: PackedSequences) -> torch.Tensor:
        """Return the state after each item, float32 [N, D] (see NextItem.states)."""
        x_ND = self.embed_positions(history, packed)
        for block in self.blocks:
            x_ND = block(x_ND, packed)
        return self.norm(x_ND)


class Block(nn.Module):
    """SASRec block: causal attention, then a two-layer MLP applied to each item, [N, D] → [N, D]."""

    def __init__(self, dim: int, config: SasrecSection):
        super().__init__()
        hidden = config.feedforward or dim
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention = Attention(dim, config.heads, config.attention_dropout)
        self.dropout = Dropout(config.dropout)
        layers = nn.Linear(dim, hidden), nn.ReLU(), Dropout(config.dropout), nn.Linear(hidden, dim)
        self.network = nn.Sequential(*layers)

    def forward(self, x_ND: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """Return the output of the block for the N items of all histories, [N, D]."""
        x_ND = x_ND + self.dropout(self.attention(self.norms[0](x_ND), packed))
        return x_ND + self.dropout(self.network(self.norms[1](x_ND)))


class Attention(nn.Module):
    """Causal multi-head self-attention within each sequence (Vaswani et al. 2017, arXiv:1706.03762).

    It maps the vectors of the N items of all sequences of a batch, [N, D], to vectors [N, D].

    Args:
        dim: Width D of the vectors.
        heads: Number of heads.
        dropout: Dropout probability of the attention weights in training.
    """

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.inputs, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x_ND: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """Return the attention output of each item, [N, D]."""
        return self.output(self._read(self.inputs(x_ND), packed))

    @torch.compiler.disable
    def _read(self, projected_NE: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """Return the attention-weighted mean of the values for each item: projections [N, 3 · D] → [N, D]."""
        rate, read = self.rate if self.training else 0.0, []
        for group_bTE in packed.to_chronological(projected_NE):
            heads = group_bTE.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [3, b, H, T, D ÷ H]
            query_bHTd, key_bHTd, value_bHTd = heads.unbind(0)
            read_bHTd = scaled_dot_product_attention(query_bHTd, key_bHTd, value_bHTd, dropout_p=rate, is_causal=True)
            read.append(read_bHTd.transpose(1, 2).flatten(2))
        return packed.from_chronological(read)


class HSTU(NextItem):
    """Hierarchical sequential transduction units over a history (Zhai et al. 2024, arXiv:2402.17152).

    x is initialized as in SASRec. With layer norm N (without weights) and dropout d, each head of a layer then
    computes (equations 1 to 3):

        u, v, q, k = silu(W₁ N x)
        a_ij = silu(⟨q_i, k_j⟩ + r_{i−j} + s_{bucket(t_i − t_j)}) ÷ max_length   for j ≤ i, else 0
        x ← x + W₂ · d(u ⊙ N(Σ_j a_ij v_j))

    r contains a learned bias for each distance i − j. With model.time, s contains a learned bias for each of 128
    logarithmic buckets of the time between two items. Weights do not add up to 1, so the number of relevant
    items matters as well. The state is the last layer's x. The arguments are those of NextItem. model.width must
    be divisible by the number of heads.

    Raises:
        ConfigError: As for NextItem, or model.time is not a side feature of the history.
    """

    def __init__(self, schema: Schema, config: HstuSection, outputs: int = 1, vectors: bool = False):
        super().__init__(schema, config, outputs, vectors)
        self.time = config.find_time_index(schema)
        self.layers = nn.ModuleList(Layer(self.dim, config) for _ in range(config.blocks))

    def states(self, history: Sequence, packed: PackedSequences) -> torch.Tensor:
        """Return the state after each item, float32 [N, D] (see NextItem.states)."""
        x_ND = self.embed_positions(history, packed)
        buckets = None if self.time is None else self._buckets(history, packed)
        for layer in self.layers:
            x_ND = layer(x_ND, packed, buckets)
        return x_ND

    @torch.compiler.disable
    def _buckets(self, history: Sequence, packed: PackedSequences) -> list[torch.Tensor]:
        """Return the bucket of the time between every two items of a row, int32 [b, T, T] for each group."""
        assert history.side_features is not None
        times_BL1 = history.side_features[:, :, self.time].unsqueeze(2)
        groups = [group_bT1.squeeze(2) for group_bT1 in packed.to_chronological(packed.pack(times_BL1))]
        return [choose_time_bucket(times_bT.unsqueeze(2) - times_bT.unsqueeze(1)) for times_bT in groups]


def choose_time_bucket(between: torch.Tensor) -> torch.Tensor:
    """Return the logarithmic bucket, 0 to 127, of each time difference: float [...] → int32 [...].

    Differences are in seconds or, for a numeric column, in the column's unit. Differences below 1 are in bucket 0.
    """
    return (between.clamp(min=1).log() / LOG_BUCKET_RATIO).int().clamp(max=NUM_TIME_BUCKETS - 1)


class _BucketLookup(torch.autograd.Function):
    """Lookup of one value per bucket on GPUs: values [K] and buckets, int32 [b, T, T] → [b, T, T].

    The backward pass of torch's embedding sorts all b · T² buckets. This class avoids the sort: for each row of
    T buckets, gradients are summed by bucket, and these sums are then added over all rows.
    """

    @staticmethod
    def forward(ctx: Any, values_K: torch.Tensor, buckets_bTT: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(buckets_bTT)
        ctx.count = len(values_K)
        return values_K.index_select(0, buckets_bTT.flatten()).view(buckets_bTT.shape)

    @staticmethod
    def backward(ctx: Any, grad_bTT: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows_RT = ctx.saved_tensors[0].flatten(0, 1).long()
        return grad_bTT.new_zeros(len(rows_RT), ctx.count).scatter_add_(1, rows_RT, grad_bTT.flatten(0, 1)).sum(0), None


class Layer(nn.Module):
    """Layer of HSTU, whose class docstring contains the equations: [N, D] → [N, D]."""

    def __init__(self, dim: int, config: HstuSection):
        super().__init__()
        self.heads, self.length, width = config.heads, config.max_length, config.width or dim
        self.inputs, self.output = nn.Linear(dim, 4 * width, bias=False), nn.Linear(width, dim)
        self.dropout = Dropout(config.dropout)
        self.distances = nn.Parameter(torch.randn(config.max_length) * 0.02)
        self.times = None if config.time is None else nn.Parameter(torch.randn(NUM_TIME_BUCKETS) * 0.02)
        nn.init.normal_(self.inputs.weight, std=0.02)
        nn.init.xavier_uniform_(self.output.weight)

    def forward(self, x_ND: torch.Tensor, packed: PackedSequences, buckets: list[torch.Tensor] | None) -> torch.Tensor:
        """Return the output of the layer for the N items of all histories, [N, D].

        `buckets` contains the result of HSTU._buckets; None if the model does not use times.
        """
        projected_NW = silu(self.inputs(layer_norm(x_ND, x_ND.shape[1:])))
        width = projected_NW.shape[1] // 4
        gate_NW, others_NW = projected_NW.split([width, 3 * width], dim=1)
        read_NW = self._read(others_NW, packed, buckets)
        read_NW = gate_NW * layer_norm(read_NW, read_NW.shape[1:])
        return x_ND + self.output(self.dropout(read_NW))

    @torch.compiler.disable
    def _read(
        self, others_NW: torch.Tensor, packed: PackedSequences, buckets: list[torch.Tensor] | None
    ) -> torch.Tensor:
        """Return Σ_j a_ij v_j for each item i, from its v, q and k: [N, 3 · width] → [N, width]."""
        groups = packed.to_chronological(others_NW)
        return packed.from_chronological([self._attend_group(g, buckets and buckets[i]) for i, g in enumerate(groups)])

    def _attend_group(self, group_bTW: torch.Tensor, buckets_bTT: torch.Tensor | None) -> torch.Tensor:
        """Return Σ_j a_ij v_j for the items of one group of rows: [b, T, 3 · width] → [b, T, width]."""
        rows, length, _ = group_bTW.shape
        by_head = group_bTW.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        value_nTd, query_nTd, key_nTd = by_head.flatten(1, 2).unbind(0)  # n = b · heads
        bias = self._bias(length, buckets_bTT).to(query_nTd.dtype)
        scores_nTT = torch.baddbmm(bias, query_nTd, key_nTd.transpose(1, 2))
        read_nTd = torch.bmm(silu(scores_nTT).tril_(), value_nTd) / self.length
        return read_nTd.unflatten(0, (rows, self.heads)).transpose(1, 2).flatten(2)

    def _bias(self, length: int, buckets_bTT: torch.Tensor | None) -> torch.Tensor:
        """Return r + s for each query and key, [1, T, T], or [b · heads, T, T] with times; undefined for later keys."""
        places_T = torch.arange(length, device=self.distances.device)
        back_TT = (places_T.unsqueeze(1) - places_T).clamp(min=0)
        bias_1TT = self.distances[back_TT].unsqueeze(0)
        if self.times is None or buckets_bTT is None:
            return bias_1TT
        if buckets_bTT.is_cuda:
            of_times_bTT = _BucketLookup.apply(self.times, buckets_bTT)
        else:
            of_times_bTT = embedding(buckets_bTT, self.times.unsqueeze(1)).squeeze(3)
        return (bias_1TT + of_times_bTT).repeat_interleave(self.heads, 0)
