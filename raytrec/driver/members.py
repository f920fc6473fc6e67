"""The ranks of a group as the coordinator knows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from time import monotonic

# Where a GPU is in a step (common.messages.PHASES), from its beginning to its end.
ON_GPU = {
    "data": "waiting for data",
    "copy": "waiting for its batch",
    "input_exchange": "in the exchange of ids",
    "forward": "in the forward pass",
    "collectives": "in the exchange of embeddings",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "other": "",
}


@dataclass
class Member:
    """A rank: its process, and when it made how much progress.

    Attributes:
        node: its node's address; node_id: Ray's name of it.
        phase: one of coordinator.PHASES.
        where: the place in the code, while no progress is made.
        waiting: whether that place is a wait for other ranks.
        unfinished: the step that its GPU has not finished, and the phase; None: it has, or there is none.
    """

    rank: int
    pid: int
    node: str
    node_id: str
    ticks: int = -1
    step: int = 0
    phase: str = "start"
    where: str = ""
    waiting: bool = False
    unfinished: tuple[int, str] | None = None
    beat_at: float = field(default_factory=monotonic)
    progress_at: float = field(default_factory=monotonic)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.node})"

    @property
    def behind(self) -> tuple[int, int, bool, float, int]:
        """Sorts ranks: first the one that is behind; where hosts are level, the one whose GPU is."""
        step, phase = self.unfinished or (inf, "")
        place = list(ON_GPU).index(phase) if phase in ON_GPU else len(ON_GPU)
        return self.step, self.ticks, self.waiting, step, place


def describe_gpu(whose: str, step: int, phase: str) -> str:
    """What GPUs have not finished, in a sentence.

    Args:
        whose: whose GPU it is, or `all GPUs`.
    """
    place = ON_GPU.get(phase, "")
    verb = "have" if whose == "all GPUs" else "has"
    return f"{whose} {verb} not finished step {step}" + (f" ({place})" if place else "")
