"""Tensors that report a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions

from standin.device import StandInGpu
from standin.dispatch import DispatchMode, Place, close_place, find_place, iterate_tensors, set_place

# Operations that return a device value, or a size that depends on one, to the host (torch 2.13.0).
WAITING_OPERATIONS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero"),
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal", "allclose"),
    *("bincount", "multinomial", "jagged_unique_indices", "__contains__", "__repr__", "__format__"),
}
# Indexing operations; host indices are copied to the device.
INDEXING_OPERATIONS = {"__getitem__", "__setitem__", "index", "index_put", "index_put_", "_index_put_impl_"}
HOST_READS = {"tolist", "numpy", "__array__", "item"}  # read host memory without an operator
COPYING_FACTORIES = {"tensor", "as_tensor", "asarray"}  # factories that create values on the host and copy them


class DeviceTensor(torch.Tensor):
    """Tensor that reports the GPU in use; torch's C++ code sees an ordinary host tensor."""

    @property
    def device(self) -> torch.device:
        return StandInGpu.active.device if StandInGpu.active else torch.device("cuda", 0)

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return self.device.index

    def as_subclass(self, kind: type) -> torch.Tensor:
        return super().as_subclass(_both(kind))

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until a stream has finished its work, for the checks of stream order."""
        if StandInGpu.active.order is not None:
            with torch._C.DisableTorchFunction():
                StandInGpu.active.order.record_stream(self, stream)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return call_on_device(func, args, kwargs or {})


class DeviceFactoryMode(TorchFunctionMode):
    """Mode that creates stand-in tensors for device="cuda", which torch's C++ code would reject."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if operation_name(func) in ("to", "cuda") and args and not is_on_device(args[0]):
            return move_tensor(operation_name(func), args, kwargs)
        if StandInGpu.active.order is not None and operation_name(func) in HOST_READS:
            with torch._C.DisableTorchFunction():
                StandInGpu.active.order.access_on_host(args[0])
        target = kwargs.get("device")
        if target is None and not kwargs.get("pin_memory"):
            return _on_host(func(*args, **kwargs))
        if any(is_on_device(t) for t in iterate_tensors((args, kwargs))):
            return call_on_device(func, args, kwargs)
        return call_factory(func, args, kwargs)


def is_on_device(value: Any) -> bool:
    return isinstance(value, DeviceTensor)


def to_device_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a stand-in tensor that shares its memory."""
    with torch._C.DisableTorchFunction():
        is_new = find_place(value) is not Place.DEVICE
        set_place(value, Place.DEVICE)
        if is_new and StandInGpu.active is not None and StandInGpu.active.order is not None:
            StandInGpu.active.order.add_tensor(value)
    if is_on_device(value):
        return value
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return value.as_subclass(DeviceTensor)
    return value.as_subclass(_both(kind))


def to_host_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a stand-in tensor as an ordinary tensor that shares its memory."""
    return torch.Tensor.as_subclass(value, torch.Tensor)


def operation_name(func: Any) -> str:
    name = getattr(func, "__name__", "") or str(func)
    owner = getattr(func, "__self__", None)
    return f"{owner.__name__}.{name}" if name in ("__get__", "__set__") and owner is not None else name


def call_factory(func: Any, args: tuple, kwargs: dict) -> Any:
    """Call a tensor factory and return its result on the requested device."""
    kwargs, gpu = dict(kwargs), StandInGpu.active
    target, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
    device = None if target is None else to_torch_device(target)
    on_gpu = device is not None and device.type == "cuda"
    if device is not None:
        kwargs["device"] = torch.device("cpu") if on_gpu else device
    out = func(*args, **kwargs)
    if on_gpu and operation_name(func) in COPYING_FACTORIES:
        gpu.wait(f"torch.{operation_name(func)}")
    if pinned:
        gpu.pin(out.data_ptr(), out.untyped_storage().nbytes(), out.untyped_storage())
    if not on_gpu:
        return _on_host(out)
    return to_device_tensor(out.clone()) if operation_name(func) in COPYING_FACTORIES else _placed(out, set())


def to_torch_device(value: Any) -> torch.device:
    return torch.device("cuda", value) if isinstance(value, int) else torch.device(value)


def move_tensor(name: str, args: tuple, kwargs: dict) -> torch.Tensor:
    """Run Tensor.to, .cuda or .cpu. A move between devices always copies."""
    value, rest = args[0], args[1:]
    if name == "to":
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*rest, **_without_copy(kwargs))
        device = device or value.device
        dtype = dtype or value.dtype
    else:
        device, dtype = torch.device("cuda" if name == "cuda" else "cpu"), value.dtype
        non_blocking = kwargs.get("non_blocking", False)
    with torch._C.DisableTorchFunctionSubclass():
        plain = to_host_tensor(value) if is_on_device(value) else value
        if device.type != "cuda":
            if not is_on_device(value):
                return _on_host(value.to(device, dtype, copy=kwargs.get("copy", False)))
            StandInGpu.active.wait("to host memory")  # always waits, because the result is pageable
            return set_place(plain.to(dtype, copy=True), Place.HOST)
        if is_on_device(value):
            return value if dtype == value.dtype else to_device_tensor(plain.to(dtype))
        if not (non_blocking and StandInGpu.active.is_pinned(plain.data_ptr())):
            StandInGpu.active.wait("to the device")
        return to_device_tensor(plain.to(dtype, copy=True))


def _without_copy(kwargs: dict) -> dict:
    return {key: value for key, value in kwargs.items() if key != "copy"}


def call_on_device(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operation with at least one stand-in tensor."""
    name, gpu = operation_name(func), StandInGpu.active
    if name in ("to", "cuda", "cpu"):
        return move_tensor(name, args, kwargs)
    if name in ("numpy", "__array__"):
        raise TypeError(f"can't convert {gpu.device} device type tensor to numpy. Use Tensor.cpu() first.")
    if name == "_has_compatible_shallow_copy_type":  # else Module.to would keep ordinary parameters
        return is_on_device(args[0]) == is_on_device(args[1])
    if name in ("register_hook", "register_post_accumulate_grad_hook"):
        args = (args[0], _hook(args[1]), *args[2:])
    if is_waiting(name, args, kwargs):
        gpu.wait(name)
    target = kwargs.get("device")
    to_host = target is not None and to_torch_device(target).type == "cpu"
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    out = _run(func, args, kwargs)
    if to_host:
        return set_place(out, Place.HOST)
    if _leaves_as_it_is(func, name):
        return out
    # An in-place operation on host memory returns a host tensor.
    given = {id(t) for t in iterate_tensors((args, kwargs)) if not is_on_device(t)}
    return _placed(out, given)


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunctionSubclass())
        if isinstance(func, FunctionType):  # Python functions can create tensors with device="cuda"
            stack.enter_context(DeviceFactoryMode())
        return func(*args, **kwargs)


def _on_host(value: Any) -> Any:
    """Mark the results of an operation on host tensors. In backward, tensors of the device also look like these."""
    if torch._C._current_graph_task_id() == -1:
        for tensor in iterate_tensors(value):
            close_place(tensor)
    return value


def _leaves_as_it_is(func: Any, name: str) -> bool:
    return func in get_default_nowrap_functions() and not name.startswith(("grad.", "_grad."))


def _placed(value: Any, given: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value if id(value) in given or value.is_meta else to_device_tensor(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_placed(each, given) for each in value))
    if isinstance(value, (list, tuple)):  # includes torch.return_types
        return type(value)([_placed(each, given) for each in value])
    if type(value) is dict:
        return {key: _placed(each, given) for key, each in value.items()}
    return value


def is_waiting(name: str, args: tuple, kwargs: dict) -> bool:
    """Return True if the host waits for the device in this operation."""
    if name in WAITING_OPERATIONS:
        return True
    if name == "copy_":
        into, source = args[0], args[1]
        if is_on_device(into) == is_on_device(source):
            return False
        host = source if is_on_device(into) else into
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        return not (non_blocking and StandInGpu.active.is_pinned(host.data_ptr()))
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
        return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None
    if name == "where":
        return len(args) == 1
    if name in INDEXING_OPERATIONS:
        sent = any(t.dim() and not is_on_device(t) for t in iterate_tensors(args[1]))  # a pageable copy
        masks = any(t.dtype == torch.bool for t in iterate_tensors(args[1]))
        fills = name == "__setitem__" and not (isinstance(args[2], torch.Tensor) and args[2].dim())
        return sent or (masks and not fills)
    return False


def _hook(hook: Any) -> Any:
    def with_place(value: Any) -> Any:
        return hook(to_device_tensor(value) if isinstance(value, torch.Tensor) else value)

    return with_place


_CLASSES: dict[type, type] = {DeviceTensor: DeviceTensor, torch.Tensor: DeviceTensor}


def _both(kind: type) -> type:
    """Return a subclass of both DeviceTensor and `kind`."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(kind.__name__, (DeviceTensor, kind), {})
    return _CLASSES[kind]


@contextmanager
def create_tensors_on_device(gpu: StandInGpu) -> Iterator[None]:
    """Create stand-in tensors for device="cuda" in this thread and in threads started in the block."""
    run = Thread.run

    def run_on_device(self: Thread) -> None:
        with DispatchMode(), DeviceFactoryMode():  # modes are per thread
            run(self)

    def pin(self: torch.Tensor, device: object = None) -> torch.Tensor:
        if is_on_device(self):
            raise RuntimeError(f"cannot pin '{self.dtype}' only dense CPU tensors can be pinned")
        if gpu.is_pinned(self.data_ptr()):
            return self
        out = self.clone()
        gpu.pin(out.data_ptr(), out.untyped_storage().nbytes(), out.untyped_storage())
        return out

    def pinned(self: torch.Tensor, device: object = None) -> bool:
        return not is_on_device(self) and gpu.is_pinned(self.data_ptr())

    with (
        patch.object(torch.Tensor, "pin_memory", pin),
        patch.object(torch.Tensor, "is_pinned", pinned),
        patch.object(Thread, "run", run_on_device),
        DispatchMode(),
        DeviceFactoryMode(),
    ):
        yield
