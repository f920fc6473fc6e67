"""Runs a function on several real processes joined by gloo."""

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from time import monotonic

import torch
import torch.multiprocessing as mp

TIMEOUT_S = 120


def _rank(index, world, function, args, folder):
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=index,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    torch.save(function(index, world, *args), Path(folder) / f"{index}.pt")
    dist.destroy_process_group()


def on_ranks(world, function, *args):
    """[function(rank, world, *args) for each rank], each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank,
            (world, function, args, folder),
            nprocs=world,
            join=False,
            start_method="spawn",
        )
        deadline = monotonic() + TIMEOUT_S
        try:
            while not context.join(timeout=1):
                if monotonic() > deadline:
                    raise TimeoutError(f"{world} ranks did not end within {TIMEOUT_S} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [torch.load(Path(folder) / f"{i}.pt", weights_only=False) for i in range(world)]
