"""Ranks of a benchmark that starts them itself, without Ray."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta


def join_group(rank: int, world: int, store: str) -> None:
    """Makes this process a quiet rank, with one thread, of a gloo group on this machine.

    Args:
        store: a file that does not exist yet, the same for all ranks.
    """
    import torch
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    torch.manual_seed(rank)
