"""Settings of the process: precision, determinism, garbage collection."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from raytrec.compat.torch_ import mark_only_for_profiler
from raytrec.config.training import TrainSection

# What cuBLAS and NCCL read when they begin. torch (2.13.0) warns of cuBLAS without the first, and sets the
# second itself for process groups that are made while it is deterministic.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}


def prepare_process(train: TrainSection) -> None:
    """Sets what libraries read once, when they begin; to be called before the first collective on a GPU.

    Settings that the environment has already are left as they are.
    """
    mark_only_for_profiler()
    if train.deterministic:
        for name, value in DETERMINISTIC.items():
            os.environ.setdefault(name, value)


def freeze_gc() -> None:
    """Exempts all objects that exist now, which a run needs to its end, from garbage collection.

    A rank has half a million of them: modules, the model, the plan. Python searches the oldest ones only when
    a quarter as many have joined them, so that the cycles that an epoch leaves (Ray Data's executor, with its
    operators and statistics) were kept for some hundred epochs, and each search cost half a second.
    """
    import ray.data  # noqa: F401  (what the first epoch would import stays, too)

    gc.collect()
    gc.freeze()
    gc.collect()  # nearly nothing is tracked now: from here on Python searches often


class Numerics:
    """torch's process-wide switches, as a configuration wants them while a step is computed.

    Between steps they are as they were, so that checks, metrics and other code in this process have float32
    throughout. (bf16 is not such a switch: models.recommender.ModelCall applies it around the dense model.)

    Args:
        train: its matmul and deterministic.
        device: of the rank. tf32 is a format of NVIDIA's tensor cores, and changes nothing on CPU.
    """

    def __init__(self, train: TrainSection, device: torch.device):
        self._on_gpu, self._tf32 = device.type == "cuda", train.matmul == "tf32"
        self._deterministic = train.deterministic

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A block computed so."""
        with ExitStack() as stack:
            if self._on_gpu:
                stack.enter_context(_tf32(self._tf32))
            if self._deterministic:
                stack.enter_context(_deterministic())
            yield


@contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    # Not torch.backends.cuda.matmul.fp32_precision: once that has been set, torch 2.13.0 raises where its own
    # compiler, or a user's model, asks for the precision by its older name. cuDNN, which has RNNs and
    # convolutions, takes no notice of the first, and uses TF32 by default.
    # The precision from before may be TF32: NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1.
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    torch.backends.cudnn.allow_tf32 = wanted
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn


@contextmanager
def _deterministic() -> Iterator[None]:
    before, filled = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads any
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled
