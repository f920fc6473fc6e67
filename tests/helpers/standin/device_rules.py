"""Device rules of torch's operators, read from the list in the wheel from which torch generates its CUDA code."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torchgen

OPERATOR_LIST = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
# On CPU, torch chooses these implementations by itself; on CUDA, it chooses others for the same call.
CHOSEN_ON_CPU = re.compile("cpu|mkldnn|slow_conv")
# Composites whose generated check is in the only operator they call.
SAME_DEVICE_COMPOSITES = {"stack", "embedding"}


class DeviceRules(NamedTuple):
    """Names of operators, as NAME or NAME.OVERLOAD.

    Attributes:
        same_device: operators whose CUDA code begins with a generated check: all tensors are on one device,
            including tensors without dimensions.
        cpu_only: operators with a kernel for CPU and none for CUDA.
    """

    same_device: frozenset[str]
    cpu_only: frozenset[str]


@cache
def read_device_rules() -> DeviceRules:
    """Return the rules of the installed torch.

    The list is searched by pattern, because parsing the YAML takes 0.7 s in every process.
    """
    entries = {
        text.partition("(")[0]: text for text in OPERATOR_LIST.read_text(encoding="utf-8").split("\n- func: ")[1:]
    }
    same_device, cpu_only = set(SAME_DEVICE_COMPOSITES), set()
    for name, entry in entries.items():
        delegate = re.search(r"^  structured_delegate: (\S+)", entry, re.M)
        kernels = _list_kernels(entries[delegate[1]] if delegate else entry)
        if "CUDA" in kernels and not re.search(r"^  device_check: NoCheck", entry, re.M):
            same_device.add(name)
        composite = any(key.startswith("Composite") for key in kernels)
        if "CPU" in kernels and "CUDA" not in kernels and not composite and not CHOSEN_ON_CPU.search(name):
            cpu_only.add(name)
    return DeviceRules(frozenset(same_device), frozenset(cpu_only))


def _list_kernels(entry: str) -> set[str]:
    """Return the dispatch keys of an entry, such as {"CPU", "CUDA"}."""
    dispatch = re.search(r"^  dispatch:.*\n((?:    .*\n?|\s*#.*\n?)+)", entry, re.M)
    lines = dispatch[1].splitlines() if dispatch else []
    return {key.strip() for line in lines for key in line.partition("#")[0].partition(":")[0].split(",")} - {""}
