"""A search that is small is TorchRec's own; one that would be large stays small, counted in shards."""

import pytest
import torch
from small import a_schema
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer as Torchrecs
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from raytrec.embeddings.constraints import TableConstraint
from raytrec.embeddings.sharding import BagSharder
from raytrec.planning.search import MOST_PLACED, MOST_SHARDS, GreedyProposer, estimate_once_per_size, narrow

ALL = ["table_wise", "row_wise", "data_parallel", "column_wise", "table_row_wise", "table_column_wise"]


def options(world, tables, kinds, rows=lambda i: 10 + 7 * i, once=False):
    """TorchRec's estimates of tables of different sizes."""
    bags = [
        EmbeddingBagConfig(name=f"t{i}", feature_names=[f"f{i}"], num_embeddings=rows(i), embedding_dim=16)
        for i in range(tables)
    ]
    model = EmbeddingBagCollection(tables=bags, device=torch.device("meta"))
    constraints = {
        bag.name: ParameterConstraints(
            sharding_types=kinds, compute_kernels=["dense", "fused"], min_partition=4
        )
        for bag in bags
    }
    topology = Topology(world_size=world, local_world_size=min(4, world), compute_device="cuda")

    class Once(EmbeddingEnumerator):
        def populate_estimates(self, sharding_options):
            estimate_once_per_size(sharding_options, super().populate_estimates)

    enumerator = (Once if once else EmbeddingEnumerator)(topology, 64, constraints)
    return enumerator.enumerate(model, [BagSharder()])


def test_estimates_of_shards_of_one_size_are_those_of_torchrec():
    one, other = options(8, 5, ALL), options(8, 5, ALL, once=True)
    assert len(one) == len(other) > 20
    for a, b in zip(one, other, strict=True):
        assert (a.fqn, a.sharding_type, a.shards) == (b.fqn, b.sharding_type, b.shards)


def test_each_size_is_estimated_once():
    seen = []
    found = options(64, 1, ["row_wise"], rows=lambda i: 64 * 100 - 3)
    estimate_once_per_size(found, lambda few: seen.extend(len(option.shards) for option in few))
    assert max(seen) == 2 and all(len(option.shards) == 64 for option in found)


@pytest.mark.parametrize("combine, depth", [(max, True), (sum, False)])
def test_a_small_search_is_torchrecs(combine, depth):
    ours, theirs = GreedyProposer(combine), Torchrecs(use_depth=depth)
    for proposer in (ours, theirs):
        proposer.load(options(4, 6, ALL))
    count = 0
    while expected := theirs.propose():
        got = ours.propose()
        assert [(o.fqn, o.sharding_type, o.shards) for o in got] == [
            (o.fqn, o.sharding_type, o.shards) for o in expected
        ]
        for proposer in (ours, theirs):
            proposer.feedback(True)
        count += 1
    assert ours.propose() is None and count > 20


def test_a_large_search_ends_and_begins_and_ends_where_a_small_one_does():
    found = options(64, 60, ["table_wise", "row_wise"], once=True)
    proposer = GreedyProposer(max)
    proposer.load(found)
    proposer._stride = 1
    every = list(proposals(proposer))
    proposer.load(found)
    proposer._stride = 7
    some = list(proposals(proposer))
    assert len(every) == 61 and len(some) == 10
    assert some[0] == every[0] and some[-1] == every[-1] and some[1] == every[7]


def proposals(proposer):
    while proposal := proposer.propose():
        yield [option.sharding_type for option in proposal]
        proposer.feedback(False)


def test_a_search_places_no_more_shards_with_more_tables():
    found = options(128, 70, ["table_wise", "row_wise"], once=True)
    placed = {}
    for tables in (20, 70):
        proposer = GreedyProposer(max)
        proposer.load([option for option in found if int(option.name[1:]) < tables])
        placed[tables] = 0
        while proposal := proposer.propose():
            placed[tables] += sum(option.num_shards for option in proposal)
            proposer.feedback(False)
    assert placed[20] < MOST_PLACED and placed[70] < 1.1 * MOST_PLACED, placed


def schema(tables, features=()):
    return a_schema(
        sparse={f"f{i}": {"table": t} for i, t in enumerate([*tables, *features])},
        tables={t: {"rows": rows, "dim": 8} for t, rows in tables.items()},
    )


def test_only_tables_that_need_it_are_cut_for_every_rank_where_there_are_many():
    tables = {f"t{i}": 1000 + i for i in range(1000)} | {"huge": 10**9, "hot": 5}
    few = schema(tables, ["hot"] * 50)
    both = TableConstraint(("table_wise", "row_wise", "data_parallel"))
    constraints = dict.fromkeys(tables, both) | {"t7": TableConstraint(("row_wise",))}
    assert narrow(constraints, few, 8, 10**10) == constraints, "nothing is narrowed where there is room"
    narrowed = narrow(constraints, few, 1024, 10**10)
    cut = {t for t, constraint in narrowed.items() if "row_wise" in constraint.sharding}
    assert {"huge", "hot", "t7", "t999"} <= cut and "t1" not in cut
    assert len(cut) * 1024 <= MOST_SHARDS + 3 * 1024
    copied = {t for t, constraint in narrowed.items() if "data_parallel" in constraint.sharding}
    assert "t1" in copied and "t900" not in copied and len(copied) * 1024 <= MOST_SHARDS + 3 * 1024
    assert all("table_wise" in constraint.sharding for t, constraint in narrowed.items() if t != "t7")


def test_on_one_rank_no_table_is_cut_that_need_not_be():
    both, cut = TableConstraint(("row_wise", "table_wise")), TableConstraint(("row_wise",))
    narrowed = narrow({"a": both, "b": cut}, schema({"a": 5, "b": 10**9}), 1, 10**8)
    assert (narrowed["a"].sharding, narrowed["b"].sharding) == (("table_wise",), ("row_wise",))
    assert narrow({"a": both}, schema({"a": 5}), 2, 10**8) == {"a": both}
