"""Private names of torch (2.13.0), and of its sharded tensors."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
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

from raytrec.compat.versions import missing

# Names of torch for other modules; the functions below are public anyway.
__all__ = [
    "Dropout",
    "EveryOperator",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "apply_optimizer_in_backward",
]

MEMORY_EVENTS = 100_000  # of the allocator, that are kept at most: a few KB each


def load_archive(archive: BinaryIO) -> torch.export.ExportedProgram:
    """Load the program of a .pt2 archive.

    torch.export.load prints a traceback if that fails, and then tries layouts of older versions.
    """
    from torch.export.pt2_archive._package import load_pt2

    return load_pt2(archive).exported_programs["model"]


def is_dispatched(target: str) -> bool:
    """Return True if "torch.ops.aten.NAME.OVERLOAD" is an operator over tensors.

    The others are TorchScript's functions, such as aten::save.
    """
    name = "aten::" + target.removeprefix("torch.ops.aten.").removesuffix(".default")
    return torch._C._dispatch_has_kernel(name)


def quiet_tracing() -> None:
    """Keeps torch from a warning of what TorchRec (1.8.0) calls, which users cannot change."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def mark_only_for_profiler() -> None:
    """Makes record_function do nothing while no profiler runs. torch.optim and TorchRec mark some 30 parts of
    a step with it, which takes an eighth of a step's Python."""
    record_function.__enter__ = _enter_if_profiled


_enter = record_function.__enter__


def _enter_if_profiled(self: record_function) -> record_function:
    self.run_callbacks_on_exit = torch.autograd._profiler_enabled()
    return _enter(self) if self.run_callbacks_on_exit else self


@contextmanager
def no_gpu_asked_for() -> Iterator[None]:
    """Modules are imported as on a machine without GPUs. fbgemm_gpu (1.8.0) asks whether there is one, after
    which torch lets no forked process use it. (It needs the answer for AMD's, and for operators in Triton,
    which nothing here uses.)"""
    asked, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = asked


def refuses_gpus() -> bool:
    """Whether this process is forked from one that CUDA has begun in, so that torch lets it use no GPU."""
    return torch.cuda._is_in_bad_fork()


def rank_place(rank: int, device: str) -> _remote_device:
    """Where a shard is: on a rank's device."""
    return _remote_device(f"rank:{rank}/{device}")


def sharded_tensor(
    local: list[Shard], shards: list[ShardMetadata], shape: Sequence[int], dtype: torch.dtype
) -> ShardedTensor:
    """A ShardedTensor over live values; no collective.

    Args:
        local: this rank's shards.
        shards: those of all ranks.
        shape: of the whole.
    """
    metadata = ShardedTensorMetadata(shards, torch.Size(shape), TensorProperties(dtype=dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


def local_parts(value: torch.Tensor | ShardedTensor) -> list[torch.Tensor]:
    """This rank's shards of a tensor; of one that is not sharded, itself."""
    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]


def with_local_shards(value: ShardedTensor, parts: list[torch.Tensor]) -> ShardedTensor:
    """A ShardedTensor like another one, of other values of this rank, which are in host memory.

    torch compares each part with the metadata's device and pinned memory.
    """
    metadata = value.metadata()
    shards = [
        ShardMetadata(list(s.shard_offsets), list(s.shard_sizes), f"rank:{s.placement.rank()}/cpu")
        for s in metadata.shards_metadata
    ]
    of_place = {tuple(shard.shard_offsets): shard for shard in shards}
    local = [
        Shard(part, of_place[tuple(shard.metadata.shard_offsets)])
        for part, shard in zip(parts, value.local_shards(), strict=True)
    ]
    pinned = any(part.is_pinned() for part in parts)
    properties = replace(metadata.tensor_properties, pin_memory=pinned)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, replace(metadata, shards_metadata=shards, tensor_properties=properties)
    )


def multiply_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies tensors in place, with few kernels."""
    torch._foreach_mul_(tensors, factor)


def call_after_nodes(losses: torch.Tensor, call: Callable[[], object]) -> None:
    """Has a function called in the next backward from `losses`, when all nodes of its graph have run.

    DistributedDataParallel then waits for its all-reduces: in a callback like this one, which it queues
    later, and they come in the order in which they were queued.
    """
    losses.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(call))


class FixedDtype(nn.Module):
    """A module that hears of every cast before it has touched any of its tensors."""

    def before_cast(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Called with what is about to be applied to each tensor; raise to refuse it."""
        raise NotImplementedError

    def _apply(self, fn: Callable, recurse: bool = True) -> FixedDtype:
        self.before_cast(fn)
        return super()._apply(fn, recurse)


def bind_store(address: str) -> None:
    """Makes the TCPStore that this process may start listen on this address.

    torch/distributed/rendezvous.py starts it, on all interfaces, unless it is handed a socket that listens.
    """
    module: Any = import_module(
        "torch.distributed.rendezvous"
    )  # torch.distributed.rendezvous is a function, too
    if "TCPStore" not in vars(module):
        raise missing("torch.distributed.rendezvous.TCPStore", "torch")

    def store(host_name: str, port: int, *args: Any, is_master: bool = False, **options: Any) -> TCPStore:
        if is_master:
            listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(1024)
            options["master_listen_fd"] = listener.detach()
        return TCPStore(host_name, port, *args, is_master=is_master, **options)

    module.TCPStore = store


_untimed_wait: Any = dist.Work.wait


def time_waits(timed: Callable[[Callable], Callable]) -> None:
    """Wraps every wait for other ranks of this process: TorchRec waits within its autograd functions.

    Args:
        timed: torch.distributed.Work.wait → what takes its place; what an earlier call has put there goes.
    """
    dist.Work.wait = timed(_untimed_wait)


def watch_compiler(begins: Callable[[], object], ends: Callable[[], object]) -> None:
    """Has functions called before and after torch compiles something, in the thread that waits for it."""
    from torch._dynamo.callback import callback_handler  # what is not compiled does without its import

    callback_handler.register_start_callback(lambda _: begins())
    callback_handler.register_end_callback(lambda _: ends())


def described(operator: Any) -> tuple[str, Any, bool]:
    """Of an operator that EveryOperator sees: its name (aten::mm), the function that it is a variant of, and
    whether it gives views."""
    schema = operator._schema
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return schema.name, operator._overloadpacket, is_view


def storage_key(storage: torch.UntypedStorage) -> int:
    """What no other storage has as long as this one lives, on meta, too."""
    return storage._cdata


def record_memory() -> None:
    """Keeps what the allocator of GPU memory does from now on, with stacks."""
    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)


def save_memory(file: Path) -> None:
    """Writes what `record_memory` has kept, for pytorch.org/memory_viz, and keeps no more."""
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)
