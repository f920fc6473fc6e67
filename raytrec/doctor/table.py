"""What `raytrec doctor` shows: a table, JSON, or Markdown that names no host and no user."""

from __future__ import annotations

import os
import platform
import re
import socket
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from raytrec import __version__
from raytrec.cluster.host_checks import FAILURE, OK, WARNING, Diagnosis
from raytrec.common.formatting import count
from raytrec.common.terminal import open_console, plain
from raytrec.doctor.examine import Examination, merged

STYLES = {OK: "green", WARNING: "yellow", FAILURE: "red"}
EVERYONES = ("", "root", "ray", "ubuntu", "user", "runner")  # users that many machines have
IN_PATH = r"[\w.@+~%#-]"
PRIVATE = {  # what is shown instead → pattern; secrets are hidden by `plain`
    "STORAGE": r"\b[\w+]+://\S+",
    # Without the name of a library, which is upstream's, and Linux's own folder.
    "PATH": rf"(?<![\w.*])(?!/dev/shm(?!/|{IN_PATH}))~?(?:(?:/{IN_PATH}+)+"
    rf"(?=/[\w-]+\.so[\d.]*(?!/|{IN_PATH}))|(?:/{IN_PATH}+)+/?)",
    "ADDRESS": r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|(?<![\w:])\[?(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?:%\w+)?\]?(?::\d+)?(?![\w:])"
    r"|\b[\w-]+(?:\.[\w-]+)*:\d{2,5}\b",
}


def shared(found: Examination) -> Examination:
    """Return the same without hosts, users, paths and addresses: hosts are node 1, node 2, …"""
    hosts = {host: f"node {number}" for number, host in enumerate(found.hosts, 1)}
    user = os.environ.get("LOGNAME") or os.environ.get("USER") or ""
    words = {user: "USER"} if user not in EVERYONES else {}
    for host in (*found.hosts, socket.gethostname()):
        name = host.partition(" ")[0]
        for word in {name, name.partition(".")[0]} - {"", "localhost"}:
            words.setdefault(word, hosts.get(host, "HOST"))
    words |= hosts
    longest_first = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))  # "vm (10.0.0.1) #2"
    places = (f"(?P<{name}>{pattern})" for name, pattern in PRIVATE.items())
    private = re.compile("|".join([*places, rf"(?<![\w-])(?:{longest_first})(?![\w-])"]))

    def hide(text: str) -> str:
        return private.sub(lambda found: found.lastgroup or words[found[0]], plain(text))

    diagnoses = [
        replace(v, finding=hide(v.finding), do=hide(v.do), hosts=tuple(hosts.get(h, "HOST") for h in v.hosts))
        for v in found.diagnoses
    ]
    return Examination([*hosts.values()], merged(diagnoses))


def _where(diagnosis: Diagnosis, found: Examination) -> str:
    if len(found.hosts) == 1:
        return ""
    is_everywhere = len(diagnosis.hosts) == len(found.hosts)
    return f"all {len(found.hosts)}" if is_everywhere else ", ".join(diagnosis.hosts)


def _summary(found: Examination) -> str:
    numbers = {"node": len(found.hosts), "failure": found.count(FAILURE), "warning": found.count(WARNING)}
    return ", ".join(count(number, what) for what, number in numbers.items())


def as_json(found: Examination) -> dict[str, Any]:
    """Numbers of failures and warnings, hosts, and a row for each diagnosis."""
    rows = [asdict(v) | {"finding": plain(v.finding), "do": plain(v.do)} for v in found.diagnoses]
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
