"""Device checks of each operator, as on CUDA, at the level of torch's dispatcher.

torch's C++ code sees ordinary host tensors in the stand-in. Each storage therefore has a mark that states where
it would be on a machine with a GPU. Tensors that an operator or autograd creates for its own use have another mark
than host tensors of the caller, so that backward passes and optimizers are checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch.cuda._sanitizer import zip_arguments
from torch.utils._python_dispatch import TorchDispatchMode

from standin.device import StandInGpu
from standin.device_rules import read_device_rules

# Operators that accept tensors with dimensions on two devices.
CROSS_DEVICE_OPERATORS = {
    *("copy_", "_to_copy", "_copy_from", "set_", "record_stream", "_pin_memory", "_foreach_copy_"),
    *("_has_compatible_shallow_copy_type", "is_set_to", "_local_scalar_dense"),
}
# Indexing operators: host indices are allowed for device values, but not the reverse.
INDEXING_OPERATORS = {"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"}


class Place(Enum):
    """Place of a storage on a machine with a GPU."""

    HOST = "host"
    DEVICE = "device"
    OPEN = "open"  # created inside an operator, which decides about the place


def find_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None if the tensor has no memory (meta, sparse)."""
    if tensor.layout != torch.strided or tensor.is_meta or torch._is_functional_tensor(tensor):
        return None
    return tensor.untyped_storage()


def find_place(tensor: torch.Tensor) -> Place | None:
    """Return the place of a tensor, or None if it has no memory. Storages without a mark are on the host."""
    storage = find_storage(tensor)
    return None if storage is None else getattr(storage, "place", Place.HOST)


def set_place(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """Mark the storage of a tensor, and return the tensor."""
    with torch._C.DisableTorchFunction():
        if (storage := find_storage(tensor)) is not None:
            storage.place = place
            if place is Place.HOST:  # the host has waited for the copy
                storage.__dict__.pop("block", None)
    return tensor


def close_place(tensor: torch.Tensor) -> None:
    """Mark a storage as HOST if its place is open: the storage is returned to a caller on the host."""
    with torch._C.DisableTorchFunction():
        if find_place(tensor) is Place.OPEN:
            set_place(tensor, Place.HOST)


class DispatchMode(TorchDispatchMode):
    """Mode that checks the devices of each operator and marks its results. Each thread has its own instance."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunction():  # also the function modes, to which `func` is a call from Python
            return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        inputs = list(iterate_storages((args, kwargs)))
        on_device = any(getattr(storage, "place", None) is Place.DEVICE for storage in inputs)
        if getattr(kwargs.get("device"), "type", "") == "cuda":  # in backward, whose tensors are not wrapped
            kwargs, on_device = kwargs | {"device": torch.device("cpu")}, True
        if on_device and func.namespace == "aten":
            check_devices(func, args, kwargs)
        out = func(*args, **kwargs)
        for storage in inputs:
            if on_device and getattr(storage, "place", None) is Place.OPEN:
                storage.place = Place.DEVICE
        given = set(map(id, inputs))
        for storage in iterate_storages(out):
            if id(storage) not in given and not hasattr(storage, "place"):
                storage.place = Place.DEVICE if on_device else Place.OPEN
        if (order := StandInGpu.active.order) is not None:
            if on_device:
                order.run(func, args, kwargs, out)
            else:
                for argument, value in zip_arguments(func._schema, args, kwargs):
                    for tensor in iterate_tensors(value):
                        order.access_on_host(tensor, bool(argument.alias_info and argument.alias_info.is_write))
        return out


def iterate_storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all tensors in nested lists, tuples and mappings."""
    for tensor in iterate_tensors(value):
        if (storage := find_storage(tensor)) is not None:
            yield storage


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from iterate_tensors(each)
    elif isinstance(value, dict):
        yield from iterate_tensors(list(value.values()))


def check_devices(func: Any, args: tuple, kwargs: dict) -> None:
    """Raise the error of CUDA's code if an operator with a device tensor does not accept a host tensor.

    Args:
        func: Operator (torch._ops.OpOverload) of the namespace aten.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        NotImplementedError: The operator has no CUDA kernel.
        RuntimeError: Tensors are on two devices.
    """
    schema, rules = func._schema, read_device_rules()
    base = schema.name.removeprefix("aten::")
    name = f"{base}.{schema.overload_name}" if schema.overload_name else base
    if name in rules.cpu_only:
        raise NotImplementedError(f"Could not run 'aten::{name}' with arguments from the 'CUDA' backend")
    if base in CROSS_DEVICE_OPERATORS:
        return
    arguments = list(zip_arguments(schema, args, kwargs))
    strict = name in rules.same_device
    if base in INDEXING_OPERATORS:
        (_, value), (_, indices), *rest = arguments
        if find_place(value) is Place.HOST and any(find_place(t) is Place.DEVICE for t in iterate_tensors(indices)):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        arguments, strict = [arguments[0], *rest], False
    if strict:  # as torchgen's gen_device_check
        arguments = [(a, v) for a, v in arguments if not a.kwarg_only or a.is_out]
    tensors = [(a, t, find_place(t)) for a, value in arguments for t in iterate_tensors(value)]
    if not any(place is Place.DEVICE for *_, place in tensors):
        return
    for argument, tensor, place in tensors:
        if place is Place.HOST and (strict or tensor.dim()):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{StandInGpu.active.device} and cpu! (when checking argument {argument.name} of {name})"
            )
