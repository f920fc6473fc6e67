"""A loss that is not finite: the run stops and shows the batch, or leaves the step out on all ranks."""

import checkpoints
import numpy as np
import parquet
import pyarrow.parquet as pq
import pytest
import torch
from ranks import on_ranks
from small import SCHEMA, batches, config, train

from raytrec.errors import RunError
from raytrec.train import driver


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Row 900 has a dense value so large that float32 has no loss for it."""
    folder = parquet.dataset(tmp_path_factory.mktemp("nan") / "d")
    path = folder / "train/part-0.parquet"
    table = pq.read_table(path)
    price = table["price"].to_numpy().copy()
    price[900] = 3e38
    pq.write_table(table.set_column(1, "price", [price]), path, row_group_size=300)
    return folder


@pytest.mark.usefixtures("ray_cluster")
def test_stops_and_keeps_the_batch(folder, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(RunError, match="the loss is not a finite number") as error:
        driver.train(parquet.settings(folder, run, checkpoint__every_steps=1, train__epochs=2))
    (dumped,) = (run / "nan").glob("*.parquet")
    table = pq.read_table(dumped)
    assert np.isclose(table["price"].to_numpy().max(), 3e38)
    assert set(table.column_names) == {"label", "price", "user", "tags"}
    step = int(dumped.name.split("-")[1])
    assert f"step {step}" in str(error.value) and "train.on_nan=skip" in str(error.value)
    last = checkpoints.newest(run)
    assert checkpoints.about(last)["progress"]["step"] <= step, "a state with NaN was kept"
    assert all(torch.isfinite(value).all() for value in checkpoints.whole(last).values())


@pytest.mark.usefixtures("ray_cluster")
def test_leaves_the_step_out_and_counts_it(folder, tmp_path):
    result = driver.train(parquet.settings(folder, tmp_path / "run", train__on_nan="skip", train__epochs=2))
    assert result.metrics["train.nan_steps"] == 2
    assert result.metrics["train.rows"] == 2 * (2000 - 128) and result.metrics["eval.auc"] > 0.7


def left_out(rank, world, plan, optimizer, clip):
    """Weights and state after four steps, the third bad on rank 0 alone; and after the other three."""
    from raytrec.checkpoint.state import LogicalState
    from raytrec.train.build import build_step

    settings = config(world, plan, optimizer, on_nan="skip", clip_norm=clip)
    ends, left = [], []
    for bad in (True, False):
        step, _ = build_step(settings, SCHEMA, torch.device("cpu"))
        local = batches(4, rank, world)[1]
        if bad and rank == 0:
            local[2].dense[0, 0] = float("inf")
        if not bad:
            del local[2]
        left.append([outputs.left_out for outputs in train(step, local)])
        tensors = LogicalState(step.model, step.optimizer).tensors()
        parts = {
            name: [s.tensor for s in v.local_shards()] if hasattr(v, "local_shards") else [v]
            for name, v in tensors.items()
        }
        ends.append({name: [p.detach().clone() for p in values] for name, values in parts.items()})
    return left, ends


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "plan,optimizer",
    [
        ({"sharding": "row_wise"}, "adagrad"),
        ({"sharding": "table_wise"}, "rowwise_adagrad"),
        ({"sharding": "row_wise"}, "sgd"),
        ({"sharding": "data_parallel"}, "adam"),
        ({"sharding": "row_wise"}, "adam"),
    ],
)
def test_a_step_that_is_left_out_changes_nothing(plan, optimizer, clip):
    for left, (with_bad, without) in on_ranks(2, left_out, plan, optimizer, clip):
        assert left == [[False, False, True, False], [False] * 3]
        for name, values in without.items():
            for one, other in zip(values, with_bad[name], strict=True):
                assert torch.equal(one, other), name
