"""Checks of the network between nodes: interfaces, ports, and a timed all-reduce."""

from __future__ import annotations

import os
import re
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from ipaddress import ip_address
from itertools import combinations
from typing import Any

from raytrec.cluster.session import find_interface
from raytrec.common.machine import get_build_device, list_gpu_kinds
from raytrec.doctor.child import run_child
from raytrec.doctor.host_checks import FAILURE, OK, WARNING, Diagnoses, Diagnosis
from raytrec.doctor.nodes import NO_ANSWER_REPAIR, REPLY_TIMEOUT_S, ThisHost

ALL_REDUCE_ELEMENTS, ROUNDS = 1 << 22, 4  # timed all-reduce: 16 MiB of float32, fastest of four
PORT_CONNECT_TIMEOUT_S, COLLECTIVE_TIMEOUT_S = 5.0, 90.0
CHILD_TIMEOUT_S = COLLECTIVE_TIMEOUT_S + 60.0  # importing torch and an all-reduce
MAX_ALL_REDUCES = 16  # all-reduces of one check; each may take COLLECTIVE_TIMEOUT_S
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
BRIDGE_PATTERN = re.compile(r"docker|br-|virbr|veth|cni|flannel|cali|lxc|podman|vmnet|tunl")
ADDRESS_REPAIR = (
    "start Ray on each node with --node-ip-address=ADDRESS, an address that all nodes can reach, or set "
    "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface before Ray starts"
)
PORTS_REPAIR = (
    "allow all TCP ports between nodes (security group, firewall, NetworkPolicy): workers use any free port "
    "(docs/cluster.md)"
)

_listeners: list[socket.socket] = []


def describe_interfaces(address: str) -> dict[str, Any]:
    """Return this host's network interfaces; `address` is the address by which Ray knows the host.

    The keys of the result are own (name of the interface with this address, or None), have (name of each interface →
    its addresses), and chosen (each of INTERFACE_VARIABLES that is set → its value).
    """
    import psutil

    interfaces = {name: [each.address for each in all_] for name, all_ in psutil.net_if_addrs().items()}
    chosen = {name: value for name in INTERFACE_VARIABLES if (value := os.environ.get(name))}
    return {"own": find_interface(address), "have": interfaces, "chosen": chosen}


def check_interfaces(nodes: ThisHost) -> Diagnoses:
    """Check that gloo and NCCL use an interface that other nodes can reach, not a Docker bridge or loopback."""
    arguments = {i: (address,) for i, address in enumerate(nodes.addresses)}
    loopback = [ip_address(address).is_loopback for address in nodes.addresses]
    answers = nodes.ask(describe_interfaces, host_arguments=arguments)
    for name, address, local, answer in zip(nodes.names, nodes.addresses, loopback, answers, strict=True):
        parts = _diagnose_interfaces(answer, address, local and not all(loopback), len(answers) > 1)
        yield Diagnosis(*parts, hosts=(name,))


def _diagnose_interfaces(answer: Any, address: str, is_loopback: bool, several: bool) -> tuple[str, str, str]:
    """Return the result, finding and repair of the diagnosis of one node's interfaces.

    Args:
        answer: Result of `describe_interfaces`, or an exception.
        address: Address by which Ray knows the node.
        is_loopback: True if this address is loopback, and the address of another node is not.
        several: True if there are other nodes.
    """
    if isinstance(answer, Exception):
        return FAILURE, f"the interfaces of this node are unknown: {answer}", NO_ANSWER_REPAIR
    interfaces, chosen = answer["have"], answer["chosen"]
    for variable, value in chosen.items():
        prefixes = tuple(each.partition(":")[0] for each in value.lstrip("=").split(","))
        if value.startswith("^") or any(name.startswith(prefixes) for name in interfaces):
            continue
        do = f"set {variable} to one of {', '.join(sorted(interfaces))}, or unset it, before Ray starts"
        return FAILURE, f"{variable}={value}, but there is no such interface", do
    uses: dict[tuple[str, str], str] = {}  # (interface, its origin) → subject and verb
    for library, variable in zip(("gloo", "NCCL"), INTERFACE_VARIABLES, strict=True):
        origin = f"set by {variable}" if variable in chosen else "the interface of its address"
        use = chosen.get(variable, answer["own"] or "").lstrip("="), origin
        uses[use] = "gloo and NCCL use" if use in uses else f"{library} uses"
    for (name, _), subject in uses.items():
        if several and BRIDGE_PATTERN.match(name):
            what = f"{subject} {name} ({address}), a bridge inside this host (judging by its name)"
            return FAILURE, what, ADDRESS_REPAIR
    if is_loopback:
        return FAILURE, f"other nodes cannot reach this node at Ray's address {address}", ADDRESS_REPAIR
    if not all(name for name, _ in uses):
        what = f"no interface has the node's address {address}, so gloo or NCCL chooses an interface"
        return WARNING, what, ADDRESS_REPAIR
    return OK, "; ".join(f"{subject} {name}, {origin}" for (name, origin), subject in uses.items()), ""


def listen(address: str, keep: bool = True) -> int:
    """Listen on a free port of an address (or, if no interface has it, of all addresses), and return the port.

    If `keep` is True, the socket stays open until this process ends; otherwise, it is closed before returning.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.bind((address, 0))
    except OSError:  # no interface has this address, which NAT translates
        listener.bind(("", 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    _listeners.append(listener) if keep else listener.close()
    return port


def find_connection_errors(places: list[tuple[str, int]], limit_s: float = PORT_CONNECT_TIMEOUT_S) -> list[str]:
    """Return, for each (host, port), the reason why a connection fails, or "" if the connection is accepted."""

    def connect(place: tuple[str, int]) -> str:
        try:
            socket.create_connection(place, limit_s).close()
        except OSError as error:
            return f"no response within {limit_s:.0f} s" if isinstance(error, TimeoutError) else str(error)
        return ""

    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(connect, places))


def check_ports(nodes: ThisHost) -> Diagnoses:
    """Check that each node can connect to a port of every other node; add failed pairs to nodes.disconnected_pairs."""
    indices = range(len(nodes.names))
    ports = nodes.ask(listen, host_arguments={i: (nodes.addresses[i],) for i in indices})
    listening = [i for i in indices if isinstance(ports[i], int)]
    places = [(nodes.addresses[i], ports[i]) for i in listening]
    limit_s = REPLY_TIMEOUT_S + PORT_CONNECT_TIMEOUT_S * (1 + len(places) // 64)
    answers = nodes.ask(find_connection_errors, places, limit_s=limit_s)
    for node in indices:
        if failed := [a for a in (ports[node], answers[node]) if isinstance(a, Exception)]:
            nodes.disconnected_pairs |= {frozenset((node, peer)) for peer in indices}
            what = f"this node could not test its connections: {failed[0]}"
            yield Diagnosis(FAILURE, what, NO_ANSWER_REPAIR, hosts=(nodes.names[node],))
            continue
        for peer, (_, port), reason in zip(listening, places, answers[node], strict=True):
            if reason and node != peer:
                nodes.disconnected_pairs.add(frozenset((node, peer)))
                pair = f"{nodes.names[node]} cannot reach {nodes.names[peer]}"
                yield Diagnosis(FAILURE, f"{pair} at port {port}: {reason}", PORTS_REPAIR)
    if not nodes.disconnected_pairs:
        yield Diagnosis(OK, f"{len(listening)} nodes reach each other at free ports")


def uses_nccl() -> bool:
    """Return True if this host has GPUs, and torch and FBGEMM are built for CUDA."""
    return get_build_device() == "cuda" and bool(list_gpu_kinds())


def join_group(
    rank: int, world: int, address: str, port: int, backend: str, own_address: str, timeout_s: float
) -> dict[str, Any]:
    """Time all-reduces of 16 MiB over a group; return {"seconds": duration of the fastest, "network": description}.

    Args:
        rank: Rank of this process.
        world: Number of processes.
        address: Address of the store of rank 0.
        port: Port of that store.
        backend: nccl or gloo.
        own_address: Address of this host.
        timeout_s: Timeout of each collective in seconds.

    Raises:
        ValueError: The all-reduce returned a wrong sum.
    """
    import torch
    import torch.distributed as dist

    from raytrec.worker.rendezvous import enable_network_log, listen_on_own_address, read_chosen_network

    listen_on_own_address(own_address)
    device, network = "cpu", f"gloo over TCP ({os.environ.get('GLOO_SOCKET_IFNAME', 'default interface')})"
    if backend == "nccl":
        enable_network_log()
        device = "cuda"
        torch.cuda.set_device(0)
    host = f"[{address}]" if ":" in address else address
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, f"tcp://{host}:{port}", timeout, world, rank)
    values, best = torch.ones(ALL_REDUCE_ELEMENTS, device=device), float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    if values[0].item() != world**ROUNDS or values[-1].item() != world**ROUNDS:
        raise ValueError(f"the all-reduce returned {values[0].item()} instead of {world**ROUNDS}")
    dist.barrier()
    if backend == "nccl":
        network = f"NCCL over {read_chosen_network() or 'an unknown network'}"
    dist.destroy_process_group()
    return {"seconds": best, "network": network}


def time_all_reduce_in_child(*arguments: Any) -> dict[str, Any]:
    """Call `join_group` in a child process, with its arguments except the timeout, and return its result.

    Errors are as for `run_child`.
    """
    return run_child(join_group, *arguments, COLLECTIVE_TIMEOUT_S, limit_s=CHILD_TIMEOUT_S)


def check_all_reduce(nodes: ThisHost) -> Diagnoses:
    """Time an all-reduce of 16 MiB over all nodes that can import torch, if all these nodes can connect.

    If the all-reduce fails, the smallest failing groups of nodes are named, and the remaining nodes are timed. At most
    MAX_ALL_REDUCES all-reduces are run.
    """
    remaining = [i for i in range(len(nodes.names)) if i not in nodes.hosts_without_torch]
    if len(remaining) < 2:
        yield Diagnosis(WARNING, "fewer than two nodes pass the check `operators`", "first repair its failures")
        return
    if any(frozenset(pair) in nodes.disconnected_pairs for pair in combinations(remaining, 2)):
        yield Diagnosis(WARNING, "not timed: some nodes cannot connect", "first repair failures of `ports`")
        return
    nccl = nodes.ask(uses_nccl)
    backend = "nccl" if all(nccl[i] is True for i in remaining) else "gloo"
    answers: dict[tuple[int, ...], Any] = {}

    def fails(group: Sequence[int]) -> bool:
        if (key := tuple(group)) not in answers and len(answers) < MAX_ALL_REDUCES:
            answers[key] = _reduce(nodes, key, backend)
        return isinstance(answers.get(key), Exception)

    while len(remaining) > 1 and fails(remaining):
        group = find_smallest_failing_group(remaining, fails)
        names = " and ".join(nodes.names[i] for i in sorted(group))
        what = f"an all-reduce of {names} with {backend} failed: {answers[tuple(group)]}"
        yield Diagnosis(FAILURE, what, f"correct the stated cause; if nodes cannot connect, {ADDRESS_REPAIR}")
        # In reverse order, a node that fails with every other node is the last of the next group.
        remaining = [i for i in reversed(remaining) if i != group[-1]]
    if len(remaining) > 1 and (answer := answers.get(tuple(remaining))):
        seconds, which = answer["seconds"], "all" if len(answers) == 1 else "the other"
        speed = f"{ALL_REDUCE_ELEMENTS * 4 / seconds / 1e9:.2f} GB/s ({seconds * 1e3:.1f} ms for 16 MiB)"
        yield Diagnosis(OK, f"over {which} {len(remaining)} nodes: {speed}, {answer['network']}")


def find_smallest_failing_group(group: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> Sequence[int]:
    """Return a node or a pair of a failing group that fails alone, or else a larger subset that fails.

    A binary search finds the shortest failing prefix of the group. A second search finds the shortest prefix that
    fails together with the last node of the first prefix.

    Args:
        group: Nodes that fail together.
        fails: Function that returns True if nodes are known to fail together.
    """
    end = bisect_left(range(len(group)), True, 1, key=lambda size: fails(group[:size])) - 1
    size = bisect_left(range(end), True, key=lambda size: fails([*group[:size], group[end]]))
    pair = [*group[max(0, size - 1) : size], group[end]]
    return pair if fails(pair) else [*group[:size], group[end]]


def _reduce(nodes: ThisHost, group: Sequence[int], backend: str) -> Any:
    """Run an all-reduce on a group of nodes; return the first node's result, or the first exception of any node."""
    first = nodes.addresses[group[0]]
    port = nodes.ask(listen, host_arguments={group[0]: (first, False)})[group[0]]
    if isinstance(port, Exception):
        return port
    arguments = {
        node: (rank, len(group), first, port, backend, nodes.addresses[node]) for rank, node in enumerate(group)
    }
    limit_s = CHILD_TIMEOUT_S + REPLY_TIMEOUT_S
    answers = nodes.ask(time_all_reduce_in_child, host_arguments=arguments, limit_s=limit_s)
    return next((answer for answer in answers if isinstance(answer, Exception)), answers[group[0]])
