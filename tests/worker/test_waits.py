"""Every place where an ordinary step may make the host wait for its GPU; a new one fails here.

A step is ordinary when nothing is recorded, checked, saved or evaluated at it.
"""

import loop
import pytest
from ranks import on_ranks
from standin.clock import simulated

# A place that waits, and its callers in raytrec, the innermost first (as many as identify it) → why it may.
SPLITS = "TorchRec reads on the host how many ids go to each rank; on the stream of the ids' exchange"
THROTTLE = "the host is nonfinite.LATE steps ahead; the GPU has work for as many"
ALLOWED = {
    ("torchrec/sparse/jagged_tensor.py:_cuda_to_cpu_safe", "pipeline.py:start_sparse_data_dist"): SPLITS,
    ("torchrec/sparse/jagged_tensor.py:_cuda_to_cpu_safe", "pipeline.py:wait_sparse_data_dist"): SPLITS,
    ("torchrec/sparse/jagged_tensor.py:_cuda_to_cpu_safe", "pooling.py:forward"): SPLITS,
    ("train_pipeline/runtime_forwards.py:<listcomp>", "pipeline.py:start_sparse_data_dist"): SPLITS,
    ("train_pipeline/runtime_forwards.py:__call__", "pipeline.py:start_sparse_data_dist"): SPLITS,
    ("torchrec/distributed/dist_data.py:_get_recat", "pipeline.py:wait_sparse_data_dist"): SPLITS,
    ("nonfinite.py:wait", "nonfinite.py:_read", "nonfinite.py:look", "checkpointing.py:after_step"): THROTTLE,
    ("sums.py:reduce", "progress.py:report"): "each train.log_every_steps, for the line that people read",
    (
        "nonfinite.py:wait",
        "nonfinite.py:skipped",
        "nonfinite.py:step",
    ): "on_nan=skip: the forward pass decides whether optimizers step; the backward pass is queued behind it",
}
CONFIGURATIONS = {
    "default": [],
    "max_grad_norm": ["train.max_grad_norm=0.5"],
    "skip": ["train.on_nan=skip"],
    "skip and max_grad_norm": ["train.on_nan=skip", "train.max_grad_norm=0.5"],
}
FIRST, LAST = 5, 25  # ordinary steps of 30: checks begin before them, the last is saved
UPSTREAM = 13  # waits of TorchRec's in a step, at most
BACKWARD_S = 0.03  # of work that the GPU has after each backward pass, so that the host gets ahead


def waits(rank, world, changes, folder):
    """{(where, callers in raytrec, whether the GPU ran dry)} of the ordinary steps."""
    from standin import Gpu

    gpu, found = Gpu.active, set()
    made = loop.make(rank, world, 30, changes, folder)
    pipeline = made.step._pipeline
    backward = pipeline._backward

    def longer(losses):
        backward(losses)
        gpu.work(BACKWARD_S * (FIRST <= made.progress.step < LAST))

    def after(made):
        if made.progress.step == FIRST:
            gpu.waits.clear()
        if made.progress.step == LAST:
            found.update((wait.where, wait.callers, wait.drains) for wait in gpu.waits)
            of_torchrec = sum(not wait.where.startswith("raytrec/") for wait in gpu.waits)
            assert of_torchrec <= UPSTREAM * (LAST - FIRST), of_torchrec

    pipeline._backward = longer
    with simulated():
        made.train(30, after)
    assert made.error is None, made.error
    return found


def allowed(where, callers):
    """The key of ALLOWED that a wait belongs to; None: of none."""
    ours = where.startswith("raytrec/")
    for key in ALLOWED:
        places = callers if ours else (where, *callers)
        if len(places) >= len(key) and all(p.endswith(k) for p, k in zip(places, key, strict=False)):
            return key
    return None


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_ordinary_steps_wait_only_where_they_may(name, tmp_path):
    for found in on_ranks(2, waits, CONFIGURATIONS[name], str(tmp_path), device="cuda"):
        new = sorted({(where, *callers) for where, callers, _ in found if not allowed(where, callers)})
        assert not new, "the host waits for the GPU in every step, at a place that is not in ALLOWED"
        used = {allowed(where, callers) for where, callers, _ in found}
        skips = {key for key in ALLOWED if key[1] == "nonfinite.py:skipped"}
        assert used == set(ALLOWED) - (skips if "skip" not in name else set()), "nothing waits there any more"
        dry = {allowed(where, callers) for where, callers, drains in found if drains}
        assert dry <= {("sums.py:reduce", "progress.py:report")}, "the GPU has nothing to do meanwhile"
