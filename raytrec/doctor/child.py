"""Child processes for work that may crash or hang: importing torch and FBGEMM, using a GPU, measuring rates.

Rates are speeds of the hardware, such as memory bandwidth; `raytrec plan --rates FILE` reads them from a file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrec.common.errors import RunError, convert_os_errors, get_last_line
from raytrec.common.formatting import format_count
from raytrec.common.machine import (
    REINSTALL_ADVICE,
    check_fbgemm_support,
    check_gpu,
    get_build_device,
    list_gpu_kinds,
    list_usable_gpus,
)
from raytrec.common.registry import load_code
from raytrec.compat.versions import PAIRS, find_wrong_versions
from raytrec.doctor.host_checks import FAILURE, OK, Diagnoses, Diagnosis, has_gpus, host_check

if TYPE_CHECKING:
    from raytrec.planning.rates import Rates

ANSWER_PREFIX = "raytrec-doctor "
ROOT = str(Path(__file__).parents[2])
LOAD_TIMEOUT_S, GPU_TIMEOUT_S = 120.0, 120.0  # the first import from a network file system is slow
MEASURE_TIMEOUT_PER_RANK_S = 180.0  # time limit of a measurement, per rank
PINNED_REQUIREMENTS, *_ = PAIRS
CUDA_LIBRARY_PATTERN = re.compile(r"lib(cud|cublas|cufft|curand|cusparse|cusolver|nccl|nv)\w*\.so")
OLD_LIBC_PATTERN = re.compile(r"version `?(GLIBC|GLIBCXX|CXXABI)_")


class ChildError(Exception):
    """Error in a child process: the function raised an exception, or the process ended without a result."""


def run_child(
    function: Callable[..., dict[str, Any]], *arguments: Any, limit_s: float, **environment: str
) -> dict[str, Any]:
    """Call a module-level function in a new Python process, and return its result.

    Args:
        function: Function to call; its result, a dict, must be JSON-serializable.
        arguments: Arguments of the function; must be JSON-serializable.
        limit_s: Seconds after which the process is killed.
        environment: Additional environment variables of the process.

    Raises:
        ChildError: The function raised an exception, or the process ended without a result.
        TimeoutError: The process did not end in time.
    """
    env = os.environ | environment
    if "RAY_RAYLET_PID" in env and env.get("CUDA_VISIBLE_DEVICES") == "":
        del env["CUDA_VISIBLE_DEVICES"]  # Ray hides GPUs from processes that have not requested any
    env["PYTHONPATH"] = os.pathsep.join(path for path in (env.get("PYTHONPATH"), ROOT) if path)
    path = f"{function.__module__}:{function.__name__}"
    command = [sys.executable, "-W", "ignore", "-m", __name__, path, json.dumps([limit_s, *arguments])]
    try:
        run = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no response within {limit_s:.0f} s") from None
    for line in run.stdout.splitlines():
        if line.startswith(ANSWER_PREFIX):
            answer = json.loads(line.removeprefix(ANSWER_PREFIX))
            if "error" in answer:
                raise ChildError(answer["error"])
            return answer
    message = get_last_line(run.stderr, "")
    ending = signal.Signals(-run.returncode).name if run.returncode < 0 else f"exit code {run.returncode}"
    raise ChildError(f"the process ended with {ending}" + (f": {message}" if message else ""))


def load_fbgemm() -> dict[str, Any]:
    """Import torch and FBGEMM, run an FBGEMM operator on CPU, and return package → file of its __init__.py.

    Raises:
        Exception: A package cannot be imported, or the operator failed. If a library of FBGEMM cannot be loaded, the
            error states the loader's reason.
    """
    torch = _import_package("torch")
    try:
        fbgemm = _import_package("fbgemm_gpu")
        _run_operator("cpu")
    except Exception as error:
        raise _find_load_error(torch) or error from None
    return {"torch": torch.__file__, "fbgemm_gpu": fbgemm.__file__}


def _import_package(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except Exception as error:
        raise OSError(f"cannot import {name}: {_find_loader_error(error)}") from None


def _find_loader_error(error: BaseException) -> BaseException:
    """Return the innermost cause of an import error, without the errors that torch has wrapped around it."""
    return error if error.__cause__ is None else _find_loader_error(error.__cause__)


def _run_operator(device: str) -> None:
    import torch

    torch.ops.fbgemm.asynchronous_complete_cumsum(torch.zeros(1, dtype=torch.int64, device=device))


def _find_load_error(torch: Any) -> OSError | None:
    """Return the load error of the first broken FBGEMM library, which "No such operator" hides, or None."""
    spec = find_spec("fbgemm_gpu")
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("*.so")):
            try:
                torch.ops.load_library(str(file))
            except OSError as error:
                return OSError(f"cannot load {file.name}: {_find_loader_error(error)}")
    return None


def use_gpu() -> dict[str, Any]:
    """Run an FBGEMM operator on the first GPU visible to this process, and return {"name": name of the GPU}.

    Raises:
        Exception: There is no usable GPU, FBGEMM cannot be imported, or the operator failed.
    """
    import torch

    check_gpu("this host")
    _import_package("fbgemm_gpu")
    _run_operator("cuda")
    torch.cuda.synchronize()
    return {"name": torch.cuda.get_device_name()}


@host_check("operators", LOAD_TIMEOUT_S + 5)
def check_operators() -> Diagnoses:
    """Check that FBGEMM's libraries can be loaded; report the loader's error behind `No such operator fbgemm::…`."""
    if get_build_device() is None:
        yield Diagnosis(OK, "not checked: torch is not installed")
        return
    try:
        files = run_child(load_fbgemm, limit_s=LOAD_TIMEOUT_S)
    except ChildError as error:
        yield Diagnosis(FAILURE, str(error), _suggest_repair(str(error)))
    else:
        yield Diagnosis(OK, f"FBGEMM is loaded from {files['fbgemm_gpu']}, torch from {files['torch']}")


def _suggest_repair(error: str) -> str:
    if wrong := find_wrong_versions():
        return wrong.do
    reinstall = f"pip install --no-deps --force-reinstall -r requirements/{PINNED_REQUIREMENTS}"
    if "undefined symbol" in error:
        return f"reinstall FBGEMM, whose release does not match torch despite its metadata: {reinstall}"
    if CUDA_LIBRARY_PATTERN.search(error):
        return (
            "install requirements/cuda.txt: the CUDA libraries of the packages are missing; "
            f"without a GPU: {REINSTALL_ADVICE.format(device='cpu')}"
        )
    if OLD_LIBC_PATTERN.search(error):
        return "use a newer system or an image from deploy/: the C libraries are too old for the wheels"
    return f"{reinstall} (docs/install.md)"


@host_check("gpus", GPU_TIMEOUT_S + 5)
def check_gpus() -> Diagnoses:
    """Check that each GPU runs an FBGEMM operator and is not waiting for a reset."""
    kinds, names = list_gpu_kinds(), list_usable_gpus()
    if get_build_device() != "cuda" or not has_gpus():
        reason = "the packages for GPUs are not installed" if has_gpus() else "there is no GPU"
        yield Diagnosis(OK, f"not needed: {reason}")
        return
    if not kinds:
        what = "this host has GPUs, but NVML cannot list the GPUs that this process may use"
        do = "run nvidia-smi, and check CUDA_VISIBLE_DEVICES"
        yield Diagnosis(FAILURE, what, do)
    with ThreadPoolExecutor(len(names) or 1) as pool:
        yield from pool.map(_diagnose_gpu, names, kinds)


def _diagnose_gpu(name: str, kind: tuple[str, tuple[int, int]]) -> Diagnosis:
    """Return the diagnosis of a GPU.

    Args:
        name: Number or UUID of the GPU, as in CUDA_VISIBLE_DEVICES.
        kind: Name and compute capability, as returned by list_gpu_kinds.
    """
    description = f"GPU {name}, {kind[0]} ({'.'.join(map(str, kind[1]))})"
    if error := check_fbgemm_support(kind, "this host"):
        return Diagnosis(FAILURE, f"{description}: {error.what}; expected {error.expected}", error.do)
    try:
        run_child(use_gpu, limit_s=GPU_TIMEOUT_S, CUDA_VISIBLE_DEVICES=name)
        return Diagnosis(OK, f"{description} runs FBGEMM's operators")
    except (ChildError, TimeoutError) as failed:
        do = "use GPUs that the wheel supports (docs/gpu.md)" if "kernel image" in str(failed) else ""
        do = do or "check this GPU with nvidia-smi -q; see the checks `operators` and `driver`"
        return Diagnosis(FAILURE, f"{description}: {failed}", do)


def write_rates(file: Path, ranks: int | None) -> None:
    """Measure the hardware rates of this machine, and write them to a file for `raytrec plan --rates`.

    Progress is printed to stderr.

    Args:
        file: JSON file to write.
        ranks: Number of ranks; default: one for each GPU, or 2 without GPUs or with packages for CPUs.

    Raises:
        RunError: A rank failed or took too long, or the file cannot be written.
    """
    gpus = list_usable_gpus() if get_build_device() == "cuda" else []
    rates = measure_rates(ranks or len(gpus) or 2, lambda line: print(line, file=sys.stderr))
    with convert_os_errors("cannot write the rates", where=str(file)):
        file.write_text(rates.to_json(), encoding="utf-8")


def measure_rates(ranks: int, show: Callable[[str], None]) -> Rates:
    """Measure and return hardware rates, such as memory bandwidth, on one GPU per rank or, if torch finds none, on CPU.

    Measuring takes about 20 s on an otherwise idle machine.

    Args:
        ranks: Number of ranks, at least 1 and at most the number of GPUs if there are any.
        show: Function called with each line of output about the measurement.

    Raises:
        RunError: A rank failed, or took longer than MEASURE_TIMEOUT_PER_RANK_S × `ranks`.
    """
    from raytrec.planning.probe import ROUNDS, compute_rates, take_samples

    show(f"measuring with {format_count(ranks, 'rank')}, {format_count(ROUNDS, 'round')}")
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environment |= {} if list_gpu_kinds() else {"OMP_NUM_THREADS": "1"}
    limit_s = MEASURE_TIMEOUT_PER_RANK_S * ranks
    with tempfile.TemporaryDirectory(prefix="raytrec-rates-") as folder, ThreadPoolExecutor(ranks) as pool:
        futures = [
            pool.submit(
                run_child, take_samples, rank, ranks, folder, MEASURE_TIMEOUT_PER_RANK_S, limit_s=limit_s, **environment
            )
            for rank in range(ranks)
        ]
        try:
            for answer in as_completed(futures):  # the first error is the cause of the others
                answer.result()
        except (ChildError, TimeoutError) as error:
            raise RunError(
                f"rank {futures.index(answer)} could not measure its rates: {error}",
                where=f"{format_count(ranks, 'rank')} on this machine",
                do="run `raytrec doctor` to find the cause, or pass fewer --ranks (at most one per GPU)",
            ) from None
    rates = compute_rates([answer.result()["samples"] for answer in futures])
    show(f"{rates.matrix['fp32'] / 1e9:.0f} GFLOP/s in fp32, {rates.copy / 1e9:.0f} GB/s of memory bandwidth")
    return rates


def main() -> None:
    """Call the function named on the command line, and print its result for `run_child`."""
    limit_s, *arguments = json.loads(sys.argv[2])
    signal.alarm(int(limit_s) + 5)  # end this process even if its parent has died
    try:
        answer = load_code(sys.argv[1])(*arguments)
    except BaseException as error:
        answer = {"error": " ".join((str(error) or type(error).__name__).split())[:600]}
    print(f"\n{ANSWER_PREFIX}{json.dumps(answer)}", flush=True)
    os._exit(0)  # a normal exit could wait for the other ranks of a failed process group


if __name__ == "__main__":
    main()
