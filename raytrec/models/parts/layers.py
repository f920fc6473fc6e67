"""Layers shared by several models: MLPs, dropout, and features as one concatenated vector or as fields."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from raytrec.config.models.base import get_common_dim
from raytrec.config.schema import Schema


class Constant(nn.Module):
    """Learned vector that is the same for every row, float32 [B, dim]; only the input's size B is read."""

    def __init__(self, dim: int):
        super().__init__()
        self.vector = nn.Parameter(torch.randn(dim) / dim**0.5)

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        """Return the learned vector for each row, float32 [B, dim]."""
        return self.vector.expand(dense.shape[0], -1)


def mlp(
    sizes: list[int], dropout: float = 0.0, activation: Callable[[int], nn.Module] = lambda _: nn.ReLU()
) -> nn.Sequential:
    """Return linear layers, each followed by an activation and, if `dropout` is not 0, dropout.

    Args:
        sizes: Width of the input, then of each layer; with a single size, the result returns its input.
        dropout: Dropout rate.
        activation: Function from a layer's width to its activation module; default: ReLU.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation(outputs)]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def mlp_and_linear(
    inputs: int,
    hidden: list[int],
    outputs: int,
    dropout: float = 0.0,
    activation: Callable[[int], nn.Module] = lambda _: nn.ReLU(),
) -> tuple[nn.Sequential, nn.Linear]:
    """Return (hidden layers built by `mlp`, a linear layer from the last hidden size to `outputs`)."""
    sizes = [inputs, *hidden]
    return mlp(sizes, dropout, activation), nn.Linear(sizes[-1], outputs)


class Dropout(nn.Dropout):
    """nn.Dropout that takes a quarter of the time on CPU, where the rate is rounded to a multiple of 2⁻¹⁶.

    On CPU, PyTorch (2.13.0) draws a random number for each value, which takes longer than most layers. This
    class draws 64 bits at a time and uses 16 bits for each value. Compiled code and rates that round
    to 0 or 1 use PyTorch's implementation.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input; in training mode, set random values to 0 and divide the other values by 1 − rate."""
        dropped = round(self.p * 2**16)
        if not (self.training and input.is_cpu and 0 < dropped < 2**16) or torch.compiler.is_compiling():
            return super().forward(input)
        bits = torch.empty(-(-input.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        bits = bits.view(torch.int16)[: input.numel()].view(input.shape)
        mask = torch.ge(bits, dropped - 2**15, out=torch.empty_like(input, requires_grad=False))
        return input * mask.mul_(2**16 / (2**16 - dropped))


class SequenceModules(nn.ModuleList):
    """List of one module per sequence feature. A module reads the inputs of the sequence and of its target.

    A list is used because feature names may contain dots, which module names must not.

    Args:
        schema: Schema of the data.
        target_of: Sequence feature → target feature with respect to which the sequence is read.
        make: Function from the dims of a sequence and of its target to the sequence's module.
    """

    def __init__(self, schema: Schema, target_of: dict[str, str], make: Callable[[int, int], nn.Module]):
        dim = schema.get_feature_dim
        super().__init__(make(dim(feature), dim(target)) for feature, target in target_of.items())
        self.target_of = target_of

    def forward(self, inputs: dict) -> dict[str, Any]:
        """Return sequence feature → output of its module.

        Args:
            inputs: Feature → input of the model, which includes all sequences and targets.
        """
        modules = zip(self.target_of.items(), self, strict=True)
        return {feature: module(inputs[feature], inputs[target]) for (feature, target), module in modules}


class ConcatInputs(nn.Module):
    """Concatenation of dense columns, then pooled embeddings, each in the schema's order, float32 [B, width].

    Args:
        schema: Schema of the data.
        members: Names of the features and dense columns to include; default: all.
        skip: Feature → number of leading values of its embedding to omit; default: 0 for all features.

    Attributes:
        width: Width of the output.
    """

    def __init__(self, schema: Schema, members: Collection[str] | None = None, skip: dict[str, int] | None = None):
        super().__init__()
        included = {*schema.dense, *schema.sparse} if members is None else members
        skip = skip or {}
        self.skipped_columns = {f: skip.get(f, 0) for f in schema.sparse if f in included}
        columns = [place for place, name in enumerate(schema.dense) if name in included]
        self.register_buffer("columns", torch.tensor(columns, dtype=torch.long), persistent=False)
        self.width = len(columns) + sum(schema.get_feature_dim(f) - first for f, first in self.skipped_columns.items())

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the concatenated values of all members, float32 [B, width]."""
        columns = len(self.columns)
        parts = [dense if columns == dense.shape[1] else dense.index_select(1, self.columns)] if columns else []
        parts += [pooled[f][:, first:] if first else pooled[f] for f, first in self.skipped_columns.items()]
        return torch.cat(parts, dim=1)


class FieldVectors(nn.Module):
    """Module that returns one vector for each dense column and each sparse feature, float32 [B, F, D].

    The vector of a sparse feature is its pooled embedding. A dense column with value x has the vector x · v
    with a learned v, as in factorization machines (Rendle 2010). With first-order weights, all table rows and
    all v have the form [w₁ … w_T, vector], where the first T numbers are weights, one per output. A linear
    model of ids and columns is thus trained alongside the vectors. Weights and vectors are separate parameters,
    although they share a table row.

    Args:
        schema: Schema whose tables all have the same dim.
        model: Name of the model, for error messages.
        first_order: T, the number of outputs with first-order weights; 0: no first-order weights.

    Attributes:
        count: F, the number of fields.
        dim: D, the tables' dim − T.
        width: F · D.

    Raises:
        ConfigError: The tables have different dims.
    """

    def __init__(self, schema: Schema, model: str, first_order: int = 0):
        super().__init__()
        dim, self.first_order = get_common_dim(schema, model), first_order
        self.features, self.count = list(schema.sparse), len(schema.dense) + len(schema.sparse)
        self.dim = dim - first_order
        self.width = self.count * self.dim
        self.columns = nn.Parameter(torch.randn(len(schema.dense), dim) * 0.1) if schema.dense else None

    def forward(self, dense: torch.Tensor, pooled: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of first-order weights over fields, float32 [B, T], and the vectors, float32 [B, F, D]."""
        rows_BFD = torch.stack([pooled[f] for f in self.features], dim=1)
        if self.columns is not None:
            rows_BFD = torch.cat([dense.unsqueeze(2) * self.columns, rows_BFD], dim=1)
        return rows_BFD[..., : self.first_order].sum(1), rows_BFD[..., self.first_order :]
