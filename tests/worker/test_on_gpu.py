"""A whole run on GPUs, as far as that can be tried without one: Ray counts GPUs, and workers have stand-ins.

Everything that the driver and the ranks do on CUDA happens: planning, checks at the start, pinned batches,
evaluation while training, asynchronous checkpoints, restarts.
"""

import checkpoints
import parquet
import pytest
import torch
from standin.worker import workers_with_stand_ins

from raytrec.driver import run as driver


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return parquet.dataset(tmp_path_factory.mktemp("gpu") / "d", train=700, valid=130, test=300)


@pytest.fixture
def gpus(ray_with_gpus):
    with workers_with_stand_ins():
        yield


def settings(folder, run, device, **changes):
    return parquet.settings(
        folder,
        run,
        scaling__device=device,
        train__eval_every_steps=3,
        tracking__every_steps=3,
        checks__every_steps=3,
        checkpoint__every_steps=2,
        **changes,
    )


def test_a_run_on_gpus_is_the_run_on_cpus(gpus, folder, tmp_path):
    on_gpu = driver.train(settings(folder, tmp_path / "gpu", "cuda")).metrics
    on_cpu = driver.train(settings(folder, tmp_path / "cpu", "cpu")).metrics
    for name in ("eval.auc", "eval.logloss", "eval.calibration", "train.rows", "train.steps"):
        assert on_gpu[name] == pytest.approx(on_cpu[name], abs=1e-6), name
    one, other = (checkpoints.whole(checkpoints.newest(tmp_path / device)) for device in ("gpu", "cpu"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value.double(), other[name].double(), rtol=0, atol=1e-6), name
