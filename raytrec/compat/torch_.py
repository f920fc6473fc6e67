"""Functions that use private names of torch (2.13.0), such as those of sharded tensors and of the compiler."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.distributed import TCPStore, _remote_device
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils._python_dispatch import TorchDispatchMode as EveryOperator

from raytrec.compat.versions import private, replace_private, set_private

# Names of torch that other modules import from here; functions defined below need no entry.
__all__ = ["Dropout", "EveryOperator", "Shard", "ShardMetadata", "ShardedTensor", "apply_optimizer_in_backward"]

MAX_MEMORY_EVENTS = 100_000  # maximum number of recorded allocator events, of a few KB each


def load_archive(archive: BinaryIO) -> torch.export.ExportedProgram:
    """Load the exported program named "model" in a .pt2 archive.

    torch.export.load is not used: on failure, it prints a traceback and tries the layouts of older versions.
    """
    from torch.export.pt2_archive._package import load_pt2

    return load_pt2(archive).exported_programs["model"]


def copy_modules(module: nn.Module) -> nn.Module:
    """Return a copy of a module and its submodules that shares the tensors of the original.

    A copied GraphModule has the class of the original, which contains the compiled code. copy.copy() would compile
    the code again.
    """
    copied = object.__new__(type(module))
    children = {name: child and copy_modules(child) for name, child in module._modules.items()}
    tensors = {"_parameters": dict(module._parameters), "_buffers": dict(module._buffers)}
    vars(copied).update(vars(module), **tensors, _modules=children)
    return copied


def is_dispatched(target: str) -> bool:
    """Return True if the name "torch.ops.aten.NAME.OVERLOAD" denotes a dispatched operator.

    Other names denote TorchScript functions, such as aten::save.
    """
    name = "aten::" + target.removeprefix("torch.ops.aten.").removesuffix(".default")
    return torch._C._dispatch_has_kernel(name)


def get_schema(target: str) -> torch.FunctionSchema:
    """Return the schema of the operator "torch.ops.aten.NAME.OVERLOAD"."""
    name, overload = target.removeprefix("torch.ops.aten.").split(".")
    return getattr(getattr(torch.ops.aten, name), overload)._schema


def silence_tracing() -> None:
    """Silence a torch warning about calls by TorchRec (1.8.0), on which users cannot act."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def skip_unprofiled_records() -> None:
    """Make record_function a no-op while no profiler is running.

    torch.optim and TorchRec mark some 30 parts of a step with record_function, which takes an eighth of a step's
    Python time.
    """
    record_function.__enter__ = _enter_if_profiled


def limit_compile_processes(count: int) -> None:
    """Set the number of processes with which torch compiles kernels for this process.

    TorchRec imports the settings of torch's compiler. Later changes of TORCHINDUCTOR_COMPILE_THREADS have no effect.
    """
    config: Any = import_module("torch._inductor.config")
    config.compile_threads = count


_enter = record_function.__enter__


def _enter_if_profiled(self: record_function) -> record_function:
    self.run_callbacks_on_exit = torch.autograd._profiler_enabled()
    return _enter(self) if self.run_callbacks_on_exit else self


def hide_gpus_during_import() -> AbstractContextManager[None]:
    """Make torch report no GPU to modules that are imported in the block.

    fbgemm_gpu (1.8.0) checks for a GPU at import, after which torch does not let forked processes use GPUs. The
    result of the check matters only for AMD GPUs and Triton operators, which raytrec does not use.
    """
    return replace_private("torch", (torch.cuda, "is_available", lambda: False))


def refuses_gpus() -> bool:
    """Return True if torch refuses GPUs in this process because it was forked after CUDA's initialization."""
    return torch.cuda._is_in_bad_fork()


def make_rank_placement(rank: int, device: str) -> _remote_device:
    """Return the placement of a shard on a device of a given rank."""
    return _remote_device(f"rank:{rank}/{device}")


def make_sharded_tensor(
    local: list[Shard], shards: list[ShardMetadata], shape: Sequence[int], dtype: torch.dtype
) -> ShardedTensor:
    """Return a ShardedTensor that shares memory with existing shards, without a collective.

    Args:
        local: Shards on this rank.
        shards: Metadata of the shards on all ranks.
        shape: Shape of the whole tensor.
        dtype: Data type of the tensor.
    """
    metadata = ShardedTensorMetadata(shards, torch.Size(shape), TensorProperties(dtype=dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


def list_local_parts(value: torch.Tensor | ShardedTensor) -> list[torch.Tensor]:
    """Return this rank's shards of a sharded tensor, or [value] if the tensor is not sharded."""
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]


def replace_local_shards(value: ShardedTensor, parts: list[torch.Tensor]) -> ShardedTensor:
    """Return a copy of a ShardedTensor in which this rank's shards are replaced by tensors in host memory.

    The metadata is also adapted, because torch compares the parts' device and pinned memory with it.

    Args:
        value: Sharded tensor, which is not changed.
        parts: New tensor for each of this rank's shards, in the order of `value.local_shards()`, of equal shape and
            dtype. Either all or none are in pinned memory.
    """
    metadata = value.metadata()
    shards = [
        ShardMetadata(list(s.shard_offsets), list(s.shard_sizes), f"rank:{s.placement.rank()}/cpu")
        for s in metadata.shards_metadata
    ]
    shards_by_offset = {tuple(shard.shard_offsets): shard for shard in shards}
    local = [
        Shard(part, shards_by_offset[tuple(shard.metadata.shard_offsets)])
        for part, shard in zip(parts, value.local_shards(), strict=True)
    ]
    pinned = any(part.is_pinned() for part in parts)
    properties = replace(metadata.tensor_properties, pin_memory=pinned)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, replace(metadata, shards_metadata=shards, tensor_properties=properties)
    )


def multiply_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors in place by a factor, a tensor with one element, with few kernel launches."""
    torch._foreach_mul_(tensors, factor)


def call_after_nodes(losses: torch.Tensor, call: Callable[[], object]) -> None:
    """Call a function in the backward pass of `losses`, after all nodes of the autograd graph have run.

    Callbacks run in the order in which they were queued. DistributedDataParallel waits for its all-reduces in a
    callback that is queued later, so the function runs before this wait.
    """
    losses.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(call))


class FixedDtype(nn.Module):
    """Base class of modules whose `before_cast` is called before a cast or move changes any of their tensors."""

    def before_cast(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Handle a function that is about to be applied to all tensors; raise an error to refuse the cast."""
        raise NotImplementedError

    def _apply(self, fn: Callable, recurse: bool = True) -> FixedDtype:
        self.before_cast(fn)
        return super()._apply(fn, recurse)


def bind_store(address: str) -> None:
    """Make the TCPStore of each process group that this process creates from now on listen only on this IP address.

    Without a listening socket from the caller, torch/distributed/rendezvous.py listens on all interfaces.
    """
    # The attribute torch.distributed.rendezvous is a function.
    module = import_module("torch.distributed.rendezvous")

    def store(host_name: str, port: int, *args: Any, is_master: bool = False, **options: Any) -> TCPStore:
        if is_master:
            listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(1024)
            options["master_listen_fd"] = listener.detach()
        return TCPStore(host_name, port, *args, is_master=is_master, **options)

    set_private(module, "TCPStore", store, "torch")


_untimed_wait: Any = dist.Work.wait


def time_waits(timed: Callable[[Callable], Callable]) -> None:
    """Replace torch.distributed.Work.wait, with which this process, including TorchRec, waits for other ranks.

    Another call replaces the previous replacement.

    Args:
        timed: Function that takes the original torch.distributed.Work.wait and returns its replacement.
    """
    dist.Work.wait = timed(_untimed_wait)


def watch_compiler(begins: Callable[[], object], ends: Callable[[], object]) -> None:
    """Call `begins` before and `ends` after each torch compilation, in the thread that waits for it."""
    from torch._dynamo.callback import callback_handler  # not imported in runs without compilation

    callback_handler.register_start_callback(lambda _: begins())
    callback_handler.register_end_callback(lambda _: ends())


def quote_library_folder() -> None:
    """Quote the path of torch's libraries, because inductor (2.13.0) does not escape its spaces for the linker."""
    from torch.utils import cpp_extension

    if " " in (folder := private(cpp_extension, "TORCH_LIB_PATH", "torch")):
        cpp_extension.TORCH_LIB_PATH = quote(folder.strip("'"))


def describe_operator(operator: Any) -> tuple[str, Any, bool]:
    """Return an operator's name (such as aten::mm), its overload packet, and True if it returns a view."""
    schema = operator._schema
    is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    return schema.name, operator._overloadpacket, is_view


def get_storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that is unique among live storages, including those on the meta device."""
    return storage._cdata


def record_memory() -> None:
    """Start recording events of the GPU memory allocator, with stack traces."""
    torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)


def save_memory(file: Path) -> None:
    """Stop recording, and write the recorded events to a file for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)


def make_fake_store() -> Any:
    """Return a store for a process group with the backend `fake`, which importing the store registers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
