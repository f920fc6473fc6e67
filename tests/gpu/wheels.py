"""`make cuda-wheels`: check the CUDA wheels of requirements/cuda.txt on a machine without a GPU.

    python tests/gpu/wheels.py record OPERATORS.json    # with the CPU packages
    python tests/gpu/wheels.py check OPERATORS.json     # with the CUDA packages

`record` trains every model and option on stand-in GPUs (tests/parity/test_gpu_options.py) and records the
operators that get tensors on a GPU, with the dtypes of these tensors. `check` tests in the CUDA packages that

- the modules of workers can be imported, and the warm process may still fork workers that use GPUs,
- each recorded operator has a kernel for CUDA. Kernels check dtypes when they run, so `check` only lists them,
- torch and FBGEMM contain machine code for the GPUs that raytrec accepts (raytrec/common/machine.py).

It prints a table and exits with status 1 if a check failed.
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), *(str(TESTS / name) for name in ("helpers", "parity"))]

# torch chooses other operators than these on CUDA.
CHOSEN_ON_CPU = re.compile("_for_cpu")
# A kernel for one of these keys is used for CUDA tensors.
CUDA_KEYS = ("CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
FAT_BINARY_MAGIC, ELF_KIND = b"\x50\xed\x55\xba", 2


class OperatorRecorder:
    """Receiver of the stand-in's operators, in place of standin.stream_order.StreamOrder.

    Attributes:
        dtypes: operator, as NAMESPACE::NAME.OVERLOAD → dtypes of its tensors, such as {"float32", "int64"}.
    """

    def __init__(self) -> None:
        self.dtypes: dict[str, set[str]] = defaultdict(set)

    def run(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Record a call of an operator on the device."""
        from standin.dispatch import iterate_tensors

        schema = func._schema
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        self.dtypes[name] |= {str(t.dtype).removeprefix("torch.") for t in iterate_tensors((args, kwargs, out))}

    def ignore(self, *_: Any) -> None:
        """Ignore streams, events and accesses of the host."""

    access_on_host = record_stream = add_tensor = handle = ignore


def record_on_rank(rank: int, world: int, cases: dict[str, Any], folder: str) -> dict[str, list[str]]:
    """Train cases on a stand-in GPU, and return the dtypes of each operator."""
    from standin import StandInGpu
    from test_gpu_options import train_cases

    StandInGpu.active.order = recorder = OperatorRecorder()
    try:
        if errors := train_cases(rank, world, cases, folder):
            raise RuntimeError(str(errors))
    finally:
        StandInGpu.active.order = None
    return {name: sorted(dtypes) for name, dtypes in recorder.dtypes.items()}


def record(file: Path) -> None:
    """Write the operators of all cases to a JSON file."""
    import ranks
    from test_gpu_options import CASE_GROUPS
    from wheels import record_on_rank  # ranks import it by the name of its module

    ranks.CALL_TIMEOUT_S = 1200
    operators: dict[str, set[str]] = defaultdict(set)
    for title, (world, cases) in CASE_GROUPS.items():
        with tempfile.TemporaryDirectory() as folder:
            for of_rank in ranks.run_on_ranks(world, record_on_rank, cases, folder, device="cuda"):
                for name, dtypes in of_rank.items():
                    operators[name].update(dtypes)
        print(f"{title}: {len(cases)} cases, {len(operators)} operators so far", flush=True)
    file.write_text(json.dumps({name: sorted(dtypes) for name, dtypes in sorted(operators.items())}, indent=1))


def import_worker_modules() -> str:
    """Import the modules of workers as the warm process does, and check that forked workers may use GPUs."""
    provide_nvml()
    import torch

    from raytrec.cluster import forking, warm_process

    modules = [module for group in warm_process.MODULES[warm_process.TRAINING] for module in group]
    with forking._hide_gpus():
        for module in modules:
            import_module(module)
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is not a CUDA build")
    if torch.cuda.is_initialized() or not forking._forks_can_use_gpus():
        raise RuntimeError("an import has initialized CUDA, so forked workers could not use GPUs")
    return f"{len(modules)} modules and those that they import; torch {torch.__version__}, CUDA {torch.version.cuda}"


def provide_nvml() -> None:
    """Load a library with NVML's functions, all of which fail, if this machine has no NVIDIA driver.

    FBGEMM's CUDA library is linked with NVML, which is a part of the driver, and cannot be loaded without it.
    """
    with suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1", mode=ctypes.RTLD_GLOBAL)
        return
    libraries = Path(find_spec("fbgemm_gpu").origin).parent.glob("*.so")
    names = set().union(*(re.findall(rb"\0(nvml\w+)(?=\0)", library.read_bytes()) for library in libraries))
    code = "".join(f"int {name.decode()}(void) {{ return 12; }}\n" for name in sorted(names))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "libnvidia-ml.so.1"
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-x", "c", "-", "-o", str(file)]
        subprocess.run(command, input=code.encode(), check=True)
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def check_operators(file: Path) -> str:
    """Check that each recorded operator has a kernel for CUDA."""
    operators = json.loads(file.read_text())
    missing = [name for name in operators if not has_cuda_kernel(name) and not CHOSEN_ON_CPU.search(name)]
    if missing:
        raise RuntimeError("no kernel for CUDA: " + ", ".join(missing))
    dtypes = sorted({dtype for of_one in operators.values() for dtype in of_one})
    return f"{len(operators)} operators, of tensors of {', '.join(dtypes)}"


def has_cuda_kernel(name: str) -> bool:
    """Return True if an operator has a kernel for CUDA tensors."""
    from torch._C import _dispatch_has_kernel_for_dispatch_key

    return any(_dispatch_has_kernel_for_dispatch_key(name, key) for key in CUDA_KEYS)


def check_machine_code() -> str:
    """Check that torch and FBGEMM contain machine code for every GPU that raytrec accepts."""
    from raytrec.common.machine import FBGEMM_CAPABILITIES

    found = {
        package: sorted(set().union(*(read_capabilities(library) for library in libraries)))
        for package, libraries in {
            "torch": Path(find_spec("torch").origin).parent.glob("lib/libtorch_cuda*.so"),
            "FBGEMM": Path(find_spec("fbgemm_gpu").origin).parent.glob("*.so"),
        }.items()
    }
    lacking = [
        f"{package} for compute capability {major}.{minor}"
        for package, codes in found.items()
        for major, minor in sorted(FBGEMM_CAPABILITIES[version("fbgemm-gpu")])
        if not any(code // 10 == major and code % 10 <= minor for code in codes)
    ]
    if lacking:
        raise RuntimeError(f"no machine code: {', '.join(lacking)} (found: {found})")
    return "; ".join(f"{package}: {', '.join(map(str, of_one))}" for package, of_one in found.items())


def read_capabilities(library: Path) -> set[int]:
    """Return the compute capabilities of a library's machine code, such as {80, 90}.

    The fat binaries in a library have a header (magic, version, header size, size), followed by entries, each
    with a header (kind, version, header size, size, …, capability) and its code.
    """
    data, capabilities = library.read_bytes(), set()
    for match in re.finditer(re.escape(FAT_BINARY_MAGIC), data):
        _, header, size = struct.unpack_from("<HHQ", data, match.start() + 4)
        start = match.start() + header
        capabilities |= set(_iterate_entries(data, start, start + size))
    return capabilities


def _iterate_entries(data: bytes, start: int, end: int) -> Iterator[int]:
    while start + 32 <= min(end, len(data)):
        kind, _, header, size = struct.unpack_from("<HHIQ", data, start)
        if kind not in (1, ELF_KIND) or not header:
            return
        if kind == ELF_KIND:
            yield struct.unpack_from("<I", data, start + 28)[0]
        start += header + size


def check(file: Path) -> int:
    """Run all checks, print a line for each, and return the exit status."""
    status = 0
    for title, run in {
        "imports and forks": import_worker_modules,
        "operators": lambda: check_operators(file),
        "machine code": check_machine_code,
    }.items():
        try:
            print(f"{title}: passed: {run()}", flush=True)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            print(f"{title}: failed: {error}", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("record", "check"):
        sys.exit(__doc__)
    if sys.argv[1] == "record":
        record(Path(sys.argv[2]))
    else:
        sys.exit(check(Path(sys.argv[2])))
