"""Checks of the network between nodes: interfaces, ports, and a timed all-reduce by pairs and over all."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from itertools import combinations
from typing import Any

from raytrec.cluster.host_checks import FAILURE, OK, WARNING, Diagnosis, Found
from raytrec.cluster.session import interface_of, socket_interfaces
from raytrec.common.machine import built_for, gpu_kinds
from raytrec.doctor.child import ELEMENTS, run_child
from raytrec.doctor.nodes import NO_ANSWER, REPLY_S, ThisHost

REACH_S, GROUP_S, IMPORT_S = 5.0, 90.0, 60.0
MOST_ROUNDS = 11  # of pairs: in one, each node is in one pair; beyond 12 nodes not all pairs are timed
SLOW = 4  # times that the slowest pair may take of the median one
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
BRIDGES = re.compile(r"docker|br-|virbr|veth|cni|flannel|cali|lxc|podman|vmnet|tunl")
DO_ADDRESS = (
    "start Ray on each node with --node-ip-address=ADDRESS, one that all nodes reach, or name the interface: "
    "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME where Ray is started"
)
DO_PORTS = (
    "let nodes reach each other at all TCP ports: security group, firewall, NetworkPolicy; workers take any "
    "free port (docs/cluster.md)"
)

_listeners: list[socket.socket] = []


def look_at_interfaces(address: str) -> dict[str, Any]:
    """The interfaces that gloo and NCCL take on this host, and the addresses of each.

    Args:
        address: by which Ray knows this host.
    """
    import psutil

    have = {name: [each.address for each in all_] for name, all_ in psutil.net_if_addrs().items()}
    chosen = {name: value for name in INTERFACE_VARIABLES if (value := os.environ.get(name))}
    return {"own": interface_of(address), "have": have, "chosen": chosen}


def check_interfaces(nodes: ThisHost) -> Found:
    """gloo and NCCL take an interface that other nodes reach: no bridge of Docker's, no loopback."""
    each = {i: (address,) for i, address in enumerate(nodes.addresses)}
    loopback = [ip_address(address).is_loopback for address in nodes.addresses]
    answers = nodes.ask(look_at_interfaces, each=each)
    for name, address, local, found in zip(nodes.names, nodes.addresses, loopback, answers, strict=True):
        for result, what, do in _judge(found, address, local and not all(loopback), len(answers) > 1):
            yield Diagnosis(result, what, do, hosts=(name,))


def _judge(found: Any, address: str, lost: bool, several: bool) -> Iterator[tuple[str, str, str]]:
    """Result, finding and what to do, of one node.

    Args:
        lost: whether its address is loopback, and another's is not. several: whether there are other nodes.
    """
    if isinstance(found, Exception):
        yield FAILURE, f"its interfaces are not known: {found}", NO_ANSWER
        return
    have, own = found["have"], found["own"]
    for variable, value in found["chosen"].items():
        wanted = tuple(each.partition(":")[0] for each in value.lstrip("=").split(","))
        if value.startswith("^") or any(name.startswith(wanted) for name in have):
            continue
        do = f"set {variable} to one of {', '.join(sorted(have))}, or unset it, where Ray is started"
        yield FAILURE, f"{variable}={value}, and there is no such interface", do
        return
    names = ", ".join(dict.fromkeys(value.lstrip("=") for value in found["chosen"].values())) or own
    if several and names and BRIDGES.match(names):
        what = f"gloo and NCCL take {names} ({address}), a bridge inside this host"
        yield FAILURE, what, DO_ADDRESS
    elif lost:
        yield FAILURE, f"Ray knows this node as {address}, where other nodes cannot reach it", DO_ADDRESS
    elif not names:
        what = f"no interface has the node's address {address}: gloo and NCCL choose one by themselves"
        yield WARNING, what, DO_ADDRESS
    else:
        yield OK, f"gloo and NCCL take {names}, the node's address", ""


def listen(address: str, keep: bool = True) -> int:
    """Listens at a free port of this host until its process ends, or not any more; the port."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.bind((address, 0))
    except OSError:  # an address that is translated on the way
        listener.bind(("", 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    _listeners.append(listener) if keep else listener.close()
    return port


def reach(places: list[tuple[str, int]], limit_s: float = REACH_S) -> list[str]:
    """For each place why a connection to it is not taken; empty where it is."""

    def connect(place: tuple[str, int]) -> str:
        try:
            socket.create_connection(place, limit_s).close()
        except OSError as error:
            return f"no answer within {limit_s:.0f} s" if isinstance(error, TimeoutError) else str(error)
        return ""

    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(connect, places))


def check_ports(nodes: ThisHost) -> Found:
    """Each node reaches a free port of each other one; pairs that do not are noted (ThisHost.cut)."""
    everyone = range(len(nodes.names))
    ports = nodes.ask(listen, each={i: (nodes.addresses[i],) for i in everyone})
    known = [i for i in everyone if isinstance(ports[i], int)]
    places = [(nodes.addresses[i], ports[i]) for i in known]
    answers = nodes.ask(reach, places, limit_s=REPLY_S + REACH_S * (1 + len(places) // 64))
    for here in everyone:
        if failed := [a for a in (ports[here], answers[here]) if isinstance(a, Exception)]:
            nodes.cut |= {frozenset((here, there)) for there in everyone}
            yield Diagnosis(FAILURE, f"not tried: {failed[0]}", NO_ANSWER, hosts=(nodes.names[here],))
            continue
        for there, (_, port), why in zip(known, places, answers[here], strict=True):
            if why and here != there:
                nodes.cut.add(frozenset((here, there)))
                pair = f"{nodes.names[here]} cannot reach {nodes.names[there]}"
                yield Diagnosis(FAILURE, f"{pair} at port {port}: {why}", DO_PORTS)
    if not nodes.cut:
        yield Diagnosis(OK, f"{len(known)} nodes reach each other at free ports")


def uses_nccl() -> bool:
    """Whether runs use this host's GPUs."""
    return built_for() == "cuda" and bool(gpu_kinds())


def reduce_here(
    rank: int, world: int, address: str, port: int, backend: str, own: str, limit_s: float
) -> dict[str, Any]:
    """This host's part of an all-reduce, in a child process.

    Args:
        address, port: of rank 0's store. own: the address of this host.
    """
    interface = interface_of(own)
    interfaces = socket_interfaces(interface) if interface else {}
    arguments = (rank, world, address, port, backend, interfaces, limit_s)
    return run_child("group", *arguments, limit_s=limit_s + IMPORT_S)


def check_all_reduce(nodes: ThisHost) -> Found:
    """Times an all-reduce of 16 MiB between pairs of nodes that connect, then over all."""
    fit = [i for i in range(len(nodes.names)) if i not in nodes.unfit]
    if len(fit) < 2:
        yield Diagnosis(
            WARNING, "fewer than two nodes can import torch", "first repair what `operators` names"
        )
        return
    nccl = nodes.ask(uses_nccl)
    backend = "nccl" if all(nccl[i] is True for i in fit) else "gloo"
    times: dict[frozenset[int], float] = {}
    network, failed = "", False
    for pairs in rounds(fit)[:MOST_ROUNDS]:
        groups = [pair for pair in pairs if frozenset(pair) not in nodes.cut]
        for pair, answer in zip(groups, _reduce(nodes, groups, backend), strict=True):
            if isinstance(answer, Exception):
                failed = True
                names = " and ".join(nodes.names[i] for i in pair)
                yield Diagnosis(FAILURE, f"between {names} with {backend}: {answer}", DO_ADDRESS)
            else:
                times[frozenset(pair)], network = answer["seconds"], answer["network"]
    if times:
        yield _compare(nodes, times, network)
    if failed or any(frozenset(pair) in nodes.cut for pair in combinations(fit, 2)):
        yield Diagnosis(WARNING, "not timed over all nodes", "first repair what is between single nodes")
    elif len(fit) > 2:
        (answer,) = _reduce(nodes, [tuple(fit)], backend)
        if isinstance(answer, Exception):
            yield Diagnosis(FAILURE, f"over all {len(fit)} nodes with {backend}: {answer}", DO_ADDRESS)
        else:
            speed = _speed(answer["seconds"])
            yield Diagnosis(OK, f"over all {len(fit)} nodes: {speed}, {answer['network']}")


def rounds(members: list[int]) -> list[list[tuple[int, int]]]:
    """All pairs, in rounds in which each member is in at most one: a round-robin tournament."""
    seats = [*members, -1] if len(members) % 2 else [*members]
    half, found = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a >= 0 and b >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _reduce(nodes: ThisHost, groups: Sequence[tuple[int, ...]], backend: str) -> list[Any]:
    """For each group of nodes, which have no node in common, the answer of its first, or an exception."""
    ports = nodes.ask(listen, each={group[0]: (nodes.addresses[group[0]], False) for group in groups})
    each: dict[int, tuple] = {}
    for group in groups:
        store = nodes.addresses[group[0]], ports[group[0]]
        for rank, node in enumerate(group) if isinstance(store[1], int) else ():
            each[node] = (rank, len(group), *store, backend, nodes.addresses[node], GROUP_S)
    answers = nodes.ask(reduce_here, each=each, limit_s=GROUP_S + IMPORT_S + REPLY_S)
    of_groups = [[ports[group[0]], *(answers[node] for node in group)] for group in groups]
    failed = [[answer for answer in group if isinstance(answer, Exception)] for group in of_groups]
    return [wrong[0] if wrong else group[1] for group, wrong in zip(of_groups, failed, strict=True)]


def _compare(nodes: ThisHost, times: dict[frozenset[int], float], network: str) -> Diagnosis:
    ordered = sorted(times.items(), key=lambda item: item[1])
    median, (slowest, longest) = ordered[len(ordered) // 2][1], ordered[-1]
    names = " and ".join(nodes.names[i] for i in sorted(slowest))
    what = f"{len(times)} pairs, {network}: {_speed(ordered[0][1])} to {_speed(longest)}, slowest {names}"
    if longest > SLOW * median:
        return Diagnosis(WARNING, what, "compare these two with others: link, MTU, zone")
    return Diagnosis(OK, what)


def _speed(seconds: float) -> str:
    return f"{ELEMENTS * 4 / seconds / 1e9:.2f} GB/s ({seconds * 1e3:.1f} ms for 16 MiB)"
