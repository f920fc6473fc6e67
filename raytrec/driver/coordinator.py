"""Actor that forwards the ranks' messages to the driver, receives their heartbeats and sends them commands.

Every rank sends a heartbeat each half second (less often beyond 256 ranks, so that one actor can reply to all).
A heartbeat contains the rank's step, its phase, and its ticks, a counter that increases whenever the rank makes
progress. The reply is the current command. A rank without heartbeats has died, hangs or is disconnected. If ranks send
heartbeats but make no progress, one is stuck, or all wait for one another. The coordinator reports each case in one
sentence.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic, time
from typing import Any, NamedTuple

from raytrec.cluster.session import pin_to_node
from raytrec.common.formatting import format_count
from raytrec.common.messages import HEARTBEAT_INTERVAL_S, Command, Event, Message, compute_heartbeat_interval

HEARTBEAT_TIMEOUT_S = 3.0  # without a heartbeat for this time (at least 3 intervals), a process hangs or has ended
PHASES = {  # phase of a rank (WorkerContext.enter_phase; "step" while training) → description for messages
    "start": "starting",
    "plan": "building the model",
    "restore": "restoring",
    "data": "waiting for data",
    "step": "computing",
    "evaluate": "evaluating",
    "save": "saving",
}
# Descriptions of a GPU's phases (common.messages.PHASES), in the order of a step.
GPU_PHASE_TEXTS = {
    "data": "waiting for data",
    "copy": "waiting for its batch",
    "input_exchange": "in the exchange of ids",
    "tables": "in lookups or updates of tables",
    "forward": "in the forward pass",
    "collectives": "in the exchange of embeddings",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "other": "",
}
COORDINATOR_LOST = "the run's coordinator, an actor on the driver's node, has ended"  # Coordinator.cause
# Phases with a longer timeout (launch.PHASE_TIMEOUT_S), because they can take minutes, and end or fail by themselves.
SLOW_PHASES = PHASES.keys() - {"step"}


class Progress(NamedTuple):
    """Progress of a rank, as reported by a heartbeat.

    Attributes:
        ticks: Counter that increases whenever the rank makes progress; -1 before the first heartbeat.
        step: Last step that the rank has reported.
        phase: One of PHASES.
        where: Code that the rank is executing if it makes no progress, as "function, folder/file:line"; empty while
            the rank makes progress.
        waiting: True if the rank waits for other ranks; False while the rank makes progress.
        unfinished: First (step, phase) that the GPU has not finished; the phase is a key of GPU_PHASE_TEXTS, or ""
            if unknown. None if the GPU has finished all steps, on CPUs, and while the rank makes progress.
    """

    ticks: int = -1
    step: int = 0
    phase: str = "start"
    where: str = ""
    waiting: bool = False
    unfinished: tuple[int, str] | None = None

    @property
    def behind(self) -> tuple[int, int, bool, float, int]:
        """Return a key that sorts the rank furthest behind first.

        The key contains step, ticks, `waiting` (False first), and step and phase in `unfinished` (None last).
        """
        step, phase = self.unfinished or (inf, "")
        place = list(GPU_PHASE_TEXTS).index(phase) if phase in GPU_PHASE_TEXTS else len(GPU_PHASE_TEXTS)
        return self.step, self.ticks, self.waiting, step, place


@dataclass
class RankState:
    """State of a rank as known to the coordinator: its process and its last progress.

    Attributes:
        rank, pid: Rank of the process in its worker group, and the process id on the node.
        node: Address of the rank's node.
        node_id: Ray's id of that node.
        progress: Progress in the last heartbeat.
        last_heartbeat_at: Time of the last heartbeat (monotonic, in seconds); at first, time of the registration.
        last_progress_at: Time of the last heartbeat with a new number of ticks; at first, as last_heartbeat_at.
    """

    rank: int
    pid: int
    node: str
    node_id: str
    progress: Progress = field(default_factory=Progress)
    last_heartbeat_at: float = field(default_factory=monotonic)
    last_progress_at: float = field(default_factory=monotonic)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.node})"


class Coordinator:
    """Coordinator of a run, started as a Ray actor by `start_coordinator`.

    Args:
        hang_timeout_s: Seconds without progress of any rank after which the worker group is aborted, if the rank
            furthest behind is in a training step, or a rank sends no heartbeats.
        patience_s: Seconds without progress of any rank after which the worker group is aborted otherwise
            (SLOW_PHASES).
        again: Function that returns True if this actor replaces an actor whose process has ended. The earlier
            actor's state is lost: ranks learn that their group is unknown, end, and are restarted. Default: False.
    """

    def __init__(self, hang_timeout_s: float, patience_s: float, again: Callable[[], bool] = lambda: False):
        self._hang_s, self._patience_s = hang_timeout_s, patience_s
        self._messages: asyncio.Queue = asyncio.Queue()
        self._members: dict[int, RankState] = {}
        self._attempt, self._attempts, self._command = "", 0, Command.GO
        self._cause = COORDINATOR_LOST if again() else ""
        self._watcher: asyncio.Task | None = None
        self._beat_s = HEARTBEAT_INTERVAL_S

    # Messages: put by ranks and policies, read by the driver.

    def put(self, message: Message) -> None:
        """Queue a message for the driver."""
        self._messages.put_nowait(message)

    async def get(self, timeout: float) -> list[Message]:
        """Return and remove all queued messages; if there are none, wait at most `timeout` seconds for the first.

        The result is empty after the timeout, or if `release` ends the wait.
        """
        messages = []
        if timeout and self._messages.empty():
            with suppress(TimeoutError):
                messages.append(await asyncio.wait_for(self._messages.get(), timeout))
        while not self._messages.empty():
            messages.append(self._messages.get_nowait())
        return [message for message in messages if message is not None]

    def release(self) -> None:
        """Make a waiting call of `get` return at once."""
        self._messages.put_nowait(None)

    def _report_event(self, event: str, **details: Any) -> None:
        self.put(Event(event=event, unix_s=time(), details=details))

    # Ranks.

    async def enter(self, attempt: str, rank: int, world: int, pid: int, node: str, node_id: str) -> int:
        """Register a rank that begins, and return the number of worker groups that were started before its group.

        `attempt` identifies the worker group: each start of a group is a new attempt. The first rank of a new
        attempt clears the last failure and all commands except STOP, and its start is reported to the driver. `world`
        is the number of ranks; the other arguments are those of RankState.
        """
        if attempt != self._attempt:
            self._attempt, self._attempts, self._members = attempt, self._attempts + 1, {}
            self._cause = ""
            if self._command != Command.STOP:
                self._command = Command.GO
            self._report_event("started", attempt=self._attempts, workers=world)
        self._members[rank], self._beat_s = (RankState(rank, pid, node, node_id), compute_heartbeat_interval(world))
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch_ranks())
        return self._attempts - 1

    async def beat(
        self,
        attempt: str,
        rank: int,
        ticks: int,
        step: int,
        phase: str,
        where: str,
        waiting: bool,
        unfinished: tuple[int, str] | None = None,
    ) -> int:
        """Record a rank's heartbeat (Progress). Return the command; ABORT for a rank outside of the current group."""
        member = self._members.get(rank)
        if attempt != self._attempt or member is None:
            return Command.ABORT
        previous, member.progress = member.progress, Progress(ticks, step, phase, where, waiting, unfinished)
        member.last_heartbeat_at = monotonic()
        if member.progress.ticks != previous.ticks:
            member.last_progress_at = member.last_heartbeat_at
        return self._command

    async def current(self, attempt: str) -> bool:
        """Return True if an attempt may commit a checkpoint: it is the run's current attempt, and is not aborted."""
        return attempt == self._attempt and self._command != Command.ABORT

    async def leave(self, attempt: str, rank: int) -> None:
        """Remove a rank that has finished its work; do nothing if `attempt` is not the current attempt."""
        if attempt == self._attempt:
            self._members.pop(rank, None)

    # Commands.

    async def ask(self, command: int, reason: str) -> None:
        """Send a command to all ranks (with their next heartbeats) if it is higher than the current command.

        The driver then shows `reason` to the user.
        """
        if command > self._command:
            self._command = Command(command)
            self._report_event("asked", command=self._command.name, reason=reason)

    async def step(self) -> int:
        """Return the highest step that the last group's current ranks have reported; 0 without ranks."""
        return max((m.progress.step for m in self._members.values()), default=0)

    async def waiting(self, room: int, least: int) -> None:
        """Report that the cluster has room for `room` workers only, fewer than the required `least`."""
        found = f"the cluster has room for {format_count(room, 'worker')}"
        self._report_event("waiting", cause=f"{found}; waiting for room for {least} (scaling.num_workers)")

    # Failures.

    async def failed(self, rank: int | None, cause: str, dead: bool, again: bool) -> None:
        """Record a failure of the worker group, report its cause to the driver, and abort ranks that still run.

        A cause that is already known, such as a hang, is kept unless `rank` is None.

        Args:
            rank: Rank that failed; None if the group did not start.
            cause: Sentence that describes the failure; if `dead` is False, possibly a consequence of another failure.
            dead: True if the cause is known: a process or node that was lost, or an error of the rank itself. If
                False, a rank that becomes silent within the next 4 intervals is reported as the cause instead.
            again: True if the group is restarted.
        """
        if not dead and not self._cause:
            for _ in range(round(40 * self._beat_s)):  # find a rank that is silent while others fail
                if silent := self._list_silent_ranks(3 * self._beat_s):
                    step = silent[0].progress.step
                    rank, cause = silent[0].rank, f"{silent[0]} died, hangs or was disconnected at step {step}"
                    break
                await asyncio.sleep(0.1)
        self._cause = cause if rank is None else self._cause or cause
        self._report_event("failed", cause=self._cause, rank=rank, step=await self.step(), again=again)
        self._attempt = ""  # all later heartbeats of the failed group get ABORT

    async def cause(self) -> str:
        """Return the cause of the group's failure as a sentence; empty if none is known."""
        return self._cause

    def _list_silent_ranks(self, seconds: float) -> list[RankState]:
        """Return the ranks whose last heartbeat is more than `seconds` old, the oldest heartbeat first."""
        since = monotonic() - seconds
        silent = [member for member in self._members.values() if member.last_heartbeat_at < since]
        return sorted(silent, key=lambda member: member.last_heartbeat_at)

    @property
    def _heartbeat_timeout_s(self) -> float:
        return max(HEARTBEAT_TIMEOUT_S, 3 * self._beat_s)

    async def _watch_ranks(self) -> None:
        while True:
            await asyncio.sleep(1)
            if self._members and not self._cause and (sentence := self._describe_hang()):
                self._cause = sentence
                self._report_event("hang", cause=sentence)
                self._command = max(self._command, Command.ABORT)
                await asyncio.sleep(3)
                self._kill_silent_ranks()

    def _describe_hang(self) -> str | None:
        """Return a sentence about the rank for which the other ranks wait, or None before the timeout."""
        now, members = monotonic(), list(self._members.values())
        idle = now - max(m.last_progress_at for m in members)
        silent = self._list_silent_ranks(self._heartbeat_timeout_s)
        culprit = silent[0] if silent else min(members, key=lambda m: m.progress.behind)
        last = culprit.progress
        if idle < (self._patience_s if last.phase in SLOW_PHASES and not silent else self._hang_s):
            return None
        others = [m for m in members if m is not culprit]
        if silent:
            finding = f"{culprit} hangs or has ended: no heartbeat for {now - culprit.last_heartbeat_at:.0f} s"
        elif last.unfinished:
            alone = not others or len({m.progress.unfinished for m in members}) > 1
            (step, phase), whose = last.unfinished, "its GPU has not" if alone else "no GPU has"
            at = f"step {step}" + (f" ({GPU_PHASE_TEXTS[phase]})" if GPU_PHASE_TEXTS.get(phase) else "")
            finding = f"{culprit} has made no progress for {idle:.0f} s: {whose} finished {at}; the rank is"
        elif last.waiting and len({m.progress.ticks for m in members}) == 1:
            finding = f"all ranks have waited for each other for {idle:.0f} s; {culprit} is"
        else:
            finding = f"{culprit} has made no progress for {idle:.0f} s"
        where = f", {PHASES[last.phase]}" + (f" ({last.where})" if last.where else "")
        other = others[0].progress if others else Progress()
        verb = "waits" if other.waiting else "is"
        waiting = f"; rank {others[0].rank} {verb} at {other.where}" if other.where else ""
        return f"{finding} at step {last.step}{where}{waiting}"

    def _kill_silent_ranks(self) -> None:
        """Kill the process of each rank whose last heartbeat is older than the timeout.

        Such a process may not receive commands, so a Ray task on its node kills it.
        """
        import ray

        for member in self._list_silent_ranks(self._heartbeat_timeout_s):
            ray.remote(_kill).options(**pin_to_node(member.node_id)).remote(member.pid)


def _kill(pid: int) -> None:
    from raytrec.compat.ray_core import is_ray_process

    if is_ray_process(pid):
        os.kill(pid, signal.SIGKILL)


def start_coordinator(hang_timeout_s: float, patience_s: float) -> Any:
    """Start a Coordinator on this node, and return the actor, which ends with the driver; Ray restarts it if it dies.

    The arguments, in seconds, are those of Coordinator.
    """
    import ray

    placement = pin_to_node(ray.get_runtime_context().get_node_id())
    actor = ray.remote(Coordinator).options(max_concurrency=1000, max_restarts=-1, **placement)
    return actor.remote(hang_timeout_s, patience_s, lambda: ray.get_runtime_context().was_current_actor_reconstructed)


def fetch(method: Any, default: Any) -> Any:
    """Call a method of the coordinator without arguments; return `default` on an error of Ray or after 10 s."""
    import ray

    try:
        return ray.get(method.remote(), timeout=10)
    except ray.exceptions.RayError:  # Ray may be restarting the coordinator
        return default
