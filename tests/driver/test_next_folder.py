"""Runs of jobs/dlrm_v4.yaml on small generated data, evaluated on each day before it is trained."""

from pathlib import Path

import pytest
from raytrec_datasets import app
from typer.testing import CliRunner

from raytrec.common.errors import ConfigError, DataError
from raytrec.common.messages import Eval
from raytrec.config.run_config import load_config
from raytrec.driver import run as driver
from raytrec.driver.datasets import open_data
from raytrec.tracking.run_folder import RunFolder

JOB = Path(__file__).parents[2] / "jobs/dlrm_v4.yaml"
DAYS, BATCH = 5, 32
SMALL = {
    "data.global_batch_size": BATCH,
    "data.buffer_gib": 0.25,
    "data.lanes": 6,
    "data.readers": 1,
    "scaling": {"device": "cpu", "num_workers": 2},
    "model.max_length": 12,
    "model.dim": 16,
    "model.width": 16,
    "model.blocks": 1,
    "model.encoder": 8,
    "model.tower_mlp": [8],
    "model.input_dropout": 0.0,  # dropout depends on the rank
    "model.dropout": 0.0,
    "tasks": [{"label": "listen_plus"}, {"label": "liked"}],
    "optim.dense.lr": 0.01,
    "optim.embeddings.lr": 0.05,
    "optim.schedule.warmup_steps": 0,
    "plan.qcomms": {},
    "train.matmul": "fp32",
    "train.early_stopping": None,
    "tracking.enabled": False,
    "tracking.report": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("yambda") / "data"
    options = "--out", folder, "--synthetic", 20, "--days", DAYS, "--history", 12, "--dim", 8
    assert CliRunner().invoke(app, ["yambda", *map(str, options)]).exit_code == 0
    return folder


def make_config(folder, **overrides):
    paths = {f"data.{name}": f"{folder}/{name}" for name in ("train", "test")}
    return load_config(JOB, {**SMALL, **paths, "data.schema": f"{folder}/schema.yaml", **overrides})


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory, ray_cluster):
    place = tmp_path_factory.mktemp("runs")

    def train(workers):
        config = make_config(folder, **{"scaling.num_workers": workers, "run.dir": str(place / f"w{workers}")})
        return driver.train(config)

    return train


@pytest.mark.slow
def test_days_are_evaluated_before_they_are_trained_on_any_number_of_workers(run, folder):
    results = [run(workers) for workers in (1, 2)]
    _, datasets = open_data(make_config(folder))
    sizes = [group.rows for group in datasets["train"].groups]
    starts = [sum(sizes[:day]) // BATCH for day in range(1, DAYS - 1)]
    by_day = [RunFolder.read(result.path).figures(Eval) for result in results]
    for lines in by_day:
        days = [line for line in lines if type(line) is Eval]
        assert [line.step for line in days] == starts
        assert [line.figure("rows") for line in days] == sizes[1:]
    for one, two in zip(*by_day, strict=True):
        for task in ("listen_plus", "liked"):
            assert one.figure(f"{task}.auc") == pytest.approx(two.figure(f"{task}.auc"), abs=1e-4)
    one, two = (result.metrics for result in results)
    assert one["eval.listen_plus.auc"] == pytest.approx(two["eval.listen_plus.auc"], abs=1e-4)
    assert one["train.flops_per_s"] > 0
    assert "train.mfu" not in one


@pytest.mark.parametrize(
    "overrides",
    [{"data.shuffle": "window"}, {"train.epochs": 2}, {"data.test": None}, {"data.holdout": 0.1}],
    ids=lambda overrides: next(iter(overrides)),
)
def test_next_folder_requires_one_pass_in_file_order(folder, overrides):
    with pytest.raises(ConfigError, match="next_folder"):
        make_config(folder, **overrides)


def test_next_folder_requires_a_second_folder(folder):
    day = next(Path(folder, "train").iterdir())
    with pytest.raises(DataError, match="begins after the first global batch"):
        open_data(make_config(folder, **{"data.train": str(day)}))


def test_folders_that_begin_in_the_same_batch_are_evaluated_together(folder):
    train = open_data(make_config(folder))[1]["train"]
    sizes = [group.rows for group in train.groups]
    parts = train.split_after_first_folder(sizes[0] + 1)
    assert sum(part.rows for part in parts.values()) < sum(sizes[1:])  # the second day begins in the first batch
    parts = train.split_after_first_folder(sizes[0])
    assert list(parts) == sorted({sum(sizes[:day]) // sizes[0] for day in range(1, DAYS - 1)})
    assert sum(part.rows for part in parts.values()) == sum(sizes[1:])
