"""Commands of a service's coordinator to replicas, and the states that replicas report."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Literal

from prometheus_client.metrics_core import Metric

from raytrec.common.errors import RaytrecError


@dataclass(frozen=True)
class Export:
    """Location of an export, and the version in its manifest. The version of a folder of deltas is ""."""

    uri: str
    version: str


@dataclass(frozen=True)
class Challenger(Export):
    """Export that serves or scores a share of requests while another export is the current one.

    Attributes:
        share: Share of requests, in (0, 1].
        mode: canary: the export serves its share of requests; shadow: the export scores its share of requests
            after the current export has served them.
    """

    share: float
    mode: Literal["canary", "shadow"]

    def includes(self, key: bytes) -> bool:
        """Return True if a key is in the challenger's share. The result depends only on key, version and share.

        A larger share includes the keys of a smaller share. Different versions select different keys.
        """
        digest = blake2b(key, digest_size=8, key=self.version.encode()[: blake2b.MAX_KEY_SIZE]).digest()
        return int.from_bytes(digest) < self.share * 2**64


@dataclass(frozen=True)
class ReplicaCommand:
    """Numbered command to replicas.

    Attributes:
        number: Number of the command.
        answer: Export that replicas serve.
        prepare: URI of an export to load next to the current one; None: no export.
        challenger: Challenger of the served export; None: no challenger.
        fair_connections: Mean number of active connections of the replicas on the replica's node; infinite unless
            several of them have reported their number.
    """

    number: int
    answer: Export
    prepare: str | None = None
    challenger: Challenger | None = None
    fair_connections: float = inf


@dataclass(frozen=True)
class ReplicaState:
    """State of a replica.

    Attributes:
        completed_command: Number of the last command that the replica has executed.
        version: Version that the replica serves.
        prepared: Version of the export that the command asked to load; None: no export has been loaded for the command.
        error: Error that prevented the execution of the command; None if the command was executed.
        challenger_error: Reason why the challenger of the command could not be loaded; None if there was no such error.
        figures: Metrics of the replica.
        node: Id of the replica's node, on which the kernel distributes connections.
        connections: Number of active connections; None: the replica does not listen yet.
        problem: Reason why the replica cannot apply the run's next delta; None: there is no problem.
    """

    completed_command: int
    version: str
    prepared: str | None = None
    error: RaytrecError | None = None
    challenger_error: str | None = None
    figures: tuple[Metric, ...] = ()
    node: str = ""
    connections: int | None = None
    problem: str | None = None
