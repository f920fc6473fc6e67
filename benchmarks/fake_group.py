"""Simulate one rank of a group, with torch's `fake` process group and local copies in place of exchanges.

A rank of a `fake` group executes the Python and the operators of its exchanges. All ranks are assumed to
have the same data as this rank, so that received sizes are valid. Received values are only valid for 1-D exchanges.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from raytrec.compat.torch_ import make_fake_store


class Done:
    """Work handle of an exchange that has completed."""

    def wait(self, *_: Any) -> bool:
        """Return True."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future:
        """Return a future that has completed."""
        return complete(None)


def complete(value: Any) -> torch.futures.Future:
    """Return a future that has completed with a value."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


def join_fake_group(world: int) -> None:
    """Make this process rank 0 of a fake group of `world` ranks, and replace the exchanges of torch.distributed.

    The process then uses one thread and prints no log messages below errors.
    """
    logging.disable(logging.WARNING)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=world, store=make_fake_store())

    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Done | None:
        if output_split_sizes is None:
            output.view(world, -1).copy_(input.view(world, -1)[0].expand(world, -1))
        elif input.dim() == 1 and all(count == input_split_sizes[0] for count in output_split_sizes):
            output.view(world, -1).copy_(input[: input_split_sizes[0]].expand(world, -1))
        else:
            output.zero_()
        return Done() if async_op else None

    def all_gather_into_tensor(
        output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
    ) -> Done | None:
        output_tensor.view(world, -1).copy_(input_tensor.reshape(-1).expand(world, -1))
        return Done() if async_op else None

    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Done | None:
        for output in tensor_list:
            output.copy_(tensor) if output.shape == tensor.shape else output.zero_()
        return Done() if async_op else None

    def reduce_scatter_tensor(
        output: Any, input: Any, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Done | None:
        output.copy_(input.view(world, *output.shape)[0])
        return Done() if async_op else None

    def reduce_scatter(
        output: Any, input_list: Any, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Done | None:
        output.copy_(input_list[0])
        return Done() if async_op else None

    def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Done | None:
        return Done() if async_op else None

    def all_gather_object(object_list: list, obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    exchanges = {
        function.__name__: function
        for function in (
            *(all_to_all_single, all_gather_into_tensor, all_gather, reduce_scatter_tensor, reduce_scatter),
            *(all_reduce, all_gather_object),
        )
    }
    for module in (dist, distributed_c10d):
        for name, function in exchanges.items():
            setattr(module, name, function)
        module.broadcast_object_list = lambda *_, **__: None
        module.get_backend = lambda group=None: "gloo"  # TorchRec leaves tables without names if it is "fake"


def skip_all_reduces(model: torch.nn.Module) -> None:
    """Make DistributedDataParallel modules use local gradients; a fake all-reduce has no future that they accept."""
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            # torch rejects hooks whose annotations are strings.
            module.register_comm_hook(None, lambda state, bucket: complete(bucket.buffer()))
