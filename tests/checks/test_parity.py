"""That the comparison sees what is wrong, wherever it is."""

import pytest
import torch
from ranks import on_ranks
from small import SCHEMA, config


def failed(rank, world, part, where):
    """The names that fail where one rank's copy of something has been moved by 0.01 before the first step."""
    from raytrec.checks.parity import compare
    from raytrec.embeddings.tables import tables
    from raytrec.train.build import build_step

    def build(*args):
        step, plan = build_step(*args)
        with torch.no_grad():
            if rank == where and part == "table":
                tables(step.model)["user"].weight.local[0].values[3, 2] += 0.01
            elif rank == where:
                next(step.model.module.head.model.logit.parameters())[0, 0] += 0.01
        return step, plan

    settings = config(world, {"sharding": "data_parallel"}, "sgd")
    found = compare(build, settings, SCHEMA, torch.device("cpu"), rows=12, steps=2)
    return {f.name for f in found if not f.error <= f.limit}


@pytest.mark.parametrize("part,name", [("table", "user"), ("dense", "logit.weight")])
def test_replicas_that_differ(part, name):
    assert on_ranks(2, failed, part, None)[0] == set()
    assert name in on_ranks(2, failed, part, 1)[0]
