"""What `raytrec doctor` shows: a table, JSON, or Markdown that names no host and no user."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from dataclasses import replace
from typing import Any

from rich.table import Table
from rich.text import Text

from raytrec import __version__
from raytrec.cluster.host_checks import FAILURE, OK, WARNING, Diagnosis
from raytrec.common.terminal import open_console, plain
from raytrec.doctor.examine import Examination, merged

STYLES = {OK: "green", WARNING: "yellow", FAILURE: "red"}
EVERYONES = ("root", "ray", "ubuntu", "user", "runner")  # users that many machines have
URI = re.compile(r"\b[\w+]+://\S+")
PATH = re.compile(r"(?<![\w.*])~?(?:/[\w.@+~%#-]+)+/?")
LIBRARY = re.compile(r"[\w-]+\.so[\d.]*")  # whose names are upstream's
KNOWN = re.compile(r"/dev/shm|(?:requirements|docs|deploy)/[\w./]+")
IPV4 = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
IPV6 = re.compile(r"(?<![\w:])\[?(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?:%\w+)?\]?(?::\d+)?(?![\w:])")
HOST_PORT = re.compile(r"\b[\w-]+(?:\.[\w-]+)*:\d{2,5}\b")


def shared(found: Examination) -> Examination:
    """The same without hosts, users, paths and addresses: hosts are node 1, node 2, …"""
    nodes = {host: f"node {number}" for number, host in enumerate(found.hosts, 1)}
    words = {word: nodes[host] for host in reversed(found.hosts) for word in _words(host)}
    words |= {word: "HOST" for word in _words(socket.gethostname()) if word not in words}
    user = getpass.getuser() if os.environ.get("USER") or os.environ.get("LOGNAME") else ""
    if user and user not in EVERYONES:
        words[user] = "USER"

    def hide(text: str) -> str:
        for host in sorted(nodes, key=len, reverse=True):  # "vm (10.0.0.1) #2" before "vm (10.0.0.1)"
            text = text.replace(host, nodes[host])
        text = PATH.sub(_path, URI.sub("STORAGE", text))
        for pattern in (IPV4, IPV6, HOST_PORT):
            text = pattern.sub("ADDRESS", text)
        for word in sorted(words, key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", words[word], text)
        return text

    diagnoses = [
        replace(
            diagnosis,
            finding=hide(diagnosis.finding),
            do=hide(diagnosis.do),
            hosts=tuple(nodes.get(host, "HOST") for host in diagnosis.hosts),
        )
        for diagnosis in found.diagnoses
    ]
    return Examination([*nodes.values()], merged(diagnoses))


def _words(host: str) -> list[str]:
    """A host's name, and its first part, as they may stand in messages."""
    name = host.partition(" ")[0]
    return [word for word in (name, name.partition(".")[0]) if word not in ("", "localhost")]


def _path(found: re.Match) -> str:
    path = found[0]
    if KNOWN.fullmatch(path):
        return path
    name = path.rpartition("/")[2]
    return f"PATH/{name}" if LIBRARY.fullmatch(name) else "PATH"


def _where(diagnosis: Diagnosis, found: Examination) -> str:
    if len(found.hosts) == 1 or not diagnosis.hosts:
        return ""
    return (
        f"all {len(found.hosts)}" if len(diagnosis.hosts) == len(found.hosts) else ", ".join(diagnosis.hosts)
    )


def _summary(found: Examination) -> str:
    failures, warnings = found.count(FAILURE), found.count(WARNING)
    hosts = f"{len(found.hosts)} node{'s' if len(found.hosts) > 1 else ''}"
    return f"{hosts}, {failures} failure{'s' * (failures != 1)}, {warnings} warning{'s' * (warnings != 1)}"


def as_json(found: Examination) -> dict[str, Any]:
    """Numbers of failures and warnings, hosts, and a row for each diagnosis."""
    rows = [
        {"check": v.check, "result": v.result, "hosts": v.hosts}
        | {"finding": plain(v.finding), "do": plain(v.do)}
        for v in found.diagnoses
    ]
    return {
        "failures": found.count(FAILURE),
        "warnings": found.count(WARNING),
        "hosts": found.hosts,
        "raytrec": __version__,
        "checks": rows,
    }


def as_markdown(found: Examination) -> str:
    """A table that can be pasted into an issue."""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    lines = [f"**raytrec doctor** {__version__}, {system}: {_summary(found)}", ""]
    lines += ["| result | check | where | finding | what to do |", "|---|---|---|---|---|"]
    for v in found.diagnoses:
        cells = (v.result, v.check, _where(v, found), v.finding, v.do)
        escaped = [plain(" ".join(cell.split())).replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)


def print_examination(found: Examination) -> None:
    """The table on stdout; each diagnosis that is not ok with what to do."""
    console, table = open_console(), Table()
    for column in ("check", "result", "finding"):
        table.add_column(column, overflow="fold", no_wrap=column != "finding")
    for v in found.diagnoses:
        where = _where(v, found)
        text = Text(plain(f"{where}: {v.finding}" if where else v.finding))
        if v.do:
            text.append(plain(f"\n→ {v.do}"), style="bold")
        table.add_row(v.check, Text(v.result, STYLES[v.result]), text)
    console.print(table)
    console.print(_summary(found))
