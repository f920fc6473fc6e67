"""Rows per second of training, where the host is ahead of its GPU."""

import pytest
import torch
from standin import cuda, device
from standin.clock import Time

from raytrec.worker import progress as rank
from raytrec.worker.progress import Clock


def test_a_gpus_last_steps_count_until_they_have_ended():
    time = Time()
    with time.of(device, "perf_counter", "sleep"), time.of(rank, "perf_counter"), cuda() as gpu:
        clock = Clock()
        clock.resume()
        for _ in range(6):
            gpu.work(0.05)
            clock.step(100)
        assert clock.seconds < 0.1, "the host has not waited"
        clock.pause(torch.device("cuda", 0))
        assert (clock.rows, clock.seconds) == (500, pytest.approx(0.3, rel=0.01))


def test_on_cpu_a_pause_adds_nothing():
    clock = Clock()
    clock.resume()
    clock.step(100)
    clock.step(100)
    before = clock.seconds
    clock.pause(torch.device("cpu"))
    assert clock.seconds == before
