"""A whole run on simulated GPUs: Ray counts GPUs, and the workers use stand-ins for CUDA.

The driver and the ranks execute their CUDA code paths: planning, checks at the start, pinned batches,
evaluation while training, asynchronous checkpoints, restarts.
"""

import checkpoints
import parquet
import pytest
import torch
from standin.worker import use_stand_in_workers

from raytrec.driver import run as driver


@pytest.fixture
def gpus(ray_with_gpus):
    with use_stand_in_workers():
        yield


@pytest.mark.survive
def test_gpu_run_matches_cpu_run(gpus, tiny_data, tmp_path):
    every = {f"{section}__every_steps": 3 for section in ("tracking", "checks")}
    every |= {"train__max_steps": 6, "train__eval_every_steps": 3, "checkpoint__every_steps": 2}
    on_gpu, on_cpu = (
        driver.train(parquet.config_values(tiny_data, tmp_path / place, scaling__device=device, **every)).metrics
        for place, device in (("gpu", "cuda"), ("cpu", "cpu"))
    )
    for name in ("eval.auc", "eval.logloss", "eval.calibration", "train.rows", "train.steps"):
        assert on_gpu[name] == pytest.approx(on_cpu[name], abs=1e-6), name
    one, other = (
        checkpoints.read_tensors(checkpoints.newest_checkpoint(tmp_path / device)) for device in ("gpu", "cpu")
    )
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value.double(), other[name].double(), rtol=0, atol=1e-6), name
