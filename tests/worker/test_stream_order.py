"""Order of streams in a training loop on the stand-in, and mutations of raytrec that must be found.

The GPU is behind the host, so that an event that happens to have finished orders nothing.
"""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import test_waits
from ranks import run_on_ranks
from standin.clock import use_simulated_clock
from standin.device import StandInStream
from standin.stream_order import check_stream_order

STEPS = 6
# Without "averages", whose saves copy host tensors into the same buffer; the checks do not tell its parts apart.
CONFIGURATIONS = ["skip and max_grad_norm"]
CONFIGURATIONS += [pytest.param(name, marks=pytest.mark.slow) for name in ("managed ids", "sasrec")]
CONFIGURATIONS += [pytest.param(name, marks=pytest.mark.survive) for name in ("caches", "in-batch softmax")]


@contextmanager
def without_wait_for(find_stream):
    """Remove the waits of all streams for one stream of the loop."""
    wait_stream = StandInStream.wait_stream

    def wait(self, other):
        if other is not find_stream():
            wait_stream(self, other)

    with patch.object(StandInStream, "wait_stream", wait):
        yield


def without_record_stream(pipeline):
    return patch("raytrec.data.batch.Batch.record_stream", lambda self, stream: None)


def without_wait_for_prefetch(pipeline):
    return without_wait_for(lambda: pipeline._prefetch_stream)


def without_wait_for_batch(pipeline):
    return without_wait_for(lambda: pipeline._memcpy_stream)


def without_wait_for_losses(pipeline):
    return patch("raytrec.worker.nonfinite.AsyncHostCopy.wait", lambda self: self._values)


# Mutation → configuration, and part of an error that it must cause.
MUTATIONS = {
    without_record_stream: ("skip and max_grad_norm", "allocation on stream"),
    without_wait_for_prefetch: ("caches", "bounds_check_indices"),
    without_wait_for_batch: ("skip and max_grad_norm", "copy to the device"),
    without_wait_for_losses: ("averages", "the host is not ordered after aten::copy_"),
}


def find_errors(rank, world, name, folder, mutate=None):
    """Train a configuration of test_waits for a few steps; return the accesses without an order."""
    case = test_waits.CONFIGURATIONS[name]
    with check_stream_order() as order, use_simulated_clock():
        loop = test_waits.make_slow_loop(rank, world, case, STEPS, folder, range(STEPS + 1))
        with mutate(loop.step._pipeline) if mutate else nullcontext():
            loop.train(STEPS)
    assert mutate or loop.error is None, loop.error
    return order.errors


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_orders_all_accesses_of_streams(name, tmp_path):
    for errors in run_on_ranks(2, find_errors, name, str(tmp_path), device="cuda"):
        assert not errors


@pytest.mark.parametrize(
    "mutate",
    [pytest.param(m, marks=[] if m is without_wait_for_batch else pytest.mark.slow) for m in MUTATIONS],
    ids=lambda mutate: mutate.__name__,
)
def test_a_removed_wait_is_found(mutate, tmp_path):
    name, expected = MUTATIONS[mutate]
    for errors in run_on_ranks(2, find_errors, name, str(tmp_path), mutate, device="cuda"):
        assert any(expected in error for error in errors), errors
