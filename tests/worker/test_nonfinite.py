"""Nonfinite losses: the run stops and dumps the batch, or all ranks skip the step."""

import json
import shutil

import checkpoints
import numpy as np
import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from small import assert_same_state, build_step_on_rank, copy_local_state, make_batches, make_small_config, train_step

from raytrec.common.errors import RunError
from raytrec.driver import run as driver
from raytrec.driver.evaluation import evaluate


def make_diverging_config(folder, place, **train):
    """Return a config whose prices and learning rate make the dense layers overflow in the second step."""
    data = shutil.copytree(folder, place / "diverging")
    for part in (data / "train").glob("*.parquet"):
        table = pq.read_table(part)
        prices = pa.array(table["price"].to_numpy() * 1e10)
        pq.write_table(table.set_column(table.column_names.index("price"), "price", prices), part)
    values = parquet.config_values(data, place / "run", checkpoint__every_steps=1)
    values["optim"] = {"dense": {"name": "sgd", "lr": 1e9}}
    values["train"] = train
    return values


def copy_with_outlier_row(folder, place, price):
    """Copy the data and change one row of the second file.

    Its price makes the logit far below 0, and its label is 1.
    """
    copied = shutil.copytree(folder, place)
    for name, value in (("price", price), ("label", 1)):
        parquet.change_column_values(copied / "train/part-1.parquet", name, {123: value}, row_group_size=300)
    return copied


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_nonfinite_loss_stops_the_run_and_dumps_the_batch(tiny_data, tmp_path):
    """The dump contains the batch of the nonfinite step, including the bad row, and no later batch."""
    run, data = tmp_path / "run", copy_with_outlier_row(tiny_data, tmp_path / "d", 3e38)
    values = parquet.config_values(data, run, checkpoint__every_steps=1)
    values["model"] = {"name": "dcn", "bottom_mlp": [16], "top_mlp": [16]}  # cross layers square the price
    with pytest.raises(RunError, match="the loss is not a finite number") as error:
        driver.train(values)
    dumped = sorted((run / "nan").glob("*.parquet"))
    assert 1 <= len(dumped) <= 2, "one file per rank with a nonfinite loss"
    table = pa.concat_tables(map(pq.read_table, dumped))
    assert table.num_rows in range(60, 130) and set(table.column_names) == {"label", "price", "user", "tags"}
    assert np.float32(3e38) in table["price"].to_numpy(), "the batch of another step"
    step = int(dumped[0].name.split("-")[1])
    assert f"step {step};" in str(error.value) and "train.on_nan=skip" in str(error.value)
    last = checkpoints.newest_checkpoint(run)
    assert checkpoints.read_about(last)["progress"]["step"] < step, "a state with NaN was kept"
    read = pq.read_table(data / "train").to_pylist()
    known = {(row["user"], round(row["price"], 4), row["label"]) for row in read}
    assert {(r["user"][0], round(r["price"], 4), r["label"]) for r in table.to_pylist()} <= known


@pytest.mark.survive
@pytest.mark.usefixtures("ray_cluster")
def test_infinite_state_ends_the_run_without_a_checkpoint(tiny_data, tmp_path, capfd):
    """The square of the price overflows: Adam's second moment is infinite, and the loss stays finite."""
    run, data = tmp_path / "run", copy_with_outlier_row(tiny_data, tmp_path / "d", 1e25)
    with pytest.raises(RunError, match="is NaN or infinite") as error:
        driver.train(parquet.config_values(data, run, checkpoint__every_steps=2, checkpoint__keep_last=9))
    said, kept = error.value, checkpoints.newest_checkpoint(run)
    assert "exp_avg_sq: a value is NaN or infinite on ranks 0 and 1" in said.what
    assert f"raytrec train --warm-start {run} optim.embeddings.lr=0.01" in said.do
    step, last = int(said.where.split()[1].strip(",")), checkpoints.read_about(kept)["progress"]["step"]
    assert 0 < last == step - 2, "the last checkpoint before the infinite state"
    assert all(value.isfinite().all() for value in checkpoints.read_tensors(kept).values())
    assert not (run / "result.json").exists()
    assert json.loads((run / "driver.json").read_text())["status"] == "FAILED"


@pytest.mark.survive
@pytest.mark.usefixtures("ray_cluster")
def test_infinite_state_is_not_saved_when_check_warns(tiny_data, tmp_path, capfd):
    run, data = tmp_path / "run", copy_with_outlier_row(tiny_data, tmp_path / "d", 1e25)
    with pytest.raises(driver.Unfinished, match="contains NaN or infinity") as error:
        driver.train(parquet.config_values(data, run, checkpoint__every_steps=2, checks__finite="warn"))
    assert error.value.result.metrics["train.steps"] == 16 and error.value.result.metrics["eval.rows"] == 1003
    assert " the checkpoint of step 16 was not saved: " in " ".join(capfd.readouterr().err.split())
    kept = checkpoints.newest_checkpoint(run)
    assert checkpoints.read_about(kept)["progress"]["step"] < 16
    assert not (run / "result.json").exists()
    checkpoints.set_first_value_infinite(kept, "tables/user/weight")  # as if other software had written the checkpoint
    evaluate(str(run), str(tiny_data / "test"))
    said = " ".join(capfd.readouterr().err.split())
    assert "metrics may be invalid: the checkpoint contains NaN or infinity: table user's weight on rank 0" in said


@pytest.mark.survive
@pytest.mark.usefixtures("ray_cluster")
def test_nonfinite_steps_are_skipped_and_counted(tiny_data, tmp_path):
    metrics = driver.train(make_diverging_config(tiny_data, tmp_path, on_nan="skip")).metrics
    assert 10 < metrics["train.nan_steps"] < metrics["train.steps"] == 16
    left_out = metrics["train.nan_steps"]  # the last steps: the weights stay nonfinite
    assert metrics["train.rows"] == 2000 - (2000 % 128) - 128 * (left_out - 1)
    assert metrics["train.skipped_rows"] == 2000 - metrics["train.rows"]


def train_with_skipped_step(rank, world, plan, optimizer, clip):
    """Return the state after four steps, the third nonfinite on rank 0, and after the three finite steps."""
    settings = make_small_config(world, plan, optimizer, on_nan="skip", max_grad_norm=clip)
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
    ends, left = [], []
    for bad in (True, False):
        step = build_step_on_rank(settings, device=device)
        local = make_batches(4, rank, world)[1]
        if bad and rank == 0:
            local[2].dense[0, 0] = float("inf")
        if not bad:
            del local[2]
        left.append([outputs.skipped for outputs in train_step(step, local)])
        ends.append(copy_local_state(step))
    return left, ends


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "sharding,optimizer,device",
    [
        ("row_wise", "adagrad", "cpu"),
        ("table_wise", "rowwise_adagrad", "cpu"),
        ("row_wise", "sgd", "cpu"),
        ("data_parallel", "adam", "cpu"),
        ("row_wise", "adam", "cpu"),
        ("row_wise", "adagrad", "cuda"),
        ("data_parallel", "adam", "cuda"),
    ],
)
def test_skipped_step_changes_no_state(sharding, optimizer, device, clip):
    plan = {"sharding_type": sharding}
    for left, ends in run_on_ranks(2, train_with_skipped_step, plan, optimizer, clip, device=device):
        assert left == [[False, False, True, False], [False] * 3]
        assert_same_state(*ends)
