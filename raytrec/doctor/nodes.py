"""The hosts that are looked at: this one, or the nodes of a Ray cluster."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raytrec.cluster.session import on_node, ray_session
from raytrec.common.errors import RunError, last_line, root_cause
from raytrec.common.machine import code_hash
from raytrec.compat.ray_core import alive_nodes
from raytrec.doctor.host_checks import within

REPLY_S = 60.0  # on a busy host
NO_ANSWER = "look at this node's Ray (ray status), and whether it has this raytrec"
START_S = 120.0  # a node has to start a process before it answers


Function = Callable[..., Any]
Each = dict[int, tuple] | None


class ThisHost:
    """This host alone, without Ray.

    Attributes:
        names: of the hosts. addresses: by which others reach them.
        silent: the names of those that have not answered, and are left out → why.
        unfit: numbers of those that cannot import torch. cut: pairs that cannot connect.
    """

    def __init__(self):
        self.names, self.addresses = [socket.gethostname()], ["127.0.0.1"]
        self.silent: dict[str, str] = {}
        self.unfit: set[int] = set()
        self.cut: set[frozenset[int]] = set()

    def ask(self, call: Function, *arguments: Any, each: Each = None, limit_s: float = REPLY_S) -> list[Any]:
        """What a function returns on each host, or the exception that it raises there; all are asked at once.

        Args:
            each: number of a host → further arguments; of others, which are not asked, the answer is None.
                Default: all are asked alike.
            limit_s: after that, the answer of a host is a TimeoutError.
        """
        try:
            return [within(limit_s, lambda: call(*arguments, *(each or {0: ()})[0]))]
        except Exception as error:
            return [error]


class _Caller:
    """An actor on a node; it calls functions of raytrec there."""

    def call(self, function: Function, arguments: tuple) -> Any:
        return function(*arguments)


class ClusterNodes(ThisHost):
    """The nodes of the cluster that this process is connected to."""

    def __init__(self):
        import ray

        super().__init__()
        nodes = alive_nodes()
        addresses = [node["NodeManagerAddress"] for node in nodes]
        names = _names([node["NodeManagerHostname"] for node in nodes], addresses)
        actor = ray.remote(max_restarts=0, max_concurrency=8)(_Caller)
        self._actors = [actor.options(**on_node(node["NodeID"])).remote() for node in nodes]
        answers = self.ask(code_hash, limit_s=START_S)  # raises an error on nodes without raytrec
        fit = [number for number, answer in enumerate(answers) if isinstance(answer, str)]
        self.silent = {
            names[i]: last_line(str(answer), type(answer).__name__)[:300]
            for i, answer in enumerate(answers)
            if i not in fit
        }
        self.names, self.addresses = [names[i] for i in fit], [addresses[i] for i in fit]
        self._actors = [self._actors[i] for i in fit]

    def ask(self, call: Function, *arguments: Any, each: Each = None, limit_s: float = REPLY_S) -> list[Any]:
        each = dict.fromkeys(range(len(self._actors)), ()) if each is None else each
        refs = [self._actors[i].call.remote(call, (*arguments, *own)) for i, own in each.items()]
        answers = dict(zip(each, answers_of(refs, limit_s), strict=True))
        return [answers.get(i) for i in range(len(self._actors))]


def answers_of(refs: list[Any], limit_s: float) -> list[Any]:
    """Return the result of each remote call, or its exception; a TimeoutError if there is none in time."""
    import ray

    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=limit_s) if refs else ([], [])
    late = TimeoutError(f"no answer within {limit_s:.0f} s")
    return [_answer(ref) if ref in ready else late for ref in refs]


def _answer(ref: Any) -> Any:
    import ray

    try:
        return ray.get(ref)
    except Exception as error:
        cause = root_cause(error)
        return getattr(cause, "cause", None) or cause


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
            expected="the address of the cluster itself",
            do="give auto or HOST:PORT on a node of the cluster, or ray://HOST:PORT from elsewhere",
        )
    with ray_session(address, any_versions=True):
        yield ClusterNodes()
