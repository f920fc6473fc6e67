"""Run a function on several processes connected by gloo.

The processes are forked from a process that has imported torch and TorchRec (warm.py). Only a few idle
processes are kept for later calls, because gloo's threads poll a hundred times per second. A call that fails
or times out ends its processes; the next call starts new ones.
"""

import atexit
import os
import pickle
import sys
import tempfile
import traceback
from datetime import timedelta
from time import monotonic

import warm

CALL_TIMEOUT_S = 120
MAX_IDLE_PROCESSES = 4  # idle processes, in addition to the processes in use
_pools = {}


def run_on_ranks(world, function, *args, hosts=1, device="cpu"):
    """Run function(rank, world, *args) in a process per rank and return the results by rank.

    Args:
        world: number of ranks.
        function: top-level function of a module.
        args: other arguments of the function.
        hosts: number of simulated hosts.
        device: "cpu", or "cuda" for a stand-in GPU (standin.cuda) per rank and a group that reports NCCL.
    """
    key = world, hosts, device
    pool = _pools.pop(key, None)
    while sum(size for size, _, _ in _pools) > MAX_IDLE_PROCESSES:
        _pools.pop(next(iter(_pools))).close()
    _pools[key] = pool or _Pool(world, hosts, device)  # least recently used pool first
    try:
        return _pools[key].run(function, args)
    except BaseException:
        _pools.pop(key).close()
        raise


class _Pool:
    def __init__(self, world, hosts, device):
        self._folder = tempfile.TemporaryDirectory()
        ranks = [warm.fork(_serve, rank, world, world // hosts, self._folder.name, device) for rank in range(world)]
        self._pids, self._ends = zip(*ranks, strict=True)

    def run(self, function, args):
        call = sys.path, pickle.dumps((function, args))
        for end in self._ends:
            end.send(call)
        deadline, results, waiting = monotonic() + CALL_TIMEOUT_S, {}, dict(enumerate(self._ends))
        while waiting:
            for rank, end in list(waiting.items()):
                if end.poll(0.01):
                    try:
                        good, value = pickle.loads(end.recv_bytes())
                    except (EOFError, ConnectionResetError):
                        raise RuntimeError(f"the process of rank {rank} died") from None
                    if not good:
                        raise RuntimeError(f"rank {rank}:\n{value}")
                    results[rank] = value
                    del waiting[rank]
            if monotonic() > deadline:
                raise TimeoutError(f"ranks {list(waiting)} did not end within {CALL_TIMEOUT_S} s")
        return [results[rank] for rank in sorted(results)]

    def close(self):
        for end in self._ends:
            end.close()
        warm.kill_and_wait(self._pids)
        self._folder.cleanup()


def _serve(end, rank, world, local, folder, device):
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(local), "OMP_NUM_THREADS": "1"}
    import torch

    torch.set_num_threads(1)
    if device == "cpu":
        return _answer(end, rank, world, folder, "gloo")
    from standin import use_stand_in_gpu

    with use_stand_in_gpu(rank % local, local):
        _answer(end, rank, world, folder, "nccl")


def _answer(end, rank, world, folder, backend):
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    while True:
        try:
            sys.path[:], call = end.recv()
        except (EOFError, ConnectionResetError):
            return
        torch.manual_seed(0)
        try:
            function, args = pickle.loads(call)
            answer = True, function(rank, world, *args)
        except Exception:
            answer = False, traceback.format_exc()
        end.send_bytes(pickle.dumps(answer))


@atexit.register
def close_rank_pools():
    """End the idle rank processes."""
    while _pools:
        _pools.popitem()[1].close()
