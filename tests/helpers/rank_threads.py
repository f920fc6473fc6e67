"""Ranks simulated by threads of one process, for code that uses only the collectives of Peers."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from raytrec.common.collectives import Peers


class ThreadPeers(Peers):
    """Peers that exchange values through a shared list.

    Attributes:
        spoken: number of calls of objects().
    """

    def __init__(self, rank, world, everyone, barrier):
        self.rank, self.world, self.device, self.spoken = rank, world, None, 0
        self._everyone, self._barrier = everyone, barrier

    def _meet(self, value):
        self._everyone[self.rank] = value
        self._barrier.wait(60)
        values = list(self._everyone)
        self._barrier.wait(60)
        return values

    def stack(self, values):
        return torch.stack(self._meet(values))

    def sum(self, values):
        return self.stack(values).sum(0)

    def max(self, values):
        return self.stack(values).amax(0)

    def objects(self, value):
        self.spoken += 1
        return self._meet(value)


def run_in_threads(world, function):
    """Run function(peers) in a thread per rank and return the results by rank."""
    everyone, barrier = [None] * world, Barrier(world)

    def run(rank):
        try:
            return function(ThreadPeers(rank, world, everyone, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))
