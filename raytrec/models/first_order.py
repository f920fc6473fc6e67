"""Wide & Deep, DeepFM and xDeepFM: models in which each id has a weight that is added to the logit."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.config.models.ranking import DeepFMSection, WideDeepSection, XDeepFMSection
from raytrec.config.schema import Schema
from raytrec.models.interactions import Cross
from raytrec.models.parts.layers import ConcatInputs, FieldVectors, mlp, mlp_and_linear


class WideDeep(nn.Module):
    """Wide & Deep: logit = wide part + wᵀ MLP(concatenated deep part) + b, with learned w and b.

    Cheng et al. 2016, arXiv:1606.07792. The wide part is linear in ids and dense columns. The weight of an id is the
    first number of its table row, which the MLP does not read. With T outputs, the first T numbers are weights. A
    pooled embedding thus starts with the sum of its ids' weights (or their mean, depending on the pooling).
    For features that are only in the deep part, the MLP reads the full table row. Cross-product features, φ(x)
    in the paper, must be features of the data.

    With cross_layers, the MLP reads the output of DCN-V2's cross layers. With deep_dropout, the deep part is
    dropped for a random share of the training rows, whose logits then consist of the wide part and b. With
    deep_dropout, w is also initialized near 0, and the weights of dense columns are initialized with 0. After
    training, w can be scaled down (`shrunk`) if a weaker deep part predicts held-out rows better.

    Args:
        schema: Schema with any dense columns; tables of features in the wide part have dims larger than T.
        config: Features of each part, layer sizes, dropout, and slope_rate, a factor of the dense columns' terms.
        outputs: T, the number of logits per row. Each output has its own weights; all layers of the MLP except
            the last are shared.

    Raises:
        ConfigError: A feature is in neither part, or a pattern matches no feature.
    """

    def __init__(self, schema: Schema, config: WideDeepSection, outputs: int = 1):
        super().__init__()
        parts, self.outputs = config.parts(schema), outputs
        self.wide = [feature for feature in schema.sparse if feature in parts["wide"]]
        columns = [place for place, name in enumerate(schema.dense) if name in parts["wide"]]
        self.register_buffer("columns", torch.tensor(columns, dtype=torch.long), persistent=False)
        self.slopes = nn.Linear(len(columns), outputs, bias=False) if columns else None
        self.slope_rate, self.shrinks = config.slope_rate, config.deep_dropout > 0
        self.concat_inputs = ConcatInputs(schema, parts["deep"], dict.fromkeys(self.wide, outputs))
        self.cross = Cross(self.concat_inputs.width, config.cross_layers) if config.cross_layers else nn.Identity()
        self.deep, self.logit = mlp_and_linear(self.concat_inputs.width, config.top_mlp, outputs, config.dropout)
        self.row_dropout = nn.Dropout(config.deep_dropout)  # drops whole rows
        if self.shrinks:
            nn.init.uniform_(self.logit.weight, -0.01, 0.01)
            if self.slopes is not None:
                nn.init.zeros_(self.slopes.weight)

    @property
    def shrunk(self) -> nn.Parameter | None:
        """Weights w, which worker.evaluate can multiply by a factor from 0 to 1; None without deep_dropout."""
        return self.logit.weight if self.shrinks else None

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, T] if there are several outputs."""
        deep_BM = self.deep(self.cross(self.concat_inputs(dense, pooled)))
        if self.training and self.shrinks:
            deep_BM = deep_BM * (self.row_dropout(torch.ones_like(deep_BM[:, :1])) > 0)
        logits_BT = self.logit(deep_BM)
        for feature in self.wide:
            logits_BT = logits_BT + pooled[feature][:, : self.outputs]
        if self.slopes is not None:
            slopes_BT = self.slopes(dense.index_select(1, self.columns))
            logits_BT = logits_BT + (slopes_BT if self.slope_rate == 1 else self.slope_rate * slopes_BT)
        return logits_BT.squeeze(1)


class DeepFM(nn.Module):
    """DeepFM: logit = Σᵢ wᵢ xᵢ + Σᵢ<ⱼ ⟨vᵢ, vⱼ⟩ xᵢ xⱼ + wᵀ MLP(all vectors concatenated) + b.

    Guo et al. 2017, arXiv:1703.04247. xᵢ is the value of a dense column, or 1 for an id. The weight wᵢ and the vector
    vᵢ of an id are stored in one table row (layers.FieldVectors). w and b belong to the last layer. Each of several
    outputs has its own weights and last layer. An output sums the D numbers of Σᵢ<ⱼ vᵢ ⊙ vⱼ xᵢ xⱼ, multiplied by
    learned factors that are initially 1. For a single output, the factors are fixed to 1.
    (torchrec.modules.deepfm.FactorizationMachine also multiplies the numbers within each vector and therefore differs
    from the paper.)

    Args:
        schema: Schema with any dense columns; all tables have the same dim, larger than `outputs`.
        config: Layer sizes and dropout.
        outputs: T, the number of logits per row.

    Raises:
        ConfigError: The tables have different dims.
    """

    def __init__(self, schema: Schema, config: DeepFMSection, outputs: int = 1):
        super().__init__()
        self.fields = FieldVectors(schema, config.name, outputs)
        self.factors = nn.Parameter(torch.ones(self.fields.dim, outputs)) if outputs > 1 else None
        self.deep, self.logit = mlp_and_linear(self.fields.width, config.top_mlp, outputs, config.dropout)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, T] if there are several outputs."""
        first_BT, vectors_BFD = self.fields(dense, pooled)
        pairs_BD = sum_pair_products(vectors_BFD)
        second = pairs_BD.sum(1, keepdim=True) if self.factors is None else pairs_BD @ self.factors
        return (first_BT + second + self.logit(self.deep(vectors_BFD.flatten(1)))).squeeze(1)


def sum_pair_products(vectors_BFD: torch.Tensor) -> torch.Tensor:
    """Return Σᵢ<ⱼ vᵢ ⊙ vⱼ = ((Σ v)² − Σ v²) ÷ 2: float [B, F, D] → [B, D]."""
    return (vectors_BFD.sum(1).square() - vectors_BFD.square().sum(1)) / 2


class XDeepFM(nn.Module):
    """xDeepFM with logit = Σᵢ wᵢ xᵢ + w₁ᵀ CIN(vectors) + w₂ᵀ MLP(all vectors concatenated) + b.

    Lian et al. 2018, arXiv:1803.05170. xᵢ is the value of a dense column, or 1 for an id. The weight wᵢ and the vector
    of an id are stored in one table row (layers.FieldVectors). CIN is the compressed interaction network. w₁, w₂ and b
    belong to the last layer.

    Args:
        schema: Schema with any dense columns; all tables have the same dim, larger than `outputs`.
        config: Layer sizes and dropout.
        outputs: T, the number of logits per row; all outputs share the CIN and the MLP.

    Raises:
        ConfigError: The tables have different dims.
    """

    def __init__(self, schema: Schema, config: XDeepFMSection, outputs: int = 1):
        super().__init__()
        self.fields = FieldVectors(schema, config.name, outputs)
        width = self.fields.width
        self.cin = CIN(self.fields.count, config.cin)
        self.deep = mlp([width, *config.top_mlp], config.dropout)
        self.logit = nn.Linear(sum(config.cin) + (config.top_mlp or [width])[-1], outputs)

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logit of each row, float32 [B]; [B, T] if there are several outputs."""
        first_BT, vectors_BFD = self.fields(dense, pooled)
        both = torch.cat([self.cin(vectors_BFD), self.deep(vectors_BFD.flatten(1))], dim=1)
        return (first_BT + self.logit(both)).squeeze(1)


class CIN(nn.Module):
    """Compressed interaction network (xDeepFM, equations 6 and 8): float [B, F, D] → [B, Σ sizes].

    Row h of layer k is Σᵢⱼ W[k,h,i,j] · (row i of layer k − 1 ⊙ vector j) with learned weights W, where the rows of
    layer 0 are the vectors. The output contains, for every row of every layer, the sum of the row's D numbers. As in
    the paper's best variant, there is no activation between layers.

    Args:
        fields: F, the number of vectors.
        sizes: Number of rows in each layer.
    """

    def __init__(self, fields: int, sizes: list[int]):
        super().__init__()
        input_sizes = [fields, *sizes[:-1]]
        self.layers = nn.ModuleList(
            nn.Linear(rows * fields, size, bias=False) for rows, size in zip(input_sizes, sizes, strict=True)
        )

    def forward(self, vectors_BFD: torch.Tensor) -> torch.Tensor:
        """Return the sum of the D numbers in each row of each layer, float [B, Σ sizes], layer by layer."""
        columns_BDF = vectors_BFD.transpose(1, 2)
        rows_BDH, sums = columns_BDF, []
        for layer in self.layers:
            products_BDP = (rows_BDH.unsqueeze(3) * columns_BDF.unsqueeze(2)).flatten(2)
            rows_BDH = layer(products_BDP)
            sums.append(rows_BDH.sum(1))
        return torch.cat(sums, dim=1)
