"""What the planner may choose, what it must keep to, and its message when nothing fits."""

import pytest
import torch
from ranks import on_ranks

from raytrec.config import RunConfig
from raytrec.errors import ConfigError
from raytrec.schema import Schema


def schema(rows=100):
    tables = {f"t{i}": {"rows": rows, "dim": 8} for i in range(4)}
    return Schema.parse({"labels": ["y"], "sparse": {t: {"table": t} for t in tables}, "tables": tables}, "t")


def planned(rank, world, plan, rows=100, optimizer="adagrad"):
    """describe(plan), and for each table the offsets of its shards; or the error."""
    from raytrec.embeddings.plan import describe
    from raytrec.train.build import build_step

    config = RunConfig.model_validate(
        {
            "data": {"train": "d/train"},
            "scaling": {"workers": world},
            "optim": {"embeddings": {"name": optimizer}},
            "plan": plan,
        }
    )
    try:
        _, plan = build_step(config, schema(rows), torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    entries = describe(plan)
    for entry in entries:
        (module,) = plan.plan.values()
        spec = module[entry["table"]].sharding_spec
        entry["offsets"] = [shard.shard_offsets for shard in spec.shards] if spec else None
    return entries


@pytest.mark.parametrize("sharding", [["table_wise"], ["row_wise"], ["table_wise", "data_parallel"]])
def test_only_allowed_types_and_fused_kernels(sharding):
    one, two = on_ranks(2, planned, {"sharding": sharding})
    assert one == two
    assert [entry["table"] for entry in one] == ["t0", "t1", "t2", "t3"]
    for entry in one:
        assert entry["sharding"] in sharding
        assert entry["kernel"] == ("dense" if entry["sharding"] == "data_parallel" else "fused")
        assert set(entry["ranks"]) <= {0, 1}


def test_tables_that_do_not_fit_are_said():
    messages = on_ranks(1, planned, {"sharding": ["table_wise"]}, 10**11)
    assert "no plan for 4 tables" in messages[0] and "scaling.workers" in messages[0]


def test_what_is_settled_by_hand_is_kept():
    plan = {
        "tables": {
            "t0": {"ranks": [3]},
            "t1": {"sharding": "column_wise", "ranks": [2, 1]},
            "t2": {"sharding": "table_row_wise", "ranks": [2, 3]},
            "t3": {"sharding": "row_wise", "kernel": "fused_uvm"},
        }
    }
    t0, t1, t2, t3 = on_ranks(4, planned, plan, hosts=2)[0]
    assert (t0["sharding"], t0["ranks"]) == ("table_wise", [3])
    assert (t1["sharding"], t1["ranks"], t1["offsets"]) == ("column_wise", [2, 1], [[0, 0], [0, 4]])
    assert (t2["sharding"], t2["ranks"], t2["offsets"]) == ("table_row_wise", [2, 3], [[0, 0], [50, 0]])
    assert (t3["sharding"], t3["ranks"], t3["kernel"]) == ("row_wise", [0, 1, 2, 3], "fused_uvm")


def test_groups_lie_on_one_rank_and_the_rest_is_balanced():
    plan = {"sharding": ["table_wise"], "together": [["t0", "t3"]]}
    t0, t1, t2, t3 = on_ranks(2, planned, plan)[0]
    assert t0["ranks"] == t3["ranks"]
    assert t1["ranks"] == t2["ranks"] != t0["ranks"]
    plan["tables"] = {"t3": {"ranks": [1]}}
    t0, *_, t3 = on_ranks(2, planned, plan)[0]
    assert t0["ranks"] == t3["ranks"] == [1]


@pytest.mark.parametrize("sharding", ["column_wise", "table_column_wise", "grid_shard"])
def test_column_shards_lie_on_different_ranks(sharding):
    for entry in on_ranks(4, planned, {"sharding": [sharding]}, hosts=2)[0]:
        assert entry["sharding"] == sharding
        ranks = entry["ranks"]
        assert len(set(ranks)) == len(ranks) == (4 if sharding == "grid_shard" else 2)
        if sharding == "table_column_wise":
            assert ranks[0] // 2 == ranks[1] // 2  # one host
        if sharding == "grid_shard":
            assert entry["offsets"] == [[0, 0], [50, 0], [0, 4], [50, 4]]


def test_a_group_without_room_is_refused():
    # 4 tables of 0.03 GiB.
    plan = {"sharding": ["table_wise"], "together": [["t*"]], "memory_gib": 0.1}
    message = on_ranks(2, planned, plan, 10**6, "sgd")[0]
    assert "t0, t1, t2, t3" in message and "on one rank" in message and "0.10 GiB" in message


def test_tables_settled_on_a_full_rank_are_refused():
    tables = {"t*": {"ranks": [1]}, "t3": {"sharding": "column_wise", "ranks": [1, 0]}}
    plan = {"sharding": ["table_wise"], "tables": tables, "memory_gib": 0.1}
    message = on_ranks(2, planned, plan, 10**6, "sgd")[0]
    assert "does not fit on rank 1" in message
