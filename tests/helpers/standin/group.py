"""Process groups that report NCCL and use gloo. They reject tensors in host memory like NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from standin.device import StandInGpu
from standin.dispatch import iterate_tensors
from standin.tensor import is_on_device

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_gather_single"),
    *("reduce_scatter_single", "all_reduce_coalesced", "all_gather_coalesced", "barrier"),
    *("send", "recv", "isend", "irecv"),
)


@contextmanager
def use_stand_in_nccl() -> Iterator[None]:
    """Replace "nccl" groups created in this block by gloo groups that report NCCL."""
    names: set[str] = set()
    begin, new, backend_of = dist.init_process_group, dist.new_group, dist.get_backend

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        begin(_by_gloo(backend), *args, **_without_device(kwargs))
        if "nccl" in (backend or "nccl"):
            names.add(dist.group.WORLD.group_name)

    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        wanted = backend or get_backend()
        group = new(*args, backend=_by_gloo(wanted), **_without_device(kwargs))
        if "nccl" in wanted and group is not None and hasattr(group, "group_name"):
            names.add(group.group_name)
        return group

    def is_nccl(group: Any) -> bool:
        group = group or dist.group.WORLD
        return getattr(group, "group_name", None) in names

    def get_backend(group: Any = None) -> str:
        return "nccl" if is_nccl(group) else backend_of(group)

    with ExitStack() as stack:
        for module in (dist, distributed_c10d):
            for function in (init_process_group, new_group, get_backend):
                stack.enter_context(patch.object(module, function.__name__, function))
        for name in COLLECTIVES:
            checked = _checked(getattr(dist, name), name, is_nccl)
            stack.enter_context(patch.object(dist, name, checked))
        yield


def _by_gloo(backend: str | None) -> str:
    return "gloo" if backend is None or "nccl" in backend else backend


def _without_device(kwargs: dict) -> dict:
    return {key: value for key, value in kwargs.items() if key not in ("device_id", "pg_options")}


def _checked(collective: Callable, name: str, is_nccl: Callable) -> Callable:
    @wraps(collective)
    def checked(*args: Any, **kwargs: Any) -> Any:
        groups = [a for a in (*args, kwargs.get("group")) if isinstance(a, dist.ProcessGroup)]
        if is_nccl(groups[0] if groups else None) and torch._C._current_graph_task_id() == -1:
            host = [t for t in iterate_tensors((args, kwargs)) if not is_on_device(t)]
            if host:
                raise RuntimeError(f"No backend type associated with device type cpu (in {name})")
            if name == "barrier":
                StandInGpu.active.wait(name)  # a NCCL barrier waits for the current stream
        return collective(*args, **kwargs)

    return checked
