"""HTTP connections to individual replicas of a service."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlencode

from raytrec.common.errors import RunError
from raytrec.serving.command import parse_address, parse_error
from raytrec.serving.served_state import REPLICA_HEADER

RESPONSE_TIMEOUT_S = 60
CONNECT_TIMEOUT_S = 30  # time within which each replica must respond; an ended replica is listed for 15 s
CONNECT_INTERVAL_S = 0.05


class ServiceChangedError(Exception):
    """Error for a service whose version or replicas changed during a comparison."""


class ReplicaConnection:
    """HTTP connection to one replica of a service. The replica must not change its version.

    Args:
        service: Address of the service.
        token: Token of the service; "": no token is sent.

    Attributes:
        replica: Id of the replica.
        state: Response to GET /state.

    Raises:
        RunError: The service does not respond, or refuses the request.
    """

    def __init__(self, service: str, token: str):
        url = parse_address(service)
        self._service, self._path = service, url.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        self._connection = kind(url.netloc, timeout=RESPONSE_TIMEOUT_S)
        self.replica: str | None = None
        self._version: str | None = None
        self.state: dict[str, Any] = json.loads(self.get("/state"))

    def get(self, path: str, **query: Any) -> bytes:
        """Send a GET request, and return the body of this replica's response; reconnect if another replica responds.

        Raises:
            RunError: The service does not respond, or refuses the request.
            ServiceChangedError: The replica has changed its version, does not respond, or cannot be reached again.
        """
        deadline = monotonic() + CONNECT_TIMEOUT_S
        while monotonic() < deadline:
            try:
                self._connection.request("GET", f"{self._path}{path}?{urlencode(query)}", headers=self._headers)
                answer = self._connection.getresponse()
                content = answer.read()
            except (OSError, HTTPException) as error:
                if self.replica is None:
                    raise RunError(f"the service does not respond: {error}", where=self._service) from None
                raise ServiceChangedError(f"replica {self.replica} does not respond: {error}") from None
            if answer.status != 200:
                raise parse_error(
                    content, f"the service responds with status {answer.status}", self._service, answer.status
                )
            replica, version = answer.getheader(REPLICA_HEADER, self.replica), answer.getheader("X-Model-Version")
            if self.replica in (None, replica):
                if self._version not in (None, version):
                    raise ServiceChangedError(f"the version has changed from {self._version} to {version}")
                self.replica, self._version = replica, version
                return content
            self._connection.close()  # the kernel has selected another replica
            sleep(CONNECT_INTERVAL_S)
        raise ServiceChangedError(f"replica {self.replica} cannot be reached again")


def connect(service: str, token: str) -> tuple[list[ReplicaConnection], list[str]]:
    """Return a connection to each replica, and the ids of listed replicas that were not reached.

    The kernel selects the replica for a connection. Connections are therefore opened until each replica has responded,
    or until CONNECT_TIMEOUT_S has passed.
    """
    replicas: dict[str, ReplicaConnection] = {}
    deadline = monotonic() + CONNECT_TIMEOUT_S
    while True:
        connection = ReplicaConnection(service, token)
        replicas.setdefault(connection.replica, connection)
        missing = sorted(json.loads(connection.get("/versions")).keys() - replicas.keys())
        if not missing or monotonic() > deadline:
            return [*replicas.values()], missing
        sleep(CONNECT_INTERVAL_S)
