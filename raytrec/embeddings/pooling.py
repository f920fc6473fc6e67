"""Define the schema's embedding tables as collections that TorchRec shards, and pool their vectors.

A bag is the list of ids of one feature in one row. Mean pooling divides the sum of a bag's vectors, after TorchRec
has added the parts from all ranks, by the length of the bag or by the sum of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from raytrec.common.errors import RunError
from raytrec.compat.torch_ import FixedDtype
from raytrec.compat.torchrec_ import is_pipelined
from raytrec.config.features import Features
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import TableConstraint

BY_ID = "by_id"  # attribute of PooledEmbeddings; part of the names that TorchRec gives these tables' weights
Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection


def make_embedding_bags(
    features: Features, constraints: Mapping[str, TableConstraint] | None = None
) -> EmbeddingBagCollection | None:
    """Return an unsharded collection, on the meta device, of all tables that produce sums of bags.

    Every table is declared SUM, because the sharded mean of TorchRec 1.8.0 is wrong or differs under several sharding
    types. `DenseInputBuilder` computes the means. The result is None if every table produces one vector per id.

    Args:
        features: Features of the run.
        constraints: Table → constraint, from which the dtype is read; default: fp32 for all tables.
    """
    schema, tables = features.schema, []
    for table in schema.tables:
        if table not in features.tables_by_id:
            names = [feature for feature, spec in schema.sparse.items() if spec.table == table]
            tables.append(EmbeddingBagConfig(pooling=PoolingType.SUM, **_make_args(schema, table, names, constraints)))
    if not tables:
        return None
    return EmbeddingBagCollection(device=torch.device("meta"), is_weighted=schema.has_weights, tables=tables)


def make_by_id_collections(
    features: Features, constraints: Mapping[str, TableConstraint] | None = None
) -> nn.ModuleList:
    """Return unsharded collections, on the meta device, of all tables that produce one vector per id.

    Tables in one collection share exchanges and must have the same dim and the same number of column shards
    (TorchRec 1.8.0). The planner cuts tables of the same dim equally unless their ranks are configured. The list is
    empty if there are no such tables. The arguments are those of `make_embedding_bags`.
    """
    groups: dict[tuple[int, int], list[EmbeddingConfig]] = {}
    for name, names in features.tables_by_id.items():
        constraint = (constraints or {}).get(name, TableConstraint(()))
        columns = len(constraint.ranks or ()) if "column_wise" in constraint.sharding else 0
        table = EmbeddingConfig(**_make_args(features.schema, name, names, constraints))
        groups.setdefault((table.embedding_dim, columns), []).append(table)
    return nn.ModuleList(EmbeddingCollection(device=torch.device("meta"), tables=tables) for tables in groups.values())


def _make_args(
    schema: Schema, table: str, features: list[str], constraints: Mapping[str, TableConstraint] | None
) -> dict[str, Any]:
    """Return the keyword arguments of TorchRec's configuration of a table, for a collection of either kind."""
    return {
        "name": table,
        "num_embeddings": schema.tables[table].rows,
        "embedding_dim": schema.tables[table].dim,
        "feature_names": features,
        "data_type": DataType[constraints[table].dtype.upper() if constraints else "FP32"],
        "init_fn": _skip_init,
    }


def _skip_init(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight unchanged. After sharding, tables.fill_tables writes values independent of the plan."""
    return weight


def find_table_modules(collection: nn.Module) -> dict[str, nn.Module]:
    """Return table → module that holds its weight, for a collection of either kind, sharded or not."""
    return dict(getattr(collection, _get_attribute(collection)).items())


def find_weight_name(collection: nn.Module, table: str) -> str:
    """Return the state-dict key of a table's weight in a collection of either kind, sharded or not."""
    return f"{_get_attribute(collection)}.{table}.weight"


def _get_attribute(collection: nn.Module) -> str:
    return "embedding_bags" if hasattr(collection, "embedding_bags") else "embeddings"


def find_table_name(fqn: str) -> str | None:
    """Return the table to which a parameter or state-dict key belongs, or None for a dense layer."""
    parts = fqn.split(".")
    if len(parts) < 3 or parts[-1] != "weight":
        return None
    table = parts[-2]
    is_by_id = parts[-3] == "embeddings" and parts[-5:-4] == [BY_ID]
    return table if parts[-3] == "embedding_bags" or is_by_id else None


class PooledEmbeddings(FixedDtype):
    """Lookup of all sparse features, and pooling of all except candidates and sequences that a model reads id by id.

    Args:
        schema: Schema with the features, their pooling and their tables.
        constraints: Table → constraint; default: all tables are fp32. Casts such as `.to(dtype)` or `.half()`
            raise RunError if they would change the dtype of a table, because lookups would then read other
            weights than the kernels update.
        sequences: Feature that the model reads id by id → maximum number of ids; default: all are mean-pooled.

    Attributes:
        bags: Collection of the tables that produce sums of bags, or None if there are no such tables.
        by_id: Collections of the tables that produce one vector per id, for sequences and candidates.
    """

    def __init__(
        self,
        schema: Schema,
        constraints: Mapping[str, TableConstraint] | None = None,
        sequences: Mapping[str, int] | None = None,
    ):
        super().__init__()
        features = Features(schema, sequences or {})
        self.bags = make_embedding_bags(features, constraints)
        self.by_id = make_by_id_collections(features, constraints)
        self._dtypes = {table.dtype for table in self.parameters()}
        self.inputs = DenseInputBuilder(features)

    @property
    def collections(self) -> list[Collection]:
        """All collections of tables."""
        return [*([] if self.bags is None else [self.bags]), *self.by_id]

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Return feature → input of the dense layers, float32 [B, dim of the feature's table].

        For a bag with vectors eᵢ and weights wᵢ (1 if unweighted), sum pooling returns Σ wᵢ·eᵢ. Mean pooling
        divides this sum by Σ wᵢ unless Σ wᵢ is 0. Empty bags are 0. A sequence that is read id by id is
        [B, L, dim]: the wᵢ·eᵢ in the order of the ids, padded with 0 to its maximum number of ids, L. A feature
        of candidates is [N, dim], one vector for each of the N candidates of all rows.
        """
        # TorchRec's pipeline traces this method with a Proxy and later exchanges copies of the ids in advance.
        ids = sparse if is_pipelined(self.collections[0], sparse) else copy_sparse(sparse)
        sums = None if self.bags is None else self.bags(ids)
        return self.inputs(sums, [collection(ids) for collection in self.by_id], sparse)

    def before_cast(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise RunError if `fn`, which torch is about to apply to all tensors, would change the dtype of a table."""
        for dtype in self._dtypes:
            cast_dtype = fn(torch.empty(0, dtype=dtype)).dtype
            if cast_dtype != dtype:
                raise RunError(
                    f"embedding tables cannot be cast from {dtype} to {cast_dtype}",
                    where="model.to(dtype), .float(), .half(), .bfloat16(), .double() or .type(dtype)",
                    expected="a dtype set before sharding: after a cast, lookups would not read the trained weights",
                    do="set plan.tables.TABLE.dtype to fp32 or fp16, and cast only the dense layers",
                )


def copy_sparse(sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor with copies of ids and weights, which FBGEMM and TorchRec may change in place."""
    weights = sparse.weights_or_none()
    return replace_ids(sparse, sparse.values().clone(), None if weights is None else weights.clone())


def replace_ids(sparse: KeyedJaggedTensor, ids: torch.Tensor, weights: torch.Tensor | None) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor with the bags of `sparse`, but these ids and weights (None: unweighted)."""
    return KeyedJaggedTensor(
        sparse.keys(),
        ids,
        weights,
        lengths=sparse.lengths(),
        stride=sparse.stride(),
        length_per_key=sparse.length_per_key_or_none(),  # otherwise TorchRec reads it from the device
    )


class BagMeans(nn.Module):
    """Module that divides the sums of bags of mean-pooled features, so that they become means.

    Sums are divided after the sharded lookup, when they include the parts from all ranks. Values and gradients are
    therefore exact for every sharding type.

    Args:
        is_mean: True for each key whose bags are averaged, in the order of the KeyedJaggedTensor's keys.
    """

    def __init__(self, is_mean: list[bool]):
        super().__init__()
        self.is_mean = is_mean

    def forward(
        self, sums: KeyedTensor | dict[str, torch.Tensor], sparse: KeyedJaggedTensor
    ) -> dict[str, torch.Tensor]:
        """Return feature → pooled bags, float32 [B, dim], given their sums and the ids that were looked up.

        Sums of mean-pooled features are divided by each bag's Σ wᵢ, or by its length if unweighted, unless this is 0.
        """
        pooled = dict(sums) if isinstance(sums, dict) else sums.to_dict()
        if not any(self.is_mean):
            return pooled
        totals_FB = sum_bag_weights(sparse)
        for index, feature in enumerate(sparse.keys()):
            if self.is_mean[index] and feature in pooled:
                pooled[feature] = pooled[feature] / totals_FB[index].unsqueeze(1)
        return pooled


class DenseInputBuilder(nn.Module):
    """Module that converts looked-up vectors to the dense layers' inputs: pooled bags and padded sequences.

    TorchRec's pipeline, which traces the model to find sharded modules, does not trace the inside of this module.

    Args:
        features: Features of the run.
    """

    def __init__(self, features: Features):
        super().__init__()
        sparse, self._sequences = features.schema.sparse, dict(features.sequences)
        self._candidates = frozenset(features.schema.select_candidate_names(sparse))
        self._weighted = {feature for feature, spec in sparse.items() if spec.weights is not None}
        self.means = BagMeans([features.is_mean(feature) for feature in sparse])

    def forward(
        self, sums: KeyedTensor | None, by_id: list[dict[str, JaggedTensor]], sparse: KeyedJaggedTensor
    ) -> dict[str, torch.Tensor]:
        """Return feature → float32 input of the dense layers, as described in PooledEmbeddings.forward.

        Args:
            sums: Sums of bags, [B, Σ dims], of the features whose tables produce sums; None if there are none.
            by_id: For each collection of tables that produce one vector per id, feature → vectors, float32
                [N, dim].
            sparse: Ids that were looked up.
        """
        if not by_id:
            return self.means(sums, sparse)
        bags, sequences = {} if sums is None else sums.to_dict(), {}
        all_weights, weights = sparse.weights_or_none(), {}
        if all_weights is not None:
            weights = dict(zip(sparse.keys(), all_weights.split(sparse.length_per_key()), strict=True))
        for feature, jagged in (pair for collection in by_id for pair in collection.items()):
            vectors_ND = jagged.values()
            if feature in self._weighted and weights:
                vectors_ND = vectors_ND * weights[feature].unsqueeze(1)
            if feature in self._sequences:
                sequences[feature] = torch.ops.fbgemm.jagged_to_padded_dense(
                    vectors_ND, [jagged.offsets()], [self._sequences[feature]], 0.0
                )
            elif feature in self._candidates:
                bags[feature] = vectors_ND
            else:
                bags[feature] = sum_bags(vectors_ND, jagged.lengths())
        outputs = self.means(bags, sparse) | sequences
        return {feature: outputs[feature] for feature in sparse.keys()}  # noqa: SIM118


def sum_bags(vectors_ND: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return the sum of each bag's vectors, [B, D], given the vectors bag by bag and the bags' lengths; 0 if empty."""
    bag_N = torch.arange(len(lengths_B), device=lengths_B.device).repeat_interleave(
        lengths_B, output_size=len(vectors_ND)
    )
    return vectors_ND.new_zeros(len(lengths_B), vectors_ND.shape[1]).index_add(0, bag_N, vectors_ND)


def sum_bag_weights(sparse: KeyedJaggedTensor) -> torch.Tensor:
    """Return Σ wᵢ of each bag, or its length if unweighted, float32 [features, B]; 0 is replaced with 1."""
    lengths = sparse.lengths()
    weights = sparse.weights_or_none()
    if weights is None:
        return lengths.clamp(min=1).float().view(len(sparse.keys()), -1)
    totals = torch.segment_reduce(weights, "sum", lengths=lengths.long(), unsafe=True)
    return torch.where(totals == 0, 1.0, totals).view(len(sparse.keys()), -1)
