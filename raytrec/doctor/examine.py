"""`raytrec doctor`: all checks in the order in which users report what they find."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from raytrec.cluster.host_checks import FAILURE, HOST_CHECKS, Diagnosis, Found, failure_of, run_check
from raytrec.cluster.session import stays_here
from raytrec.common.errors import first_line, os_errors
from raytrec.common.machine import built_for, usable_gpus
from raytrec.common.storage import absolute
from raytrec.common.terminal import open_console
from raytrec.config.run_config import load_config
from raytrec.doctor import agreement, network, packages  # noqa: F401  (packages registers checks)
from raytrec.doctor.nodes import NO_ANSWER, ThisHost, nodes_of
from raytrec.driver.prepare import resolve

AMONG_NODES: dict[str, Callable[[ThisHost], Found]] = {  # left out for one host
    "interfaces": network.check_interfaces,
    "ports": network.check_ports,
    "all-reduce": network.check_all_reduce,
    "same packages": agreement.check_same_packages,
    "clocks": agreement.check_clocks,
}
CHECK_ORDER = (
    *("packages", "operators", "builds", "gpus", "driver"),
    *("interfaces", "ports", "all-reduce", "same packages"),
    *("shared memory", "limits", "memory", "Ray's folder", "clusters", "token", "storage", "clocks"),
)
REPORTS_LATE_S = 5.0  # that a node may take for the answer about a check which has come to its limit
AMONG_NODES_S = 3600.0


@dataclass
class Examination:
    """What was found.

    Attributes:
        hosts: that were looked at. diagnoses: in the order of CHECK_ORDER.
    """

    hosts: list[str] = field(default_factory=list)
    diagnoses: list[Diagnosis] = field(default_factory=list)

    def count(self, result: str) -> int:
        return sum(diagnosis.result == result for diagnosis in self.diagnoses)


def examine(
    address: str | None = None, storage: list[str] | None = None, show: Callable[[str], None] = lambda _: None
) -> Examination:
    """Looks at this host, or at every node of a cluster; nothing is changed, and no check raises.

    Args:
        address: as scaling.address; default: RAY_ADDRESS, or the cluster of the job, else this host alone.
        storage: places that every node has to reach.
        show: called with the name of each check that begins.
    """
    if address is None and not stays_here(None):
        address = os.environ.get("RAY_ADDRESS") or "auto"
    found = Examination()
    try:
        with nodes_of(address) as nodes:
            _look_at(nodes, storage or [], show, found)
    except Exception as error:
        found.diagnoses.insert(0, replace(failure_of(error), check="cluster"))
        if not found.hosts:  # the cluster cannot be joined: maybe this host shows why
            _look_at(ThisHost(), storage or [], show, found)
    return found


def diagnose(config: str | None, address: str | None, storage: list[str]) -> Examination:
    """The same for the command line, with a live line on terminals.

    Args:
        config: whose scaling.address, run folder and checkpoints are looked at, too.

    Raises:
        ConfigError: the configuration is wrong.
    """
    places = [absolute(uri) for uri in storage]
    if config:
        resolved = resolve(load_config(config), config)
        address = address or resolved.scaling.address
        places += [_existing(place) for place in (resolved.checkpoint.dir, resolved.run.dir) if place]
    console = open_console(stderr=True)
    with console.status("") if console.is_terminal else nullcontext() as line:
        show = (lambda name: line.update(f"looking at {name}")) if line else lambda _: None
        return examine(address, list(dict.fromkeys(places)), show)


def write_rates(file: Path, ranks: int | None) -> None:
    """Measures what ranks of this machine reach (doctor.measure), and writes it for `raytrec plan`.

    Args:
        ranks: default: as many as there are GPUs, or 2.

    Raises:
        RunError: a rank failed, or the file cannot be written.
    """
    from raytrec.doctor.measure import measure_rates

    gpus = usable_gpus() if built_for() == "cuda" else []
    rates = measure_rates(ranks or len(gpus) or 2, lambda line: print(line, file=sys.stderr))
    with os_errors("cannot write the rates", where=str(file)):
        file.write_text(rates.to_json(), encoding="utf-8")


def _existing(place: str) -> str:
    """The nearest folder above a place that a run will make; URIs have no folders."""
    if "://" in place:
        return place
    return str(next(path for path in (Path(place), *Path(place).parents) if path.is_dir()))


def _look_at(nodes: ThisHost, storage: list[str], show: Callable[[str], None], found: Examination) -> None:
    found.hosts = [*nodes.names, *nodes.silent]
    for host, why in nodes.silent.items():
        what = f"this node does not answer: {why}"
        found.diagnoses.append(Diagnosis(FAILURE, what, NO_ANSWER, "nodes", (host,)))
    of_storage = (diagnosis for uri in storage for diagnosis in agreement.check_storage(nodes, uri))
    among_nodes = AMONG_NODES | {"storage": lambda _: of_storage}
    for name in CHECK_ORDER:
        if not nodes.names or (name in AMONG_NODES and len(nodes.names) == 1):
            continue
        show(name)
        if name in among_nodes:
            found.diagnoses += merged(run_check(name, partial(among_nodes[name], nodes), AMONG_NODES_S))
            continue
        answers = nodes.ask(check_host, name, limit_s=HOST_CHECKS[name][1] + REPORTS_LATE_S)
        diagnoses = _of_hosts(name, nodes.names, answers)
        found.diagnoses += diagnoses
        if name == "operators":
            bad = {host for diagnosis in diagnoses if diagnosis.result == FAILURE for host in diagnosis.hosts}
            nodes.unfit.update(i for i, host in enumerate(nodes.names) if host in bad)


def check_host(name: str) -> list[Diagnosis]:
    """The diagnoses of one of HOST_CHECKS on the host that this is called on."""
    return run_check(name, *HOST_CHECKS[name])


def merged(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    """Verdicts that differ in their hosts only become one."""
    hosts: dict[Diagnosis, tuple[str, ...]] = {}
    for diagnosis in diagnoses:
        bare = replace(diagnosis, hosts=())
        hosts[bare] = (*hosts.get(bare, ()), *diagnosis.hosts)
    return [replace(bare, hosts=where) for bare, where in hosts.items()]


def _of_hosts(name: str, hosts: list[str], answers: list[Any]) -> list[Diagnosis]:
    diagnoses = []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, Exception):
            what = f"this host does not answer: {type(answer).__name__}: {first_line(answer)}"
            answer = [Diagnosis(FAILURE, what, NO_ANSWER, name)]
        diagnoses += [replace(diagnosis, hosts=(host,)) for diagnosis in answer]
    return merged(diagnoses)
