"""Pooling compared with its definition, and values that pooling must not change."""

import pytest
import torch
from ranks import run_on_ranks
from small import build_step_on_rank, make_batches, make_small_config
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from raytrec.embeddings.pooling import BagMeans, sum_bag_weights


def make_sparse(weights=None):
    # a: [1, 2], [], [3]; b: [4], [5, 6, 7], []
    return KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3, 4, 5, 6, 7]), weights, lengths=torch.tensor([2, 0, 1, 1, 3, 0])
    )


def test_bag_weight_sums_are_never_zero():
    assert sum_bag_weights(make_sparse()).tolist() == [[2, 1, 1], [1, 3, 1]]
    weights = torch.tensor([0.5, 1.0, -2.0, 0.0, 1.0, 1.0, 0.25])
    assert sum_bag_weights(make_sparse(weights)).tolist() == [[1.5, 1, -2], [1, 2.25, 1]]


def test_only_mean_features_are_divided():
    sums = KeyedTensor(["a", "b"], [4, 4], torch.full((3, 8), 6.0), key_dim=1)
    out = BagMeans([False, True])(sums, make_sparse())
    assert out["a"].tolist() == [[6.0] * 4] * 3
    assert out["b"].tolist() == [[6.0] * 4, [2.0] * 4, [6.0] * 4]


def run_lookup(rank, world, sharding):
    """Run a lookup; return whether its input is unchanged and whether empty bags give zero."""
    step = build_step_on_rank(make_small_config(world, {"sharding_type": sharding}))
    sparse = make_batches(1, rank, world, "equal")[1][0].sparse
    if world == 1:
        sparse.values()[0] = 10**6  # out of range; FBGEMM corrects it in place
    parts = (sparse.values(), sparse.lengths(), sparse.weights())
    before = [part.clone() for part in parts]
    keys = list(sparse.keys())
    pooled = step.model.module.embeddings(sparse)
    same = [torch.equal(a, b) and a is c for a, b, c in zip(parts, before, _parts(sparse), strict=True)]
    empty = sparse.lengths().view(3, -1) == 0
    zeros = [bool((pooled[key][empty[i]] == 0).all()) for i, key in enumerate(keys)]
    return same, keys == list(sparse.keys()), zeros, int(empty.sum())


def _parts(sparse):
    return sparse.values(), sparse.lengths(), sparse.weights()


@pytest.mark.parametrize("world,sharding", [(1, "table_wise"), (2, "row_wise"), (2, "data_parallel")])
def test_lookup_keeps_input_ids_and_zeros_empty_bags(world, sharding):
    for same, keys, zeros, empty in run_on_ranks(world, run_lookup, sharding):
        assert same == [True] * 3 and keys
        assert zeros == [True] * 3 and empty > 0
