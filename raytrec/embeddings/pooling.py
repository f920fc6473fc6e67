"""Pooled embeddings: mean = global sum ÷ global bag length."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from raytrec.common.errors import RunError
from raytrec.compat.torch_ import FixedDtype
from raytrec.compat.torchrec_ import is_pipelined
from raytrec.config.features import Features
from raytrec.config.schema import Schema
from raytrec.embeddings.bags import Collection, embedding_bags, embeddings_by_id
from raytrec.embeddings.constraints import TableConstraint


class PooledEmbeddings(FixedDtype):
    """Looks every sparse feature up and pools its bag; sequences that a model reads id by id are not pooled.

    Args:
        schema: the features, their pooling and their tables.
        constraints: of every table; default: all are fp32. Their dtypes are fixed: a cast later would part
            what is read from what is trained, so `.to(dtype)`, `.half()`, `.bfloat16()` and the like raise.
        sequences: features that are read id by id → how many ids, at most (config.features); default: none,
            and sequences give the mean of their bag.

    Attributes:
        bags: the tables that give sums of bags; None where there are none.
        by_id: the collections of those that give the vector of each id.

    Returns (forward):
        dict of feature → float32 [B, dim of its table]. With bag ids i and weights wᵢ (1 when there are
        none): sum is Σ wᵢ·eᵢ, mean is Σ wᵢ·eᵢ ÷ Σ wᵢ, and an empty bag (or Σ wᵢ = 0) is 0. A sequence that is
        read id by id is [B, L, dim]: the wᵢ·eᵢ in the order of its ids, then 0. Of candidates [N, dim].
    """

    def __init__(
        self,
        schema: Schema,
        constraints: Mapping[str, TableConstraint] | None = None,
        sequences: Mapping[str, int] | None = None,
    ):
        super().__init__()
        features = Features(schema, sequences or {})
        self.bags = embedding_bags(schema, constraints, features.tables_by_id)
        self.by_id = embeddings_by_id(features, constraints)
        self._dtypes = {table.dtype for table in self.parameters()}
        self.inputs = Inputs(features)

    @property
    def collections(self) -> list[Collection]:
        """All collections of tables."""
        return [*([] if self.bags is None else [self.bags]), *self.by_id]

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        # TorchRec's pipeline traces this with a Proxy, and later has exchanged copies of the ids before.
        given = sparse if is_pipelined(self.collections[0], sparse) else own_copy(sparse)
        sums = None if self.bags is None else self.bags(given)
        return self.inputs(sums, [collection(given) for collection in self.by_id], sparse)

    def before_cast(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        refuse_cast(fn, self._dtypes)


def own_copy(sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A copy for FBGEMM and TorchRec to change: they clamp ids in place, and put other weights into it."""
    weights = sparse.weights_or_none()
    return KeyedJaggedTensor(
        sparse.keys(),
        sparse.values().clone(),
        None if weights is None else weights.clone(),
        lengths=sparse.lengths(),
        stride=sparse.stride(),
        length_per_key=sparse.length_per_key_or_none(),  # else TorchRec reads it from the device
    )


def refuse_cast(fn: Callable, dtypes: set[torch.dtype]) -> None:
    """Raises if a function that nn.Module applies to its tensors would change one of these dtypes of tables.

    Raises:
        RunError: one would be.
    """
    for dtype in dtypes:
        after = fn(torch.empty(0, dtype=dtype)).dtype
        if after != dtype:
            raise RunError(
                f"a cast of embedding tables from {dtype} to {after}",
                where="model.to(dtype), .float(), .half(), .bfloat16(), .double() or .type(dtype)",
                expected="a dtype chosen before sharding: a cast parts what is read from what is trained",
                do="set plan.tables.TABLE.dtype to fp32 or fp16; cast dense layers by themselves",
            )


class BagMeans(nn.Module):
    """Turns the sums of mean-pooled features into means.

    It divides after the sharded lookup, where the sum is already global: that is exact in value and gradient
    for every sharding type.

    Args:
        is_mean: for each key of the KeyedJaggedTensor, in its order, whether its bags are averaged.
    """

    def __init__(self, is_mean: list[bool]):
        super().__init__()
        self.is_mean = is_mean

    def forward(
        self, sums: KeyedTensor | dict[str, torch.Tensor], sparse: KeyedJaggedTensor
    ) -> dict[str, torch.Tensor]:
        pooled = dict(sums) if isinstance(sums, dict) else sums.to_dict()
        if not any(self.is_mean):
            return pooled
        totals_FB = bag_totals(sparse)
        for index, feature in enumerate(sparse.keys()):
            if self.is_mean[index] and feature in pooled:
                pooled[feature] = pooled[feature] / totals_FB[index].unsqueeze(1)
        return pooled


class Inputs(nn.Module):
    """Turns looked-up vectors into the inputs of the dense layers: bags, and sequences read id by id.

    A separate module, so that TorchRec's pipeline, which traces the model to find sharded modules, takes it
    as one step.

    Args:
        features: of the run.
    """

    def __init__(self, features: Features):
        super().__init__()
        sparse, self._sequences = features.schema.sparse, dict(features.sequences)
        self._of_candidates = frozenset(features.schema.of_candidates(sparse))
        self._weighted = {feature for feature, spec in sparse.items() if spec.weights}
        self.means = BagMeans([features.is_mean(feature) for feature in sparse])

    def forward(
        self, sums: KeyedTensor | None, by_id: list[dict[str, JaggedTensor]], sparse: KeyedJaggedTensor
    ) -> dict[str, torch.Tensor]:
        """Feature → float32, as PooledEmbeddings gives it.

        Args:
            sums: [B, Σ dims] of the features whose tables give sums.
            by_id: of each collection of other tables, feature → the vectors of its ids, float32 [N, dim].
            sparse: the ids that were looked up.
        """
        if not by_id:
            return self.means(sums, sparse)
        bags, sequences = {} if sums is None else sums.to_dict(), {}
        weights = self._weights(sparse)
        for feature, found in (pair for each in by_id for pair in each.items()):
            vectors_ND = found.values()
            if feature in weights:
                vectors_ND = vectors_ND * weights[feature].unsqueeze(1)
            if feature in self._sequences:
                sequences[feature] = padded(vectors_ND, found.offsets(), self._sequences[feature])
            elif feature in self._of_candidates:
                bags[feature] = vectors_ND
            else:
                bags[feature] = bag_sums(vectors_ND, found.lengths())
        given = self.means(bags, sparse) | sequences
        return {feature: given[feature] for feature in sparse.keys()}  # noqa: SIM118

    def _weights(self, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Feature → float32 [N], the weights of its ids; without features that have none."""
        weights = sparse.weights_or_none()
        if weights is None:
            return {}
        of_keys = zip(sparse.keys(), weights.split(sparse.length_per_key()), strict=True)
        return {feature: of_key for feature, of_key in of_keys if feature in self._weighted}


def bag_sums(vectors_ND: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """The sum of each bag's vectors: float32 [B, D]; 0 for empty ones."""
    bag_N = torch.arange(len(lengths_B), device=lengths_B.device).repeat_interleave(
        lengths_B, output_size=len(vectors_ND)
    )
    return vectors_ND.new_zeros(len(lengths_B), vectors_ND.shape[1]).index_add(0, bag_N, vectors_ND)


def padded(vectors_ND: torch.Tensor, offsets: torch.Tensor, length: int) -> torch.Tensor:
    """Bags of at most `length` vectors side by side: float32 [B, length, D]; 0 behind the last of each."""
    return torch.ops.fbgemm.jagged_to_padded_dense(vectors_ND, [offsets], [length], 0.0)


def bag_totals(sparse: KeyedJaggedTensor) -> torch.Tensor:
    """Σ wᵢ of each bag (its length when there are no weights), 1 where that is 0: float32 [F, B]."""
    lengths = sparse.lengths()
    weights = sparse.weights_or_none()
    if weights is None:
        return lengths.clamp(min=1).float().view(len(sparse.keys()), -1)
    totals = torch.segment_reduce(weights, "sum", lengths=lengths.long(), unsafe=True)
    return torch.where(totals == 0, 1.0, totals).view(len(sparse.keys()), -1)
