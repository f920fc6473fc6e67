"""Hosts to examine (this host or the nodes of a Ray cluster), and checks of packages, clocks and storage."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution
from time import time
from typing import Any

from raytrec.cluster.session import pin_to_node, ray_session
from raytrec.common.errors import RaytrecError, RunError, get_first_line, get_last_line, get_root_cause
from raytrec.common.file_hashes import compute_code_hash
from raytrec.common.formatting import format_count
from raytrec.common.machine import PACKAGES
from raytrec.common.storage import open_filesystem
from raytrec.compat.ray_core import list_alive_nodes
from raytrec.doctor.host_checks import FAILURE, OK, WARNING, Diagnoses, Diagnosis, call_within

REPLY_TIMEOUT_S = 60.0  # default time limit of a call on a node, sufficient for a busy node
NO_ANSWER_REPAIR = "check Ray on this node (ray status), and whether the node has this version of raytrec"
START_TIMEOUT_S = 120.0  # a node has to start a process before it responds
STORAGE_TIMEOUT_S = 60.0
WARNING_SKEW_S, FAILURE_SKEW_S = 1.0, 300.0  # S3 refuses requests that are 15 minutes off
CLOCK_MEASUREMENTS = 3  # measurements of a clock; the fastest response counts
PROBE_FILE_BYTES = 1 << 16
# Lines of RECORD that depend on the environment.
ENVIRONMENT_LINE_PATTERN = re.compile(r"\.dist-info/|^\.\./")


Function = Callable[..., Any]
HostArguments = dict[int, tuple] | None


class ThisHost:
    """Hosts that are examined: this host alone, without Ray. ClusterNodes is the subclass for clusters.

    Attributes:
        names: Names of the hosts.
        addresses: Address of each host, at which other hosts reach it.
        unresponsive_hosts: Name of each host that could not be called, and is therefore excluded → reason.
        hosts_without_torch: Indices of hosts that cannot import torch.
        disconnected_pairs: Pairs of hosts (indices) that cannot connect.
    """

    def __init__(self):
        self.names, self.addresses = [socket.gethostname()], ["127.0.0.1"]
        self.unresponsive_hosts: dict[str, str] = {}
        self.hosts_without_torch: set[int] = set()
        self.disconnected_pairs: set[frozenset[int]] = set()

    def ask(
        self, call: Function, *arguments: Any, host_arguments: HostArguments = None, limit_s: float = REPLY_TIMEOUT_S
    ) -> list[Any]:
        """Call a function on all hosts at once, and return the result or exception of each host.

        Args:
            call: Function to call.
            *arguments: Arguments passed on every host.
            host_arguments: Index of a host → additional arguments. Other hosts are not called, and their result is
                None. Default: all hosts are called without additional arguments.
            limit_s: Seconds after which the result of a host is a TimeoutError.
        """
        try:
            return [call_within(limit_s, lambda: call(*arguments, *(host_arguments or {0: ()})[0]))]
        except Exception as error:
            return [error]


class _Caller:
    """Actor on a node that calls functions of raytrec there."""

    def call(self, function: Function, arguments: tuple) -> Any:
        return function(*arguments)


class ClusterNodes(ThisHost):
    """Nodes of the Ray cluster to which this process is connected, with an actor on each node."""

    def __init__(self):
        import ray

        super().__init__()
        nodes = list_alive_nodes()
        addresses = [node["NodeManagerAddress"] for node in nodes]
        names = _make_distinct_names([node["NodeManagerHostname"] for node in nodes], addresses)
        actor = ray.remote(max_restarts=0, max_concurrency=8)(_Caller)
        self._actors = [actor.options(**pin_to_node(node["NodeID"])).remote() for node in nodes]
        answers = self.ask(compute_code_hash, limit_s=START_TIMEOUT_S)  # raises an error on nodes without raytrec
        fit = [number for number, answer in enumerate(answers) if isinstance(answer, str)]
        self.unresponsive_hosts = {
            names[i]: get_last_line(str(answer), type(answer).__name__)[:300]
            for i, answer in enumerate(answers)
            if i not in fit
        }
        self.names, self.addresses = [names[i] for i in fit], [addresses[i] for i in fit]
        self._actors = [self._actors[i] for i in fit]

    def ask(
        self, call: Function, *arguments: Any, host_arguments: HostArguments = None, limit_s: float = REPLY_TIMEOUT_S
    ) -> list[Any]:
        """Call a function on the nodes at once; see `ThisHost.ask`."""
        host_arguments = dict.fromkeys(range(len(self._actors)), ()) if host_arguments is None else host_arguments
        refs = [self._actors[i].call.remote(call, (*arguments, *extra)) for i, extra in host_arguments.items()]
        answers = dict(zip(host_arguments, collect_answers(refs, limit_s), strict=True))
        return [answers.get(i) for i in range(len(self._actors))]


def collect_answers(refs: list[Any], limit_s: float) -> list[Any]:
    """Return the result or exception of each remote call, or a TimeoutError if the call takes longer than `limit_s`."""
    import ray

    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=limit_s) if refs else ([], [])
    timeout_error = TimeoutError(f"no response within {limit_s:.0f} s")
    return [_answer(ref) if ref in ready else timeout_error for ref in refs]


def _answer(ref: Any) -> Any:
    import ray

    try:
        return ray.get(ref)
    except Exception as error:
        cause = get_root_cause(error)
        return getattr(cause, "cause", None) or cause


def _make_distinct_names(hosts: list[str], addresses: list[str]) -> list[str]:
    """Return a distinct name for each node: "HOST (ADDRESS)", with a number for further nodes on one machine."""
    names: list[str] = []
    for host, address in zip(hosts, addresses, strict=True):
        name = f"{host} ({address})"
        count = sum(each.startswith(name) for each in names)
        names.append(f"{name} #{count + 1}" if count else name)
    return names


@contextmanager
def open_nodes(address: str | None) -> Iterator[ThisHost]:
    """Yield the hosts to examine; for a cluster, this process is connected to the cluster during the block.

    Args:
        address: Address of a cluster (scaling.address); None: this host.

    Raises:
        RunError: The cluster cannot be joined (see ray_session), or the address is the URL of a dashboard.
    """
    if address is None:
        yield ThisHost()
        return
    if address.startswith(("http://", "https://")):
        raise RunError(
            f"{address} is the address of a dashboard, which cannot run checks on nodes",
            where=address,
            expected="the address of the cluster itself",
            do="use auto or HOST:PORT on a node of the cluster, or ray://HOST:PORT on other hosts",
        )
    with ray_session(address, any_versions=True):
        yield ClusterNodes()


def describe_packages() -> dict[str, str]:
    """Return name → version of Python and of packages, with a hash of each package's files, and of raytrec's code.

    Packages that are not installed are omitted.
    """
    versions = {"Python": platform.python_version(), "raytrec's code": compute_code_hash()}
    for package in (*PACKAGES[1:], "numpy", "pyarrow"):
        try:
            package_info = distribution(package)
        except PackageNotFoundError:
            continue
        lines = (package_info.read_text("RECORD") or "").splitlines()
        # Omit lines that depend on the environment: scripts contain a path of Python, dist-info names the installer.
        lines = [line for line in lines if "sha256=" in line and not ENVIRONMENT_LINE_PATTERN.search(line)]
        digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:8]
        versions[package] = f"{package_info.version} (files {digest})"
    return versions


def check_same_packages(nodes: ThisHost) -> Diagnoses:
    """Check that Python, raytrec's code and the packages on which raytrec depends are the same on all nodes.

    The packages include Ray, torch, TorchRec and FBGEMM. Python versions must agree down to the patch number.
    """
    answers = nodes.ask(describe_packages)
    by_host = {name: dist for name, dist in zip(nodes.names, answers, strict=True) if isinstance(dist, dict)}
    failed = []
    for package in sorted({package for dist in by_host.values() for package in dist}):
        versions = {name: dist.get(package, "missing") for name, dist in by_host.items()}
        (usual, _), *others = Counter(versions.values()).most_common()
        for version, _ in others:
            hosts = tuple(name for name, each in versions.items() if each == version)
            what = f"{package} {version}, but {usual} on other nodes"
            do = "install the same Python, raytrec and requirements/*.txt on every node, or use one image"
            failed.append(Diagnosis(FAILURE, what, do, hosts=hosts))
    for name, answer in zip(nodes.names, answers, strict=True):
        if isinstance(answer, Exception):
            what = f"the packages of this node are unknown: {get_first_line(answer)}"
            failed.append(Diagnosis(FAILURE, what, NO_ANSWER_REPAIR, hosts=(name,)))
    yield from failed or [Diagnosis(OK, f"{len(answers[0])} versions are the same on {len(answers)} nodes")]


def check_clocks(nodes: ThisHost) -> Diagnoses:
    """Check that each node's clock differs from this host's clock by at most WARNING_SKEW_S plus the uncertainty.

    Nodes that do not respond are left out.
    """
    skews: dict[str, tuple[float, float]] = {}
    for number, name in enumerate(nodes.names):
        for _ in range(CLOCK_MEASUREMENTS):
            began = time()
            remote_time, ended = nodes.ask(time, host_arguments={number: ()})[number], time()
            if isinstance(remote_time, float):
                skew, doubt = remote_time - (began + ended) / 2, (ended - began) / 2
                skews[name] = min(skews.get(name, (skew, doubt)), (skew, doubt), key=lambda pair: pair[1])
    yield from diagnose_clocks(skews)


def diagnose_clocks(skews: dict[str, tuple[float, float]]) -> Diagnoses:
    """Yield a diagnosis for each clock that differs from this host's clock, or a single ok diagnosis.

    Args:
        skews: Name of a node → (seconds by which its clock is ahead, uncertainty of this value in seconds).
    """
    do = "synchronize the clock with NTP: timedatectl set-ntp true, chronyc makestep"
    diagnoses = []
    for name, (skew, doubt) in skews.items():
        if (min_skew := abs(skew) - doubt) > WARNING_SKEW_S:
            result = FAILURE if min_skew > FAILURE_SKEW_S else WARNING
            which = "ahead of" if skew > 0 else "behind"
            what = f"the clock of this node is {abs(skew):,.1f} s {which} the clock of the host that runs the doctor"
            diagnoses.append(Diagnosis(result, what, do, hosts=(name,)))
    yield from diagnoses or [Diagnosis(OK, f"{len(skews)} clocks are within {WARNING_SKEW_S:.0f} s of this host's")]


def write_and_read(uri: str, name: str) -> str:
    """Write a file to a storage folder, and read it back; return the reason for a failure, or "" on success."""
    try:
        filesystem, folder = open_filesystem(uri)
        if filesystem.type_name == "local" and not os.path.isdir(folder):
            return "there is no such folder"
        data = secrets.token_bytes(PROBE_FILE_BYTES)
        with filesystem.open_output_stream(f"{folder}/{name}") as stream:
            stream.write(data)
        with filesystem.open_input_stream(f"{folder}/{name}") as stream:
            same = stream.read() == data
        return "" if same else "the data read differs from the data written"
    except (OSError, RaytrecError) as error:
        return get_first_line(error)


def find_missing_files(uri: str, names: list[str]) -> list[str]:
    """Return the file names that this host does not find in a storage folder; raise OSError or DataError on failure."""
    from pyarrow import fs

    filesystem, folder = open_filesystem(uri)
    infos = filesystem.get_file_info([f"{folder}/{name}" for name in names])
    return [name for name, info in zip(names, infos, strict=True) if info.type == fs.FileType.NotFound]


def remove_files(uri: str, names: list[str]) -> None:
    """Remove files from a storage folder; ignore files that are missing or cannot be removed."""
    filesystem, folder = open_filesystem(uri)
    for name in names:
        with suppress(OSError):
            filesystem.delete_file(f"{folder}/{name}")


def check_storage(nodes: ThisHost, uri: str) -> Diagnoses:
    """Check that every node can write and read a file in a storage folder, and sees the files of all other nodes."""
    names = [f"raytrec-doctor-{secrets.token_hex(4)}-{number}" for number in range(len(nodes.names))]
    file_arguments = {number: (name,) for number, name in enumerate(names)}
    do = f"make {uri} accessible to this user on every node: mounts, credentials, region, endpoint, quota"
    try:
        answers = nodes.ask(write_and_read, uri, host_arguments=file_arguments, limit_s=STORAGE_TIMEOUT_S)
        reasons = [str(answer) for answer in answers]
        written = [name for name, reason in zip(names, reasons, strict=True) if not reason]
        for host, reason in zip(nodes.names, reasons, strict=True):
            if reason:
                yield Diagnosis(FAILURE, f"{uri} cannot be written and read: {reason}", do, hosts=(host,))
        missing_by_host = nodes.ask(find_missing_files, uri, written, limit_s=STORAGE_TIMEOUT_S)
        for host, reason, missing in zip(nodes.names, reasons, missing_by_host, strict=True):
            if not reason and missing:
                what = f"cannot be listed: {missing}"
                if not isinstance(missing, Exception):
                    what = f"lacks {format_count(len(missing), 'file')} written by other nodes"
                repair = do if "://" in uri else f"mount the same storage at {uri} on every node, or use s3://"
                yield Diagnosis(FAILURE, f"{uri} on this node {what}", repair, hosts=(host,))
        if not any(reasons) and not any(missing_by_host):
            yield Diagnosis(OK, f"{uri}: each host has written and read {PROBE_FILE_BYTES >> 10} KiB")
    finally:
        nodes.ask(remove_files, uri, names)
