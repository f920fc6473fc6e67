"""Checks in child processes, which may crash or hang: import torch and FBGEMM, use a GPU, join a group."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytrec.common.errors import last_line
from raytrec.common.machine import OTHER_DEVICE, built_for, check_gpu, gpu_kinds, not_served, usable_gpus
from raytrec.common.registry import load_code
from raytrec.compat.versions import PAIRS, wrong_versions
from raytrec.doctor.host_checks import FAILURE, OK, Diagnosis, Found, has_gpus, host_check

ANSWER = "raytrec-doctor "
ROOT = str(Path(__file__).parents[2])
ELEMENTS, ROUNDS = 1 << 22, 4  # of the all-reduce that is timed: 16 MiB of float32, the best of four
LOAD_S, GPU_S = 120.0, 120.0  # a first import from a network file system takes long
PINNED, *_ = PAIRS
CUDA_LIBRARY = re.compile(r"lib(cud|cublas|cufft|curand|cusparse|cusolver|nccl|nv)\w*\.so")
OLD_SYSTEM = re.compile(r"version `?(GLIBC|GLIBCXX|CXXABI)_")


class ChildError(Exception):
    """A child process has found an error, or has died of it; its text is for people."""


def run_child(
    function: Callable[..., dict[str, Any]], *arguments: Any, limit_s: float, **environment: str
) -> dict[str, Any]:
    """Call a function of a module in a new Python process, and return its answer.

    Args:
        arguments: Plain values.
        environment: Additional environment variables of the process.

    Raises:
        ChildError: it ended with an error, or none. TimeoutError: it has not ended in time; it is killed.
    """
    env = os.environ | environment
    if "RAY_RAYLET_PID" in env and env.get("CUDA_VISIBLE_DEVICES") == "":
        del env["CUDA_VISIBLE_DEVICES"]  # Ray hides GPUs from what has not asked for them
    env["PYTHONPATH"] = os.pathsep.join(path for path in (env.get("PYTHONPATH"), ROOT) if path)
    path = f"{function.__module__}:{function.__name__}"
    command = [sys.executable, "-W", "ignore", "-m", __name__, path, json.dumps([limit_s, *arguments])]
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {limit_s:.0f} s") from None
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            answer = json.loads(line.removeprefix(ANSWER))
            if "error" in answer:
                raise ChildError(answer["error"])
            return answer
    last = last_line(done.stderr, "")
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    raise ChildError(f"the process ended with {how}" + (f": {last}" if last else ""))


def load_fbgemm() -> dict[str, Any]:
    """Imports torch and FBGEMM, and runs one of FBGEMM's operators on CPU.

    Raises:
        Exception: the loader's first error, not those that follow from it.
    """
    torch = _imported("torch")
    try:
        fbgemm = _imported("fbgemm_gpu")
        _operate("cpu")
    except Exception as error:
        raise _first_error(torch) or error from None
    return {"torch": torch.__file__, "fbgemm_gpu": fbgemm.__file__}


def _imported(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except Exception as error:
        raise OSError(f"import {name}: {_loaders(error)}") from None


def _loaders(error: BaseException) -> BaseException:
    """The loader's own error, where torch has put another one round it."""
    return error if error.__cause__ is None else _loaders(error.__cause__)


def _operate(device: str) -> None:
    import torch

    torch.ops.fbgemm.asynchronous_complete_cumsum(torch.zeros(1, dtype=torch.int64, device=device))


def _first_error(torch: Any) -> OSError | None:
    """Why the first of FBGEMM's libraries cannot be loaded, which "No such operator" hides."""
    found = find_spec("fbgemm_gpu")
    for folder in found.submodule_search_locations or () if found else ():
        for file in sorted(Path(folder).glob("*.so")):
            try:
                torch.ops.load_library(str(file))
            except OSError as error:
                return OSError(f"loading {file.name}: {_loaders(error)}")
    return None


def use_gpu() -> dict[str, Any]:
    """Runs one of FBGEMM's operators on the only GPU that this process sees."""
    import torch

    check_gpu("this host")
    _imported("fbgemm_gpu")
    _operate("cuda")
    torch.cuda.synchronize()
    return {"name": torch.cuda.get_device_name()}


@host_check("operators", LOAD_S + 5)
def operators() -> Found:
    """FBGEMM's libraries load: the loader's first error, which `No such operator fbgemm::…` hides."""
    if built_for() is None:
        yield Diagnosis(OK, "not looked at: torch is not installed")
        return
    try:
        files = run_child(load_fbgemm, limit_s=LOAD_S)
    except ChildError as error:
        yield Diagnosis(FAILURE, str(error), _repair(str(error)))
    else:
        yield Diagnosis(OK, f"loaded from {files['fbgemm_gpu']}, with {files['torch']}")


def _repair(error: str) -> str:
    """What to do about an error of the loader."""
    if wrong := wrong_versions():
        return wrong.do
    again = f"pip install --no-deps --force-reinstall -r requirements/{PINNED}"
    if "undefined symbol" in error:
        return f"torch and FBGEMM are not of one release, whatever their metadata: {again}"
    if CUDA_LIBRARY.search(error):
        return (
            "the packages are built for CUDA, whose libraries are missing: install requirements/cuda.txt; "
            f"without a GPU: {OTHER_DEVICE.format(device='cpu')}"
        )
    if OLD_SYSTEM.search(error):
        return (
            "this system's C libraries are too old for the wheels: take a newer one, or an image of deploy/"
        )
    return f"{again} (docs/install.md)"


@host_check("gpus", GPU_S + 5)
def gpus() -> Found:
    """Each GPU runs an operator of FBGEMM's, and waits for no reset."""
    kinds, names = gpu_kinds(), usable_gpus()
    if built_for() != "cuda" or not has_gpus():
        yield Diagnosis(OK, "not needed: no GPU, or packages for CPUs")
        return
    if not kinds:
        what, do = "NVML names no GPU that this process may use", "nvidia-smi; look at CUDA_VISIBLE_DEVICES"
        yield Diagnosis(FAILURE, what, do)
    with ThreadPoolExecutor(len(kinds) or 1) as pool:
        yield from pool.map(_try_gpu, names or map(str, range(len(kinds))), kinds)


def _try_gpu(name: str, kind: tuple[str, tuple[int, int]]) -> Diagnosis:
    """
    Args:
        name: its number or UUID, as in CUDA_VISIBLE_DEVICES. kind: as of gpu_kinds.
    """
    about = f"GPU {name}, {kind[0]} ({'.'.join(map(str, kind[1]))})"
    if error := not_served(kind, "this host"):
        return Diagnosis(FAILURE, f"{about}: {error.what}; expected {error.expected}", error.do)
    try:
        run_child(use_gpu, limit_s=GPU_S, CUDA_VISIBLE_DEVICES=name)
        return Diagnosis(OK, f"{about} runs FBGEMM's operators")
    except (ChildError, TimeoutError) as failed:
        do = "use GPUs that the wheel has code for (docs/gpu.md)" if "kernel image" in str(failed) else ""
        do = do or "nvidia-smi -q: look at this GPU; see `operators` and `driver`"
        return Diagnosis(FAILURE, f"{about}: {failed}", do)


def join_group(
    rank: int, world: int, address: str, port: int, backend: str, own: str, timeout_s: float
) -> dict[str, Any]:
    """Reduce 16 MiB over a group of processes; return the seconds and the network used.

    Args:
        address: Address of the store of rank 0.
        port: Port of that store.
        own: Address of this host.
    """
    import torch
    import torch.distributed as dist

    from raytrec.worker.rendezvous import chosen_network, keep_to_own_address, log_network

    keep_to_own_address(own)
    device, network = "cpu", f"gloo over TCP ({os.environ.get('GLOO_SOCKET_IFNAME', 'its own choice')})"
    if backend == "nccl":
        log_network()
        device = "cuda"
        torch.cuda.set_device(0)
    host = f"[{address}]" if ":" in address else address
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, f"tcp://{host}:{port}", timeout, world, rank)
    values, best = torch.ones(ELEMENTS, device=device), float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    if values[0].item() != world**ROUNDS or values[-1].item() != world**ROUNDS:
        raise ValueError(f"the sum is {values[0].item()}, and should be {world**ROUNDS}")
    dist.barrier()
    if backend == "nccl":
        network = f"NCCL over {chosen_network() or 'an unknown network'}"
    dist.destroy_process_group()
    return {"seconds": best, "network": network}


def main() -> None:
    limit_s, *arguments = json.loads(sys.argv[2])
    signal.alarm(int(limit_s) + 5)  # the process that has started this one may be gone
    try:
        answer = load_code(sys.argv[1])(*arguments)
    except BaseException as error:
        answer = {"error": " ".join((str(error) or type(error).__name__).split())[:600]}
    print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)
    os._exit(0)  # a group that has failed may wait for its peers at the end


if __name__ == "__main__":
    main()
