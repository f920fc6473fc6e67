"""Models of query-item pairs: two towers, matrix factorization and neural collaborative filtering (NeuMF)."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.retrieval import MfSection, NcfSection, TwoTowerSection
from raytrec.config.schema import Schema
from raytrec.models.inputs import Sequence, encode_requests_once
from raytrec.models.parts.layers import ConcatInputs, mlp, mlp_and_linear
from raytrec.models.parts.sampled_loss import Queries, combine_outputs, mask_absent
from raytrec.models.parts.shared_negatives import build_losses, compute_pair_losses


class TwoTower(nn.Module):
    """Two towers: logit = scale · ⟨query, item⟩ + bias, with a learned bias and a learned or fixed scale.

    Retrieval uses only `query` and `item`: item vectors are stored in an index, which is searched with the
    query vector. Neither the bias nor a positive scale changes the order of a query's items.

    Each of several outputs has its own query vector, scale and bias, so one index of items serves all tasks.
    With `vectors`, there is an additional query vector for losses that compare the rows of a batch. These losses
    read scale · query and item, so the scale acts as an inverse temperature.

    With `negatives`, the model's own loss compares a row's item with drawn items, whose vectors the item
    tower computes from their ids (sampled_loss.py). The loss uses the query vector of the last output. Without
    outputs, the loss uses the query vector for losses that compare rows. In-batch negatives are mostly frequent
    items, whereas drawn negatives are not. Using both is the mixed negative sampling of Yang et al. 2020
    (https://doi.org/10.1145/3366424.3386195).

    Args:
        schema: Schema with any columns and features; sequences except the negatives are averaged.
        config: Features and sizes of the towers, negatives and loss settings.
        outputs: Number of logits per row.
        vectors: True to also return query and item vectors.

    Raises:
        ConfigError: A feature is in neither or both towers, a pattern matches no feature, or model.log_share is not a
            side feature of the negatives.
    """

    def __init__(self, schema: Schema, config: TwoTowerSection, outputs: int = 1, vectors: bool = False):
        super().__init__()
        members = config.tower_members(schema)
        self.config = config
        self.queries, self.outputs, self.vectors = outputs + vectors, outputs, vectors
        self.width = config.tower_mlp[-1]
        widths = {"query": self.queries * self.width, "item": self.width}
        self.towers = nn.ModuleDict({name: Tower(schema, members[name], config, widths[name]) for name in members})
        self.normalize = config.normalize
        # Dot products of vectors grow with the square root of their width; cosines are at most 1.
        scale = 5.0 if config.normalize else self.width**-0.5
        scale = 1 / config.temperature if config.temperature else scale
        scales = torch.full((self.queries,) if self.queries > 1 else (), scale)
        if config.learn_temperature:
            self.scale = nn.Parameter(scales)
        else:
            self.register_buffer("scale", scales, persistent=False)
        self.bias = nn.Parameter(torch.zeros((outputs,) if outputs > 1 else ())) if outputs else None
        self.loss, self.shared = None, None
        if config.own_loss:
            (item,) = members["item"]
            self.loss, self.shared = build_losses(schema, config, item)

    def query(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return query vectors from the query tower's features, float32 [B, tower_mlp[-1]].

        With n > 1 query vectors, the shape is [B, n, tower_mlp[-1]]: one vector for each output and, with `vectors`,
        then the vector for losses that compare rows.
        """
        return self._vectors("query", dense, pooled)

    def item(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return item vectors from the item tower's features, float32 [B, tower_mlp[-1]]."""
        return self._vectors("item", dense, pooled)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, outputs] if there are several outputs.

        With `vectors` or an own loss, the columns are those of `combine_outputs`, where D is tower_mlp[-1]. In training
        with share_negatives, this is a collective operation: every rank must call it.
        """
        query, item_BD = encode_requests_once(self.query, dense, pooled), self.item(dense, pooled)
        if self.queries == 1 and not self.vectors and not self.config.own_loss:
            return self.scale * (query * item_BD).sum(1) + self.bias
        query_BQD = self.scale.view(-1, 1) * query.view(-1, self.queries, self.width)
        own_B = self._own_loss(query_BQD, item_BD, dense, pooled) if self.config.own_loss else None
        return combine_outputs(query_BQD, item_BD, self.outputs, self.vectors, own_B, self.bias)

    def _own_loss(
        self, query_BQD: torch.Tensor, item_BD: torch.Tensor, dense: torch.Tensor, pooled: dict
    ) -> torch.Tensor:
        """Return the model's own loss for each row, float32 [B]; 0 in eval mode. `query_BQD` includes the scale."""
        if not self.training:
            return item_BD.new_zeros(item_BD.shape[0], dtype=torch.float32)
        drawn, (feature,) = pooled[self.config.negatives], self.towers["item"].concat_inputs.skipped_columns
        drawn_vectors = self._vectors("item", dense, {feature: drawn.vectors.flatten(0, 1)})
        bias_11 = None if self.bias is None else self.bias.view(1, -1)[:, -1:]
        drawn = Sequence(drawn_vectors.view(*drawn.present.shape, self.width), drawn.present)
        query_BD = query_BQD[:, max(self.outputs, 1) - 1]  # of the last output; without outputs, the only query
        return compute_pair_losses(self.loss, self.shared, query_BD, item_BD, feature, drawn, pooled, bias_11)

    def _vectors(self, tower: str, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        vectors = self.towers[tower](dense, pooled)
        if tower == "query" and self.queries > 1:
            vectors = vectors.view(-1, self.queries, self.width)
        return nn.functional.normalize(vectors, dim=-1) if self.normalize else vectors


class Tower(nn.Module):
    """MLP with a linear last layer over concatenated dense columns and pooled embeddings.

    Args:
        schema: Schema of the data.
        members: Names of the dense columns and sparse features that the tower reads.
        config: Layer sizes and dropout.
        outputs: Width of the last layer.
    """

    def __init__(self, schema: Schema, members: set[str], config: TwoTowerSection, outputs: int):
        super().__init__()
        self.concat_inputs = ConcatInputs(schema, members)
        width, hidden = self.concat_inputs.width, config.tower_mlp[:-1]
        self.hidden, self.last = mlp_and_linear(width, hidden, outputs, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the tower's output, float32 [B, outputs]."""
        return self.last(self.hidden(self.concat_inputs(dense, pooled)))


class MatrixFactorization(nn.Module):
    """Matrix factorization: logit = ⟨p, q⟩ + b_user + b_item + b for embeddings (p, b_user) and (q, b_item).

    Rendle et al. 2020, arXiv:2005.09683. b is learned. The items of a user are ordered by ⟨p, q⟩ + b_item, so
    the query vector is (p, 1) and the item vector is (q, b_item). b_user and b are included in the logits, and
    in the model's own loss if that loss is bce. If a row has several ids of the user or item feature, their
    embeddings are summed or averaged. Without model.bias, the three biases are omitted.

    Args:
        schema: Schema with a user and an item feature of the same dim; other features are not read.
        config: Names of the features, negatives and loss settings.
        outputs: Number of logits per row; each of several outputs has its own query (sampled_loss.Queries) and
            its own b.
        vectors: True to also return query and item vectors.

    Raises:
        ConfigError: model.log_share is not a side feature of the negatives.
    """

    def __init__(self, schema: Schema, config: MfSection, outputs: int = 1, vectors: bool = False):
        super().__init__()
        self.config, self.outputs, self.vectors = config, outputs, vectors
        self.queries = Queries(outputs, vectors, schema.get_feature_dim(config.item))
        self.bias = nn.Parameter(torch.zeros(outputs)) if config.bias and outputs else None
        self.loss, self.shared = build_losses(schema, config, config.item)

    def query(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the query vectors of the users, float32 [B, D], or [B, n, D] if there are n (see Queries)."""
        return self.queries(self._factors(inputs))

    def item(self, dense: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the item vectors, float32 [B, D]."""
        return inputs[self.config.item]

    def forward(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        """Return the logits, float32 [B]; with several outputs, `vectors` or an own loss, see combine_outputs.

        In training with share_negatives, this is a collective operation: every rank must call it.
        """
        item_BD, bias_BT = self.item(dense, inputs), None
        if self.bias is not None:
            bias_BT = encode_requests_once(lambda _, given: given[self.config.user][:, -1:], dense, inputs) + self.bias
        own_B = self._own_loss(item_BD, inputs, bias_BT) if self.config.own_loss else None
        query = encode_requests_once(self.query, dense, inputs)
        return combine_outputs(query, item_BD, self.outputs, self.vectors, own_B, bias_BT)

    def _own_loss(self, item_BD: torch.Tensor, inputs: dict, bias_BT: torch.Tensor | None) -> torch.Tensor:
        """Return the model's own loss for each row, float32 [B]; 0 in eval mode."""
        if not self.training:
            return item_BD.new_zeros(item_BD.shape[0], dtype=torch.float32)
        query_BD = self.queries.own_loss_query(self._factors(inputs))
        bias_B1 = None if bias_BT is None else bias_BT[:, -1:]
        item, drawn = self.config.item, inputs[self.config.negatives]
        return compute_pair_losses(self.loss, self.shared, query_BD, item_BD, item, drawn, inputs, bias_B1)

    def _factors(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the users' vectors with b_user replaced by 1: (p, b_user) → (p, 1), [B, D]."""
        user_BD = inputs[self.config.user]
        if not self.config.bias:
            return user_BD
        return torch.cat([user_BD[:, :-1], torch.ones_like(user_BD[:, :1])], dim=1)


class NeuMF(nn.Module):
    """NeuMF: logit = wᵀ (p_user ⊙ p_item, MLP(m_user, m_item)) + b, which combines weighted products and an MLP.

    He et al. 2017, arXiv:1708.05031. As in the paper, the products and the MLP use separate embeddings: the first
    `gmf_dim` numbers of a feature's embedding are p, the remaining numbers are m; an empty part is omitted. With
    `shared`, p and m are both the full embedding. Logits are not dot products of two vectors, so retrieval cannot
    search an index and must score every item.

    Args:
        schema: Schema with a user and an item feature; other features are not read.
        config: Names of the features, layer sizes, negatives and loss settings.
        outputs: Number of logits per row; all outputs share everything except w and b. The model's own loss uses
            the last output.

    Raises:
        ConfigError: model.gmf_dim or model.shared does not fit the dims of the tables, or both are set.
    """

    def __init__(self, schema: Schema, config: NcfSection, outputs: int = 1):
        super().__init__()
        self.config = config
        self.products, users, items = config.widths(schema)
        self.users, self.items, self.hidden = users, items, config.mlp[0]
        self.first = nn.Linear(users + items, self.hidden) if users + items else None
        layers = mlp(config.mlp, config.dropout)
        self.mlp = nn.Sequential(nn.ReLU(), nn.Dropout(config.dropout), *layers) if self.first else None
        self.logit = nn.Linear(self.products + (config.mlp[-1] if self.first else 0), outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.loss, _ = build_losses(schema, config, config.item)

    def forward(self, dense: torch.Tensor, inputs: dict) -> torch.Tensor:
        """Return the logits, float32 [B] or [B, outputs]; [B, outputs + 1] with an own loss, the last column."""
        user_B1E, item_B1E = (inputs[f].unsqueeze(1) for f in (self.config.user, self.config.item))
        scores_BT = self._scores(user_B1E, item_B1E).squeeze(1)
        logits_BT = scores_BT + self.bias
        if not self.config.own_loss:
            return logits_BT.squeeze(1)
        own_B = self._own_loss(user_B1E, scores_BT[:, -1], inputs)
        return torch.cat([logits_BT, own_B.unsqueeze(1)], dim=1)

    def _own_loss(self, user_B1E: torch.Tensor, score_B: torch.Tensor, inputs: dict) -> torch.Tensor:
        """Return the model's own loss for each row, float32 [B]; 0 in eval mode."""
        if not self.training:
            return torch.zeros_like(score_B, dtype=torch.float32)
        drawn, bias = inputs[self.config.negatives], self.loss.remove_canceling_bias(self.bias[-1])
        scores_BK = self._scores(user_B1E, drawn.vectors)[:, :, -1].float() + mask_absent(drawn.present)
        return self.loss(score_B.float() + bias, scores_BK + bias, drawn.present.sum(1))

    def _scores(self, user_B1E: torch.Tensor, items_BKE: torch.Tensor) -> torch.Tensor:
        """Return each user's scores, without b, for K items: [B, 1, E], [B, K, E] → [B, K, outputs]."""
        parts = []
        if self.products:
            parts.append(user_B1E[..., : self.products] * items_BKE[..., : self.products])
        if self.first:
            # The user's contribution to the first layer is computed once for all items.
            of_user, of_item = self.first.weight.split([self.users, self.items], dim=1)
            user_B1H = nn.functional.linear(user_B1E[..., user_B1E.shape[-1] - self.users :], of_user)
            items_BKH = nn.functional.linear(
                items_BKE[..., items_BKE.shape[-1] - self.items :], of_item, self.first.bias
            )
            parts.append(self.mlp(user_B1H + items_BKH))
        return self.logit(torch.cat(parts, dim=-1))
