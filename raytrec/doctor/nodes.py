"""The hosts that are looked at: this one, or the nodes of a Ray cluster."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raytrec import __version__
from raytrec.cluster.host_checks import within
from raytrec.cluster.session import on_node, ray_session
from raytrec.common.errors import RunError, root_cause
from raytrec.driver.nodes import alive_nodes

HOST_ANSWER_S = 20.0
START_S = 60.0  # a node may have to start a process before it answers


class ThisHost:
    """This host alone, without Ray.

    Attributes:
        names: of the hosts. addresses: by which others reach them.
        silent: the names of those that have not answered, and are left out → why.
    """

    def __init__(self):
        self.names, self.addresses, self.silent = [socket.gethostname()], ["127.0.0.1"], {}

    def ask(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        each: list[tuple] | None = None,
        limit_s: float = HOST_ANSWER_S,
    ) -> list[Any]:
        """What a function returns on each host, or the exception that it raises there; all are asked at once.

        Args:
            each: further arguments for each host, as a tuple; None for one that is not asked, whose answer
                is None. Default: all are asked alike.
            limit_s: after that, the answer of a host is a TimeoutError.
        """
        own = (each or [()])[0]
        if own is None:
            return [None]
        try:
            return [within(limit_s, lambda: function(*arguments, *own))]
        except Exception as error:
            return [error]


def installed_here() -> str:
    """The version of raytrec on the host that this is called on, if there is one."""
    return __version__


class _Caller:
    """An actor on a node; it calls functions of raytrec there."""

    def call(self, function: Callable[..., Any], arguments: tuple) -> Any:
        return function(*arguments)


class ClusterNodes(ThisHost):
    """The nodes of the cluster that this process is connected to."""

    def __init__(self):
        import ray

        nodes = alive_nodes()
        addresses = [node["NodeManagerAddress"] for node in nodes]
        names = _names([node["NodeManagerHostname"] for node in nodes], addresses)
        actor = ray.remote(max_restarts=0, max_concurrency=8)(_Caller)
        self._actors = [actor.options(**on_node(node["NodeID"])).remote() for node in nodes]
        answers = self.ask(installed_here, limit_s=START_S)
        fit = [number for number, answer in enumerate(answers) if isinstance(answer, str)]
        self.silent = {names[i]: _last_line(answer) for i, answer in enumerate(answers) if i not in fit}
        self.names, self.addresses = [names[i] for i in fit], [addresses[i] for i in fit]
        self._actors = [self._actors[i] for i in fit]

    def ask(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        each: list[tuple] | None = None,
        limit_s: float = HOST_ANSWER_S,
    ) -> list[Any]:
        import ray

        asked = [
            None if own is None else actor.call.remote(function, (*arguments, *own))
            for actor, own in zip(self._actors, each or [()] * len(self._actors), strict=True)
        ]
        refs = [ref for ref in asked if ref is not None]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=limit_s) if refs else ([], [])
        late = TimeoutError(f"no answer within {limit_s:.0f} s")
        return [None if ref is None else _answer(ref) if ref in ready else late for ref in asked]


def _answer(ref: Any) -> Any:
    import ray

    try:
        return ray.get(ref)
    except Exception as error:
        cause = root_cause(error)
        return getattr(cause, "cause", None) or cause


def _last_line(error: Exception) -> str:
    """Of what Ray reports of an actor that cannot start, a traceback, the line with its error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _names(hosts: list[str], addresses: list[str]) -> list[str]:
    """Names that tell nodes apart, also where several are on one machine."""
    names: list[str] = []
    for host, address in zip(hosts, addresses, strict=True):
        name = f"{host} ({address})"
        count = sum(each.startswith(name) for each in names)
        names.append(f"{name} #{count + 1}" if count else name)
    return names


@contextmanager
def nodes_of(address: str | None) -> Iterator[ThisHost]:
    """The hosts to look at, as long as the block runs.

    Args:
        address: of a cluster (scaling.address); None: this host.

    Raises:
        RunError: as of ray_session; or the address is that of a dashboard.
    """
    if address is None:
        yield ThisHost()
        return
    if address.startswith(("http://", "https://")):
        raise RunError(
            f"{address} is a dashboard, which cannot ask nodes",
            where="--address",
            expected="auto or HOST:PORT on a node of the cluster, or ray://HOST:PORT from elsewhere",
        )
    with ray_session(address, any_versions=True):
        yield ClusterNodes()
