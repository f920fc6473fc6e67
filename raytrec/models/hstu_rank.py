"""DLRM-HSTU: ranking of a request's candidates within the sequence of the user's items and actions."""

from __future__ import annotations

from collections.abc import Mapping
from math import pi

import torch
from torch import nn
from torch.nn.functional import embedding, linear, silu

from raytrec.config.models.multitask import HstuRankSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import REQUESTS
from raytrec.models.multitask import TaskTowers
from raytrec.models.next_item import NUM_TIME_BUCKETS, choose_time_bucket
from raytrec.models.parts.layers import ConcatInputs, Dropout, mlp
from raytrec.models.parts.packed_sequences import PackedSequences, TokenLayout, make_layout, pack_ids

PERIODS_S = (86_400.0, 604_800.0)  # day and week
NORM_EPS = 1e-6


class HstuRank(nn.Module):
    """Hierarchical sequential transduction units over context, history and candidates, with a tower for each task.

    Zhai et al. 2024, arXiv:2402.17152. The layers are the same as in the authors' DLRM-HSTU and MLPerf's DLRMv4.
    A request has a history of events, each with one id in every sequence. Its tokens are, in this order:

        context     W_f e + b_f for each feature f of the request, and one token for all its dense columns
        history     E_item(items) + p + s for each event, oldest first. With actions a, E_action(a) + p' + s
                    follows or, without `interleave`, E_action(a) is added
        candidates  E_item(items) + c

    E_item and E_action are MLPs. E_item reads the vectors of an event in all sequences, or of a candidate in their
    target features. p, p', s and c are learned vectors. p and p' depend on the number of more recent events, and s on
    the time from the event to the request (without `request_time`, to the newest event), in 128 logarithmic buckets;
    without `time`, s is omitted. A token attends to itself and to earlier tokens, but not to other candidates. A
    candidate's score is thus independent of the other candidates, and a request's other tokens are computed once for
    all of its candidates.

    Another MLP encodes all features and dense columns of the candidate as a vector. The towers read the
    elementwise product of this vector and the layer norm of the last layer's output for the candidate. With
    `request_time`, the output is first combined with the request's time of day and weekday.

    Args:
        schema: Schema with at least one sequence; each sequence has the dim of its target.
        config: Names of the columns, layer sizes and dropout.
        tasks: Task → number of its logit columns.

    Raises:
        ConfigError: The schema has no sequence, a target does not exist or is ambiguous, or a pattern in
            model.candidate matches nothing.
    """

    def __init__(self, schema: Schema, config: HstuRankSection, tasks: Mapping[str, int]):
        super().__init__()
        self.targets, self.history, self.tasks = config.targets(schema), config.history(schema), len(tasks)
        members, dim = config.request_members(schema), config.dim
        columns = [i for i, name in enumerate(schema.dense) if name in members and name != config.request_time]
        self.register_buffer("columns", torch.tensor(columns, dtype=torch.long), persistent=False)
        self.context = [f for f in schema.sparse if f in members and f not in self.targets]
        widths = [schema.get_feature_dim(f) for f in self.context] + [len(columns)] * bool(columns)
        self.context_layers = nn.ModuleList(nn.Linear(width, dim) for width in widths)
        self.item_encoder = make_encoder(sum(schema.get_feature_dim(f) for f in self.targets), config)
        self.actions = Actions(schema, config) if config.actions else None
        self.interleave = config.interleave and self.actions is not None
        self.positions = nn.Parameter(torch.randn(config.max_length, (1 + self.interleave) * dim) * 0.02)
        self.candidate = nn.Parameter(torch.randn(dim) * 0.02)
        self.time, self.times = None, None
        if config.time is not None:
            self.time = schema.sparse[self.history].side_features.index(config.time)
            self.times = nn.Parameter(torch.randn(NUM_TIME_BUCKETS, dim) * 0.02)
        self.request_time = None if config.request_time is None else schema.dense.index(config.request_time)
        self.input_dropout = Dropout(config.input_dropout)
        tokens = len(widths) + (1 + self.interleave) * config.max_length + 1
        layers = (TransducerLayer(config, tokens, i == config.blocks - 1) for i in range(config.blocks))
        self.layers = nn.ModuleList(layers)
        self.register_buffer("periods_s", torch.tensor(PERIODS_S, dtype=torch.float64), persistent=False)
        self.clock = None if self.request_time is None else nn.Linear(dim + 2 * len(PERIODS_S), dim)
        self.norm = nn.LayerNorm(dim)
        self.candidate_inputs = ConcatInputs(schema, config.candidate_members(schema))
        self.candidate_encoder = make_encoder(self.candidate_inputs.width, config)
        self.towers = TaskTowers(dim, config.tower_mlp, tasks, config.dropout)

    def forward(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        """Return the logits of all tasks in order, float32 [B, columns]; [B] if there is a single column."""
        requests, history = inputs.get(REQUESTS), inputs[self.history]
        dense_of_requests = dense if requests is None else requests.dense
        packed = pack_ids(history.present, history.lengths)
        context_ND = self._embed_context(dense_of_requests, inputs)
        events_ND = self._embed_events(dense_of_requests, inputs, packed)
        layout = make_layout(packed, history.present.shape[0], len(self.context_layers), 1 + self.interleave, requests)
        users_ND = self.input_dropout(torch.cat([*context_ND, events_ND]))
        items_NE = torch.cat([inputs[feature] for feature in self.targets.values()], dim=1)
        candidates_ND = self.item_encoder(items_NE) + self.candidate
        for layer in self.layers:
            users_ND, candidates_ND = layer(users_ND, candidates_ND, layout)
        states_ND = self.norm(self._add_clock(candidates_ND, dense))
        states_ND = states_ND * self.candidate_encoder(self.candidate_inputs(dense, inputs))
        return self.towers([states_ND] * self.tasks)

    def _embed_context(self, dense: torch.Tensor, inputs: dict) -> list[torch.Tensor]:
        """Return [tokens of the contexts of all R requests, float32 [R · C, D]], or [] without a context."""
        values = [inputs[feature] for feature in self.context]
        values += [dense.index_select(1, self.columns)] * bool(len(self.columns))
        tokens = [layer(value) for layer, value in zip(self.context_layers, values, strict=True)]
        return [torch.stack(tokens, dim=1).flatten(0, 1)] if tokens else []

    def _embed_events(self, dense: torch.Tensor, inputs: dict, packed: PackedSequences) -> torch.Tensor:
        """Return the tokens of all histories, float32 [events · tokens per event, D], in the order of `packed`."""
        history = inputs[self.history]
        items_NE = torch.cat([packed.pack(inputs[feature].vectors) for feature in self.targets], dim=1)
        tokens_NkD = self.item_encoder(items_NE).unsqueeze(1)
        if self.actions is not None:
            actions_N1D = self.actions(packed.pack(history.side_features)).unsqueeze(1)
            tokens_NkD = torch.cat([tokens_NkD, actions_N1D], 1) if self.interleave else tokens_NkD + actions_N1D
        tokens_NkD = tokens_NkD + embedding(packed.recency, self.positions).unflatten(1, tokens_NkD.shape[1:])
        if self.times is not None:
            times_RL = history.side_features[:, :, self.time]
            now_R1 = times_RL[:, :1] if self.request_time is None else dense[:, self.request_time, None].double()
            buckets_N1 = packed.pack(choose_time_bucket(now_R1 - times_RL).unsqueeze(2))
            tokens_NkD = tokens_NkD + embedding(buckets_N1, self.times)
        return tokens_NkD.flatten(0, 1)

    def _add_clock(self, states_ND: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Return the states of candidates, combined with the time of day and weekday if `request_time` is set."""
        if self.clock is None:
            return states_ND
        turns_N2 = dense[:, self.request_time, None].double() / self.periods_s
        angles_N2 = ((turns_N2 - turns_N2.floor()) * 2 * pi).float()
        return self.clock(torch.cat([states_ND, angles_N2.cos(), angles_N2.sin()], dim=1))


class SwishNorm(nn.Module):
    """Activation x ⊙ σ(LN(x)), where LN is layer norm: [N, width] → [N, width]."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x_NW: torch.Tensor) -> torch.Tensor:
        """Return x ⊙ σ(LN(x)), [N, width]."""
        return x_NW * self.norm(x_NW).sigmoid()


def make_encoder(inputs: int, config: HstuRankSection) -> nn.Sequential:
    """Return an MLP with layer norm that maps vectors to tokens of width model.dim: [N, inputs] → [N, D]."""
    hidden = mlp([inputs, config.encoder], activation=SwishNorm)
    return nn.Sequential(*hidden, nn.Linear(config.encoder, config.dim), nn.LayerNorm(config.dim))


class Actions(nn.Module):
    """Encoder of the actions of events: side features, float64 [N, n] → float32 [N, D].

    An action is one bit of a bit mask, or a threshold that a number reaches (`model.actions`, which must not be empty).
    The input of the MLP is 1 for each action of the event and 0 for all other actions. A bit mask below 0 has no
    actions. The weights of an action in the first layer act as its embedding.
    """

    def __init__(self, schema: Schema, config: HstuRankSection):
        super().__init__()
        side_features, self.columns = schema.sparse[config.history(schema)].side_features, []
        for column, actions in config.actions.items():
            is_mask = isinstance(actions, int)
            values = [2**bit for bit in range(actions)] if isinstance(actions, int) else actions
            values_A = torch.tensor(values, dtype=torch.int64 if is_mask else torch.float64)
            self.register_buffer(f"values_{len(self.columns)}", values_A, persistent=False)
            self.columns.append((side_features.index(column), is_mask))
        self.encoder = make_encoder(sum(len(values_A) for values_A in self.buffers()), config)

    def forward(self, side_features_Nn: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the actions, float32 [N, D]."""
        parts = []
        for (place, is_mask), values_A in zip(self.columns, self.buffers(), strict=True):
            value_N1 = side_features_Nn[:, place, None]
            parts.append(
                torch.bitwise_and(value_N1.long().clamp(min=0), values_A) > 0 if is_mask else value_N1 >= values_A
            )
        return self.encoder(torch.cat(parts, dim=1).float())


class TransducerLayer(nn.Module):
    """Hierarchical sequential transduction unit for tokens of users and of candidates.

    With layer norms N and N′, dropout d and learned W₁, W₂ and b, each head computes:

        k, v, q, u = W₁ N x + b
        a_ij = silu(⟨q_i, k_j⟩ ÷ √width of a head) ÷ `tokens`   if token i attends to j, else 0
        r_i = Σ_j a_ij v_j
        x ← x + W₂ d(silu(u), r, silu(u) ⊙ N′ r)

    Tokens of users are the tokens of the context and the history. The last layer returns these tokens unchanged,
    because the model reads only the candidates' tokens of the last layer.

    Args:
        config: Dim, heads, width and dropout.
        tokens: Maximum number of tokens of a request with one candidate.
        last: True for the last layer.
    """

    def __init__(self, config: HstuRankSection, tokens: int, last: bool):
        super().__init__()
        self.heads, self.width, self.tokens, self.last = config.heads, config.width or config.dim, tokens, last
        self.scale = (self.width / self.heads) ** -0.5  # factor of the dot products of queries and keys
        self.norm, self.read_norm = nn.LayerNorm(config.dim, NORM_EPS), nn.LayerNorm(self.width, NORM_EPS)
        self.inputs = nn.Linear(config.dim, 4 * self.width)
        self.output = nn.Linear(3 * self.width, config.dim, bias=False)
        self.dropout = Dropout(config.dropout)
        for layer in (self.inputs, self.output):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(self.inputs.bias)

    def forward(
        self, users_ND: torch.Tensor, candidates_ND: torch.Tensor, layout: TokenLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of users and of candidates after this layer, float [N, D] each."""
        parts, others = (2 if self.last else 4) * self.width, 3 * self.width
        users_NE = linear(self.norm(users_ND), self.inputs.weight[:parts], self.inputs.bias[:parts])
        candidates_NE = self.inputs(self.norm(candidates_ND))
        reads = self._attend(users_NE[:, :others], candidates_NE[:, :others], layout)
        candidates_ND = candidates_ND + self._combine(candidates_NE[:, others:], reads[-1])
        return users_ND if self.last else users_ND + self._combine(users_NE[:, others:], reads[0]), candidates_ND

    def _combine(self, gate_NW: torch.Tensor, read_NW: torch.Tensor) -> torch.Tensor:
        gate_NW = silu(gate_NW)
        return self.output(self.dropout(torch.cat([gate_NW, read_NW, gate_NW * self.read_norm(read_NW)], dim=1)))

    @torch.compiler.disable
    def _attend(self, users_NE: torch.Tensor, candidates_NE: torch.Tensor, layout: TokenLayout) -> list[torch.Tensor]:
        """Return r for the tokens of users (except in the last layer) and of candidates, [N, width] each."""
        of_users, of_candidates = [], []
        key_NHd, value_NHd, query_NHd = self._split_heads(candidates_NE)
        groups = layout.group_users(users_NE), layout.group_candidates(query_NHd.flatten(1))
        for users_bTE, queries_bMW in zip(*groups, strict=True):
            key_bTHd, value_bTHd, *query = self._split_heads(users_bTE)
            if query:
                of_users.append(self._read(query[0], key_bTHd, value_bTHd, is_causal=True))
            (queries_bMHd,) = self._split_heads(queries_bMW)
            of_candidates.append(self._read(queries_bMHd, key_bTHd, value_bTHd))
        own_NH1 = silu((query_NHd * key_NHd).sum(2, keepdim=True) * self.scale) / self.tokens
        read_NW = layout.ungroup_candidates(of_candidates) + (own_NH1 * value_NHd).flatten(1)
        return [layout.ungroup_users(of_users), read_NW] if of_users else [read_NW]

    def _split_heads(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split n concatenated projections into n tensors by head: [..., n · width] → [..., heads, width ÷ heads]."""
        return values.unflatten(-1, (-1, self.heads, self.width // self.heads)).unbind(-3)

    def _read(
        self, query_bQHd: torch.Tensor, key_bTHd: torch.Tensor, value_bTHd: torch.Tensor, is_causal: bool = False
    ) -> torch.Tensor:
        """Return Σ_j a_ij v_j for each query i, [b, Q, width]; keys and values with b = 1 are shared by all rows.

        If `is_causal` is True, query i reads keys 1 to i. Otherwise, every query reads all keys.
        """
        weights_bHQT = silu(torch.einsum("bqhd,bthd->bhqt", query_bQHd * self.scale, key_bTHd)) / self.tokens
        weights_bHQT = weights_bHQT.tril() if is_causal else weights_bHQT
        return torch.einsum("bhqt,bthd->bqhd", weights_bHQT, value_bTHd).flatten(2)
