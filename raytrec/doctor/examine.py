"""`raytrec doctor`: all checks of hosts and clusters, and a table of the results."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from raytrec import __version__
from raytrec.cluster.session import starts_local_ray
from raytrec.common.errors import get_first_line
from raytrec.common.formatting import format_count
from raytrec.common.redaction import anonymize
from raytrec.common.storage import make_absolute
from raytrec.common.terminal import open_console, to_plain_text
from raytrec.config.run_config import RunConfig
from raytrec.doctor import network
from raytrec.doctor.host_checks import (
    FAILURE,
    HOST_CHECKS,
    OK,
    WARNING,
    Diagnoses,
    Diagnosis,
    diagnose_error,
    run_check,
)
from raytrec.doctor.nodes import (
    NO_ANSWER_REPAIR,
    ThisHost,
    check_clocks,
    check_same_packages,
    check_storage,
    open_nodes,
)

CLUSTER_CHECKS: dict[str, Callable[[ThisHost], Diagnoses]] = {  # skipped if only one host is examined
    "interfaces": network.check_interfaces,
    "ports": network.check_ports,
    "all-reduce": network.check_all_reduce,
    "same packages": check_same_packages,
    "clocks": check_clocks,
}
CHECK_ORDER = (
    *("packages", "operators", "builds", "gpus", "driver"),
    *("interfaces", "ports", "all-reduce", "same packages"),
    *("shared memory", "limits", "memory", "Ray's folder", "clusters", "token", "storage", "clocks"),
)
ANSWER_MARGIN_S = 5.0  # time for a node to respond after a check has reached its limit
CLUSTER_CHECK_TIMEOUT_S = 3600.0
STYLES = {OK: "green", WARNING: "yellow", FAILURE: "red"}
COMMON_USERS = ("", "root", "ray", "ubuntu", "user", "runner")  # user names that exist on many machines


@dataclass
class Examination:
    """Result of `examine`.

    Attributes:
        hosts: Names of the hosts, including hosts that could not be examined.
        diagnoses: Diagnoses of problems with the cluster or its nodes, then diagnoses in the order of CHECK_ORDER.
    """

    hosts: list[str] = field(default_factory=list)
    diagnoses: list[Diagnosis] = field(default_factory=list)

    def count(self, result: str) -> int:
        """Return the number of diagnoses with this result: ok, warning or failure."""
        return sum(diagnosis.result == result for diagnosis in self.diagnoses)

    @property
    def summary(self) -> str:
        """Return the numbers of nodes, failures and warnings as text."""
        numbers = {"node": len(self.hosts), "failure": self.count(FAILURE), "warning": self.count(WARNING)}
        return ", ".join(format_count(number, what) for what, number in numbers.items())

    def place(self, diagnosis: Diagnosis) -> str:
        """Return the hosts of a diagnosis as text, such as "all 3"; "" with a single host, or without hosts."""
        if len(self.hosts) == 1:
            return ""
        is_everywhere = len(diagnosis.hosts) == len(self.hosts)
        return f"all {len(self.hosts)}" if is_everywhere else ", ".join(diagnosis.hosts)


def examine(
    address: str | None = None, storage: list[str] | None = None, show: Callable[[str], None] = lambda _: None
) -> Examination:
    """Examine this host, or every node of a cluster. Errors become diagnoses instead of exceptions.

    If the cluster cannot be joined, only this host is examined. The checks change nothing, except that temporary files
    are written to `storage` and removed. They start short processes and, on a cluster, listen on free ports.

    Args:
        address: Address as in scaling.address; default: RAY_ADDRESS or the cluster of the job, else this host
            alone.
        storage: URIs and absolute paths of folders that every node must be able to write and read.
        show: Function called with the name of each check before the check runs.
    """
    if address is None and not starts_local_ray(None):
        address = os.environ.get("RAY_ADDRESS") or "auto"
    examination = Examination()
    try:
        with open_nodes(address) as nodes:
            _run_checks(nodes, storage or [], show, examination)
    except Exception as error:
        examination.diagnoses.insert(0, replace(diagnose_error(error), check="cluster"))
        if not examination.hosts:  # the cluster cannot be joined; this host may show why
            _run_checks(ThisHost(), storage or [], show, examination)
    return examination


def diagnose(config: RunConfig | None, address: str | None, storage: list[str]) -> Examination:
    """Call `examine` for the command line, and show the current check on terminals.

    Args:
        config: Resolved configuration, whose cluster, run folder and checkpoint folder are also examined, or None.
        address: As in `examine`.
        storage: As in `examine`; paths may be relative.

    Raises:
        ConfigError: A Ray job passes a relative path.
    """
    places = [make_absolute(uri) for uri in storage]
    if config:
        address = address or config.scaling.address
        places += [_find_existing_folder(place) for place in (config.checkpoint.dir, config.run.dir) if place]
    console = open_console(stderr=True)
    with console.status("") if console.is_terminal else nullcontext() as line:
        show = (lambda name: line.update(f"checking {name}")) if line else lambda _: None
        return examine(address, list(dict.fromkeys(places)), show)


def _find_existing_folder(place: str) -> str:
    """Return the nearest existing folder at or above a folder that a run creates; return URIs unchanged."""
    if "://" in place:
        return place
    return str(next(path for path in (Path(place), *Path(place).parents) if path.is_dir()))


def _run_checks(nodes: ThisHost, storage: list[str], show: Callable[[str], None], exam: Examination) -> None:
    exam.hosts = [*nodes.names, *nodes.unresponsive_hosts]
    for host, why in nodes.unresponsive_hosts.items():
        what = f"this node cannot be examined: {why}"
        exam.diagnoses.append(Diagnosis(FAILURE, what, NO_ANSWER_REPAIR, "nodes", (host,)))
    storage_diagnoses = (diagnosis for uri in storage for diagnosis in check_storage(nodes, uri))
    node_checks = CLUSTER_CHECKS | {"storage": lambda _: storage_diagnoses}
    for name in CHECK_ORDER:
        if not nodes.names or (name in CLUSTER_CHECKS and len(nodes.names) == 1):
            continue
        show(name)
        if name in node_checks:
            exam.diagnoses += merge(run_check(name, partial(node_checks[name], nodes), CLUSTER_CHECK_TIMEOUT_S))
            continue
        answers = nodes.ask(check_host, name, limit_s=HOST_CHECKS[name][1] + ANSWER_MARGIN_S)
        diagnoses: list[Diagnosis] = []
        for number, (host, answer) in enumerate(zip(nodes.names, answers, strict=True)):
            if isinstance(answer, Exception):
                what = f"this host cannot be checked: {type(answer).__name__}: {get_first_line(answer)}"
                answer = [Diagnosis(FAILURE, what, NO_ANSWER_REPAIR, name)]
            diagnoses += [replace(diagnosis, hosts=(host,)) for diagnosis in answer]
            if name == "operators" and any(diagnosis.result == FAILURE for diagnosis in answer):
                nodes.hosts_without_torch.add(number)
        exam.diagnoses += merge(diagnoses)


def check_host(name: str) -> list[Diagnosis]:
    """Run one of HOST_CHECKS on this host, and return its diagnoses."""
    return run_check(name, *HOST_CHECKS[name])


def merge(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    """Return the diagnoses, with diagnoses that differ only in their hosts merged into one."""
    hosts: dict[Diagnosis, tuple[str, ...]] = {}
    for diagnosis in diagnoses:
        bare = replace(diagnosis, hosts=())
        hosts[bare] = (*hosts.get(bare, ()), *diagnosis.hosts)
    return [replace(bare, hosts=where) for bare, where in hosts.items()]


def anonymize_examination(examination: Examination) -> Examination:
    """Return a copy without names of hosts and this user, paths and addresses; hosts become node 1, node 2, etc."""
    hosts = {host: f"node {number}" for number, host in enumerate(examination.hosts, 1)}
    user = os.environ.get("LOGNAME") or os.environ.get("USER") or ""
    names = {user: "USER"} if user not in COMMON_USERS else {}
    for host in (*examination.hosts, socket.gethostname()):
        name = host.partition(" ")[0]
        for word in {name, name.partition(".")[0]} - {"", "localhost"}:
            names.setdefault(word, hosts.get(host, "HOST"))
    names |= hosts
    diagnoses = [
        replace(
            each,
            finding=anonymize(to_plain_text(each.finding), names),
            do=anonymize(to_plain_text(each.do), names),
            hosts=tuple(hosts.get(host, "HOST") for host in each.hosts),
        )
        for each in examination.diagnoses
    ]
    return Examination([*hosts.values()], merge(diagnoses))


def to_json_values(examination: Examination) -> dict[str, Any]:
    """Return an examination as JSON values: failures and warnings (counts), hosts, raytrec (version), and checks.

    `checks` lists the attributes of each Diagnosis.
    """
    rows = [
        asdict(each) | {"finding": to_plain_text(each.finding), "do": to_plain_text(each.do)}
        for each in examination.diagnoses
    ]
    return {
        "failures": examination.count(FAILURE),
        "warnings": examination.count(WARNING),
        "hosts": examination.hosts,
        "raytrec": __version__,
        "checks": rows,
    }


def to_markdown(examination: Examination) -> str:
    """Return an examination as a Markdown table that can be pasted into an issue."""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    lines = [f"**raytrec doctor** {__version__}, {system}: {examination.summary}", ""]
    lines += ["| result | check | where | finding | what to do |", "|---|---|---|---|---|"]
    for each in examination.diagnoses:
        cells = (each.result, each.check, examination.place(each), each.finding, each.do)
        escaped = [to_plain_text(" ".join(cell.split())).replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)


def print_examination(examination: Examination) -> None:
    """Print a table of the diagnoses to stdout, with a repair for each diagnosis that is not ok, and the summary."""
    console, table = open_console(), Table()
    for column in ("check", "result", "finding"):
        table.add_column(column, overflow="fold", no_wrap=column != "finding")
    for diagnosis in examination.diagnoses:
        where = examination.place(diagnosis)
        text = Text(to_plain_text(f"{where}: {diagnosis.finding}" if where else diagnosis.finding))
        if diagnosis.do:
            text.append(to_plain_text(f"\n→ {diagnosis.do}"), style="bold")
        table.add_row(diagnosis.check, Text(diagnosis.result, STYLES[diagnosis.result]), text)
    console.print(table)
    console.print(examination.summary)
