"""Models between ranks: what one plan has saved, another takes up, and goes on like the first."""

import pytest
import torch
from ranks import on_ranks
from small import SCHEMA, batches, build, config

SECTIONS = {
    "dcn": {"name": "dcn", "cross_rank": 3, "top_mlp": [6]},
    "two_tower": {"name": "two_tower", "towers": {"query": ["user", "a"], "item": ["friends", "tags", "b"]}},
    "sequence": {"name": "sequence", "max_length": 2, "target": "user", "top_mlp": [6]},
}


def state_after(rank, world, name, plan, root, first, last):
    """Trains steps first to last, from what is in root, if anything is; dense parameters and tables."""
    from raytrec.checkpoint.restore import restore
    from raytrec.checkpoint.save import Saver
    from raytrec.checkpoint.state import LogicalState
    from raytrec.config.features import resolve_features
    from raytrec.config.run_config import load_config
    from raytrec.embeddings.tables import tables

    schema = SCHEMA.model_copy(deep=True)
    schema.sparse["tags"].pooling = schema.sparse["friends"].pooling = "sequence"
    settings = config(world, {"sharding_type": plan})
    values = settings.model_dump(by_alias=True) | {"model": SECTIONS[name]}
    settings = load_config(values)
    step = build(settings, schema)
    state = LogicalState(step.model, step.optimizer)
    assert bool(restore(root, state).folder) == bool(first)
    local = batches(last, rank, world, schema=schema, features=resolve_features(schema, settings.model))[1][
        first:
    ]
    for _ in step.train(iter(local), len(local)):
        pass
    saver = Saver(root, settings.checkpoint)
    saver.save(last, state.tensors(), {})
    assert saver.taken().error is None
    found = {key: p.detach().clone() for key, p in step.model.module.head.model.named_parameters()}
    whole = {table.name: table.weight.dense(first_only=True) for table in tables(step.model).values()}
    return found | whole


@pytest.mark.parametrize("name", SECTIONS)
def test_goes_on_under_another_plan(name, tmp_path):
    whole = on_ranks(1, state_after, name, "table_wise", str(tmp_path / "whole"), 0, 6)[0]
    place = str(tmp_path / "parts")
    on_ranks(2, state_after, name, "row_wise", place, 0, 3)
    parts = on_ranks(3, state_after, name, "column_wise", place, 3, 6)[0]
    assert set(parts) == set(whole)
    for key, values in whole.items():
        torch.testing.assert_close(
            parts[key], values, rtol=0, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}"
        )
