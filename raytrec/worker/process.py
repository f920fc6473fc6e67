"""Configure a worker process and torch's numerics, and measure the load of the process, its host and its GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

import psutil
import torch

from raytrec.common.machine import get_cuda_handle
from raytrec.compat.torch_ import limit_compile_processes, skip_unprofiled_records
from raytrec.config.training import TrainSection

GPU_POLL_INTERVAL_S = 1.0
# Variables that cuBLAS and NCCL read at initialization. Without CUBLAS_WORKSPACE_CONFIG, torch (2.13.0) issues a
# warning. torch itself sets NCCL_ALGO for process groups created in deterministic mode.
DETERMINISTIC_ENV = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}
# The exchange of managed ids has its own NCCL communicator. Without this variable (NCCL 2.26 or newer), kernels of
# two communicators can wait for each other. With it, NCCL runs them in the order of the host's calls, which is the
# same on all ranks if a single thread makes all calls. A launch takes about 4 µs longer.
MANAGED_ENV = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
MAX_COMPILE_PROCESSES = 32  # torch's limit


def prepare_process(train: TrainSection, has_managed_ids: bool = False) -> None:
    """Configure torch, cuBLAS and NCCL in this process.

    torch's profiling records are disabled while no profiler runs. With train.compile, the number of torch's compile
    processes is limited. Call before the first matrix product or collective on a GPU, because cuBLAS and NCCL read
    environment variables at initialization. Variables that are already set in the environment are kept.

    Args:
        train: Configuration section with `compile` and `deterministic`.
        has_managed_ids: True if a table of the run has managed ids.
    """
    skip_unprofiled_records()
    variables = (DETERMINISTIC_ENV if train.deterministic else {}) | (MANAGED_ENV if has_managed_ids else {})
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if train.compile and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        # Each rank starts its own compile processes, for the same kernels. Readers need the other half of the CPUs.
        share = (os.cpu_count() or 1) // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        limit_compile_processes(max(1, min(share, len(os.sched_getaffinity(0)), MAX_COMPILE_PROCESSES)))


def freeze_gc() -> None:
    """Exempt all existing objects from Python's garbage collection, because a run needs them until its end.

    A rank has half a million objects: modules, the model and the plan. Python collects the oldest generation
    only after it has grown by a quarter. Each epoch leaves reference cycles (Ray Data's executor, with its
    operators and statistics). Without this call, these cycles would live for about a hundred epochs, and each
    collection would take half a second (CPython 3.11).
    """
    import ray.data  # noqa: F401  (the first epoch would import it after the freeze)

    gc.collect()
    gc.freeze()
    gc.collect()  # few objects are tracked from now on, so Python collects often


class SystemMonitor:
    """Monitor of the load of this process, its host and its GPU.

    Metrics that cannot be read are None; no error is raised.

    Args:
        device: Device of the rank, such as 'cpu' or 'cuda:0', as text or torch.device. On CUDA, a thread
            reads the GPU's utilization once per second until `close` is called.
    """

    def __init__(self, device: Any = "cpu"):
        self._process = _read_or_none(psutil.Process)
        self._gpu = _read_or_none(lambda: _GpuMonitor(str(device))) if str(device).startswith("cuda") else None
        self._previous: tuple[float, int, int] | None = None
        self.sample()  # start of the interval for the next sample's averages

    def sample(self) -> dict[str, float | None]:
        """Return current metrics and averages since the last call.

        Returns:
            Values by name: cpu_percent (100 is one core, all threads of this process), rss_bytes (of this process),
            host_memory_percent, network_sent_bytes_per_s and network_received_bytes_per_s (of the host,
            without loopback), gpu_percent (share of time with a kernel running), gpu_memory_bytes (all
            processes on the rank's GPU).
        """
        sent, received = _read_or_none(self._measure_network) or (None, None)
        gpu_percent, gpu_memory = self._gpu.read() if self._gpu else (None, None)
        return {
            "cpu_percent": _read_or_none(lambda: self._process.cpu_percent(interval=None)),
            "rss_bytes": _read_or_none(lambda: self._process.memory_info().rss),
            "host_memory_percent": _read_or_none(lambda: psutil.virtual_memory().percent),
            "network_sent_bytes_per_s": sent,
            "network_received_bytes_per_s": received,
            "gpu_percent": gpu_percent,
            "gpu_memory_bytes": gpu_memory,
        }

    def close(self) -> None:
        """Stop the thread that reads the GPU."""
        if self._gpu:
            self._gpu.close()

    def _measure_network(self) -> tuple[float, float] | None:
        """Return the bytes per second sent and received since the last call; None at the first call or after 0 s."""
        counters = [c for name, c in psutil.net_io_counters(pernic=True).items() if name not in ("lo", "lo0")]
        now = (monotonic(), sum(c.bytes_sent for c in counters), sum(c.bytes_recv for c in counters))
        previous, self._previous = self._previous, now
        if previous is None or now[0] <= previous[0]:
            return None
        seconds = now[0] - previous[0]
        return (now[1] - previous[1]) / seconds, (now[2] - previous[2]) / seconds


class _GpuMonitor:
    """Monitor of one GPU over NVML; a thread reads its utilization once per second, to average the readings."""

    def __init__(self, device: str):
        import pynvml

        pynvml.nvmlInit()
        self._handle = get_cuda_handle(device)
        self._lock, self._over = Lock(), Event()
        self._readings: list[int] = []
        Thread(target=self._watch, name="gpu", daemon=True).start()

    def read(self) -> tuple[float | None, int | None]:
        """Return the GPU's mean utilization since the last call in percent, and its memory in use in bytes."""
        import pynvml

        with self._lock:
            readings, self._readings = self._readings, []
        percent = sum(readings) / len(readings) if readings else None
        return percent, _read_or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        import pynvml

        while not self._over.wait(GPU_POLL_INTERVAL_S):
            percent = _read_or_none(lambda: pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
            if percent is not None:
                with self._lock:
                    self._readings.append(percent)


def _read_or_none(read: Callable[[], Any]) -> Any:
    """Return a reading, or None after an error, because an unreadable counter must not end a run."""
    try:
        return read()
    except Exception:
        return None


@contextmanager
def numerics(train: TrainSection, device: torch.device) -> Iterator[None]:
    """Set torch's process-wide numerical switches (TF32, determinism) for a block, and restore them afterwards.

    Other code in this process, such as checks and metrics, thus keeps the process's settings. (bf16 is not such a
    switch: models.recommender.ModelCall applies it to the dense model.)

    Args:
        train: Configuration section with `matmul` and `deterministic`.
        device: Device of the rank; on CPU, only the switches of `deterministic` are set.
    """
    is_tf32 = train.matmul == "tf32"
    with ExitStack() as stack:
        if device.type == "cuda":
            # Once torch.backends.cuda.matmul.fp32_precision is set, torch 2.13.0 raises an error if its compiler or a
            # user's model reads the precision by the older name, so only the older name is used here. cuDNN (RNNs,
            # convolutions) ignores this setting and uses TF32 by default. The previous precision may be TF32:
            # NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1.
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            stack.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
            torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = is_tf32
        if train.deterministic:
            switches = torch.utils.deterministic
            stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
            stack.callback(setattr, switches, "fill_uninitialized_memory", switches.fill_uninitialized_memory)
            torch.set_deterministic_debug_mode("warn")
            switches.fill_uninitialized_memory = False  # no uninitialized memory is read
        yield
