"""Embedding tables from the schema: collections that TorchRec shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from raytrec.config.features import Features
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import TableConstraint

BY_ID = "by_id"  # of PooledEmbeddings: part of the names that TorchRec gives these tables' weights
Collection = EmbeddingBagCollection | EmbeddingCollection


def embedding_bags(
    schema: Schema,
    constraints: Mapping[str, TableConstraint] | None = None,
    leave_out: Mapping[str, object] | None = None,
) -> EmbeddingBagCollection | None:
    """The tables that give sums of bags, without memory (meta device), as TorchRec shards them.

    Every table is declared SUM: TorchRec's sharded mean is wrong or differs under several sharding types, so
    means are divided outside (`pooling.Inputs`).

    Args:
        constraints: of every table, for its dtype; default: all fp32.
        leave_out: tables that are not among them. None are left: None.
    """
    features_of: dict[str, list[str]] = {
        table: [] for table in schema.tables if table not in (leave_out or {})
    }
    for feature, spec in schema.sparse.items():
        if spec.table in features_of:
            features_of[spec.table].append(feature)
    if not features_of:
        return None
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        is_weighted=schema.has_weights,
        tables=[
            EmbeddingBagConfig(pooling=PoolingType.SUM, **_settings(schema, name, names, constraints))
            for name, names in features_of.items()
        ],
    )


def embeddings_by_id(
    features: Features, constraints: Mapping[str, TableConstraint] | None = None
) -> nn.ModuleList:
    """The collections that give the vector of each id, without memory.

    Tables of one collection share its exchanges; they must have one dim, and as many column shards (torchrec
    1.8.0). The planner cuts tables of one dim alike, unless their ranks are given.
    """
    together: dict[tuple[int, int], list[EmbeddingConfig]] = {}
    for name, names in features.tables_by_id.items():
        constraint = (constraints or {}).get(name, TableConstraint(()))
        columns = len(constraint.ranks or ()) if "column_wise" in constraint.sharding else 0
        made = EmbeddingConfig(**_settings(features.schema, name, names, constraints))
        together.setdefault((made.embedding_dim, columns), []).append(made)
    return nn.ModuleList(
        EmbeddingCollection(device=torch.device("meta"), tables=tables) for tables in together.values()
    )


def _settings(
    schema: Schema, table: str, features: list[str], constraints: Mapping[str, TableConstraint] | None
) -> dict[str, Any]:
    """Of a table that these features read, for either kind of collection."""
    return {
        "name": table,
        "num_embeddings": schema.tables[table].rows,
        "embedding_dim": schema.tables[table].dim,
        "feature_names": features,
        "data_type": DataType[constraints[table].dtype.upper() if constraints else "FP32"],
        "init_fn": _leave,
    }


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """Draws no initial values: initial.fill_tables writes those that no plan changes, after sharding."""
    return weight


def tables_in(collection: nn.Module) -> dict[str, nn.Module]:
    """Table → the module that has its weight, of a collection of either kind, sharded or not."""
    return dict(getattr(collection, _kind(collection)).items())


def weight_name(collection: nn.Module, table: str) -> str:
    """The name of a table's weight in a collection of either kind, sharded or not."""
    return f"{_kind(collection)}.{table}.weight"


def _kind(collection: nn.Module) -> str:
    return "embedding_bags" if hasattr(collection, "embedding_bags") else "embeddings"


def table_of(fqn: str) -> str | None:
    """The table that a parameter or state-dict key belongs to (None: a dense layer's)."""
    parts = fqn.split(".")
    if len(parts) < 3 or parts[-1] != "weight":
        return None
    table = parts[-2]
    of_ids = parts[-3] == "embeddings" and parts[-5:-4] == [BY_ID]
    return table if parts[-3] == "embedding_bags" or of_ids else None
