"""What the planner may choose, and its message when nothing fits."""

import pytest
import torch
from ranks import on_ranks

from raytrec.config import RunConfig
from raytrec.errors import ConfigError
from raytrec.schema import Schema


def schema(rows=100):
    tables = {f"t{i}": {"rows": rows, "dim": 8} for i in range(4)}
    return Schema.parse({"labels": ["y"], "sparse": {t: {"table": t} for t in tables}, "tables": tables}, "t")


def planned(rank, world, sharding, rows):
    from raytrec.embeddings.plan import describe
    from raytrec.train.build import build_step

    config = RunConfig.model_validate({"data": {"train": "d/train"}, "plan": {"sharding": sharding}})
    try:
        _, plan = build_step(config, schema(rows), torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return describe(plan)


@pytest.mark.parametrize("sharding", [["table_wise"], ["row_wise"], ["table_wise", "data_parallel"]])
def test_only_allowed_types_and_fused_kernels(sharding):
    one, two = on_ranks(2, planned, sharding, 100)
    assert one == two
    assert [entry["table"] for entry in one] == ["t0", "t1", "t2", "t3"]
    for entry in one:
        assert entry["sharding"] in sharding
        assert entry["kernel"] == ("dense" if entry["sharding"] == "data_parallel" else "fused")
        assert set(entry["ranks"]) <= {0, 1}


def test_tables_that_do_not_fit_are_said():
    messages = on_ranks(1, planned, ["table_wise"], 10**11)
    assert "no plan for 4 tables" in messages[0] and "scaling.workers" in messages[0]
