"""Deltas that a run has written lead exports, models in memory and services to the run's states."""

from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
from ranks import run_on_ranks
from test_apply import assert_equal_models
from test_delta_run import followed  # noqa: F401
from test_publish import CASES, begin_state, create_stream, mark_slow, train

import raytrec
from raytrec.deltas.apply import read_delta
from raytrec.deltas.chain import Position, find_stream, iterate_exports
from raytrec.deltas.format import read_delta_manifest
from raytrec.exporting.apply_deltas import apply_deltas


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_slow(["column_wise", "grid_shard", "managed ids, column-wise"], list(CASES)[3:]))
def test_deltas_of_sharded_tables_are_read_as_whole_rows(name, tmp_path):
    world, plan, schema, settings = CASES[name]
    create_stream(tmp_path)
    states, _ = run_on_ranks(world, train, str(tmp_path), plan, schema, settings)[0]
    (tables, ids, _), number, folder = begin_state(states), 1, f"{tmp_path}/deltas"
    assert find_stream(folder).run == "run"
    weights = {name: torch.from_numpy(value) for name, value in states[max(states)][2].items()}
    while found := read_delta_manifest(folder, number):
        delta = read_delta(folder, Position("run", *found), schema, weights)
        for table, changes in delta.rows.items():
            tables[table][changes.rows.numpy()] = changes.values.numpy()
        for table, changes in delta.ids.items():
            ids[table] = {row: id for row, id in ids[table].items() if row not in set(changes.listed.tolist())}
            ids[table] |= zip(changes.rows.tolist(), changes.ids.tolist(), strict=True)
        run_tables, run_ids, run_dense = states[found[0].step]
        assert all(np.array_equal(tables[table], values) for table, values in run_tables.items())
        assert ids == run_ids
        assert all(np.array_equal(delta.dense[weight], value) for weight, value in run_dense.items())
        number += 1
    assert found is None and number > 2


@pytest.mark.survive
@pytest.mark.usefixtures("ray_cluster")
def test_exports_with_deltas_equal_the_last_checkpoint(followed, tmp_path):  # noqa: F811
    from raytrec.serving.follow import Follower

    run, folder = followed
    expected = raytrec.load(raytrec.export(run.path, str(tmp_path / "last")).path)
    assert f"step-{run.metrics['train.steps']:010d}" == Path(checkpoints.newest_checkpoint(run.path)).name
    for place, (uri, _) in enumerate(iterate_exports(str(folder))):
        out = apply_deltas(uri, str(folder), str(tmp_path / f"out{place}"))
        offline = raytrec.load(out.path, check_tables=True)
        assert_equal_models(offline, expected)
        assert offline.manifest.source.step == expected.manifest.source.step
    follower = Follower(str(folder))
    assert_equal_models(follower.versions.current.scorer, expected)
    assert follower.position.manifest.last and follower.problem is None
