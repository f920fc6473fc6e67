"""Commands of a service's coordinator to replicas, and the states that replicas report."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from prometheus_client.metrics_core import Metric

from raytrec.common.errors import RaytrecError


@dataclass(frozen=True)
class Export:
    """Location of an export, and the version in its manifest; "" for a folder of deltas that replicas follow."""

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


@dataclass(frozen=True)
class ReplicaCommand:
    """Numbered command to replicas.

    Attributes:
        number: Number of the command.
        answer: Export that replicas serve.
        prepare: URI of an export to load next to the current one; None: none.
        challenger: Challenger of the served export; None: none.
        fair_connections: Mean number of active connections of the replicas on the replica's node; infinite for a
            lone replica.
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
        version: Version that the replicas serve.
        prepared: Version that the replica has prepared on command; None: none.
        error: Reason why the command could not be executed; None if the replica executed it.
        challenger_error: Reason why the replica has no challenger; None if the command was executed.
        figures: Metrics of the replica.
        node: Id of the replica's node, on which the kernel distributes connections.
        connections: Number of active connections; None: the replica does not listen yet.
    """

    completed_command: int
    version: str
    prepared: str | None = None
    error: RaytrecError | None = None
    challenger_error: str | None = None
    figures: tuple[Metric, ...] = ()
    node: str = ""
    connections: int | None = None
