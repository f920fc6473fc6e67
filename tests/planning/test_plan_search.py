"""The plan search: TorchRec's sharding options, with storage estimated once per shard size."""

import torch
from small import make_small_schema
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from raytrec.embeddings.constraints import TableConstraint
from raytrec.embeddings.sharding import BagSharder
from raytrec.planning.search import MAX_ADDED_SHARDS, estimate_once_per_size, narrow_sharding_types, split_columns

SHARDING_TYPES = ["table_wise", "row_wise", "data_parallel", "column_wise", "table_row_wise", "table_column_wise"]


def enumerate_options(world, tables, kinds, rows=lambda i: 10 + 7 * i, once=False):
    """Return TorchRec's sharding options, with estimates, for tables of different sizes."""
    bags = [
        EmbeddingBagConfig(name=f"t{i}", feature_names=[f"f{i}"], num_embeddings=rows(i), embedding_dim=16)
        for i in range(tables)
    ]
    model = EmbeddingBagCollection(tables=bags, device=torch.device("meta"))
    constraints = {
        bag.name: ParameterConstraints(sharding_types=kinds, compute_kernels=["dense", "fused"], min_partition=4)
        for bag in bags
    }
    topology = Topology(world_size=world, local_world_size=min(4, world), compute_device="cuda")

    class Once(EmbeddingEnumerator):
        def populate_estimates(self, sharding_options):
            estimate_once_per_size(sharding_options, super().populate_estimates)

    enumerator = (Once if once else EmbeddingEnumerator)(topology, 64, constraints)
    return enumerator.enumerate(model, [BagSharder()])


def test_shard_storage_equals_torchrecs_estimate():
    one, other = enumerate_options(8, 5, SHARDING_TYPES), enumerate_options(8, 5, SHARDING_TYPES, once=True)
    assert len(one) == len(other) > 20
    for a, b in zip(one, other, strict=True):
        assert (a.fqn, a.sharding_type) == (b.fqn, b.sharding_type)
        for ours, theirs in zip(b.shards, a.shards, strict=True):
            assert (ours.size, ours.offset, ours.storage) == (theirs.size, theirs.offset, theirs.storage)


def test_storage_is_estimated_once_per_shard_size():
    seen = []
    found = enumerate_options(64, 1, ["row_wise"], rows=lambda i: 64 * 100 - 3)
    estimate_once_per_size(found, lambda few: seen.extend(len(option.shards) for option in few))
    assert max(seen) == 2 and all(len(option.shards) == 64 for option in found)


def schema(tables, features=()):
    return make_small_schema(
        sparse={f"f{i}": {"table": t} for i, t in enumerate([*tables, *features])},
        tables={t: {"rows": rows, "dim": 8} for t, rows in tables.items()},
    )


def test_search_shards_only_large_or_hot_tables_on_many_ranks():
    tables = {f"t{i}": 1000 + i for i in range(1000)} | {"huge": 10**9, "hot": 5}
    few = schema(tables, ["hot"] * 50)
    both = TableConstraint(("table_wise", "row_wise", "data_parallel"))
    constraints = dict.fromkeys(tables, both) | {"t7": TableConstraint(("row_wise",))}
    assert narrow_sharding_types(constraints, few, 8, 10**10) == constraints, (
        "with few ranks, the search keeps all options"
    )
    narrowed = narrow_sharding_types(constraints, few, 1024, 10**10)
    cut = {t for t, constraint in narrowed.items() if "row_wise" in constraint.sharding}
    assert {"huge", "hot", "t7", "t999"} <= cut and "t1" not in cut
    assert len(cut) * 1024 <= MAX_ADDED_SHARDS + 3 * 1024
    copied = {t for t, constraint in narrowed.items() if "data_parallel" in constraint.sharding}
    assert "t1" in copied and "t900" not in copied and len(copied) * 1024 <= MAX_ADDED_SHARDS + 3 * 1024
    assert all("table_wise" in constraint.sharding for t, constraint in narrowed.items() if t != "t7")


def test_search_prefers_table_wise_on_one_rank():
    both, cut = TableConstraint(("row_wise", "table_wise")), TableConstraint(("row_wise",))
    narrowed = narrow_sharding_types({"a": both, "b": cut}, schema({"a": 5, "b": 10**9}), 1, 10**8)
    assert (narrowed["a"].sharding, narrowed["b"].sharding) == (("table_wise",), ("row_wise",))
    assert narrow_sharding_types({"a": both}, schema({"a": 5}), 2, 10**8) == {"a": both}


def test_search_tries_fewer_column_shards_than_ranks():
    kinds = {"a": ["column_wise"], "b": ["table_wise"], "c": ["table_wise", "grid_shard"]}
    given = {name: ParameterConstraints(sharding_types=of, min_partition=8) for name, of in kinds.items()}
    cuts = list(split_columns(given, {"a": 128, "b": 128, "c": 24}))
    assert [{name: each.min_partition for name, each in cut.items()} for cut in cuts] == [
        {"a": 64, "c": 12},
        {"a": 32},
        {"a": 16},
    ]
