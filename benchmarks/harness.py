"""Shared parts of the benchmarks: alternating measurements, tables, results and documents.

A benchmark is a script with a command and the options `Rounds` and `Smallest`. Its sides take turns, either in
one process (`take_turns`) or as groups of ranks (`Ranks`), which run `SCRIPT side RANK WORLD STORE` and reply to
lines of JSON. `publish` stores the results in benchmarks/results/NAME.json and writes tables between
`<!-- benchmarks/results/NAME.json -->` and `<!-- end -->` in a document.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
REPO = HERE.parent
RESULTS, IMAGES = HERE / "results", REPO / "docs" / "images"
BENCHMARKS_PAGE = "docs/benchmarks.md"
QUIET = ["tracking.enabled=false", "tracking.report=false", "tracking.every_steps=null"]
PREPARE_S = 300

Rounds = Annotated[int, typer.Option(min=1, help="Number of times to measure each variant.")]
Smallest = Annotated[bool, typer.Option("--smallest", help="Run the smallest sizes and write no results.")]
Workers = Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")]
Only = Annotated[str, typer.Option(help="Run only these parts, separated by commas.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
T = TypeVar("T")


def split(text: str) -> list[str]:
    """Return the names in a comma-separated option."""
    return [name for name in text.split(",") if name]


def integers(text: str) -> list[int]:
    """Return the numbers in a comma-separated option."""
    return [int(number) for number in split(text)]


# Turns


def take_turns(sides: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 0) -> dict[str, list[T]]:
    """Call every side once per round; return side → values in the order of rounds.

    Args:
        sides: Name of a side → function that runs one turn of the side.
        rounds: Number of rounds. A different side begins each round.
        warm_up: Number of additional initial rounds, whose values are dropped.
    """
    names, values = list(sides), {name: list[T]() for name in sides}
    for turn in range(warm_up + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            value = sides[name]()
            if turn >= warm_up:
                values[name].append(value)
    return values


def seconds_of(call: Callable[[], Any]) -> float:
    """Call a function, and return its wall-clock seconds."""
    began = perf_counter()
    call()
    return perf_counter() - began


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds of the ratio of two sides' values."""
    return median(one / other for one, other in zip(values, others, strict=True))


# Tables


@dataclass
class Grid:
    """Table of text for terminals and Markdown.

    Attributes:
        header: Titles of the columns.
        rows: Cells of each row, one per column.
        title: Title on terminals.
        left: Number of leading columns that are left-aligned; the others contain numbers.
        sections: Indices of rows below which terminals show a line.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left: int = 1
    sections: Iterable[int] = ()

    def show(self, width: int | None = None) -> None:
        """Print the table.

        Args:
            width: Width in characters; None: the width of the terminal, or 120 without a terminal.
        """
        table = Table(title=self.title or None)
        for number, name in enumerate(self.header):
            table.add_column(name, justify="left" if number < self.left else "right", no_wrap=True)
        for number, row in enumerate(self.rows):
            table.add_row(*row, end_section=number in self.sections)
        Console(width=width or (None if sys.stdout.isatty() else 120)).print(table)

    def markdown(self) -> str:
        """Return the table as Markdown, without the title."""
        rule = "---|" * self.left + "---:|" * (len(self.header) - self.left)
        lines = [f"| {' | '.join(cells)} |" for cells in (self.header, *self.rows)]
        return "\n".join([lines[0], f"|{rule}", *lines[1:]])


# Results and documents


def results_file(name: str) -> Path:
    """Return the path of a benchmark's stored results."""
    return RESULTS / f"{name}.json"


def load(name: str) -> dict[str, Any]:
    """Return a benchmark's stored results, or {} if there are no results."""
    path = results_file(name)
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, content: dict[str, Any]) -> None:
    """Replace a file of results atomically with `content` as JSON."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def store(name: str, content: dict[str, Any]) -> None:
    """Replace a benchmark's stored results."""
    keep(results_file(name), content)


def _block(name: str) -> re.Pattern:
    return re.compile(rf"(?s)(<!-- benchmarks/results/{name}\.json -->)\n(.*?)\n?(<!-- end -->)")


def fill(page: str, name: str, text: str) -> None:
    """Replace the text between a benchmark's markers in a document."""
    path = REPO / page
    path.write_text(_block(name).sub(lambda found: f"{found[1]}\n{text}\n{found[3]}", path.read_text()))


def filled(page: str, name: str) -> list[str]:
    """Return the text between each pair of a benchmark's markers in a document."""
    return [text for _, text, _ in _block(name).findall((REPO / page).read_text())]


def publish(name: str, content: dict[str, Any], text: str, page: str = BENCHMARKS_PAGE) -> None:
    """Store a benchmark's results, and write its text to a document."""
    store(name, content)
    fill(page, name, text)


# Processes


def run_raytrec(*words: str | Path) -> None:
    """Run a raytrec command; raise CalledProcessError if it fails, or TimeoutExpired after PREPARE_S seconds."""
    command = [sys.executable, "-m", "raytrec", *map(str, words)]
    subprocess.run(command, check=True, capture_output=True, timeout=PREPARE_S)


def status_bytes(*fields: str, pid: int | str = "self") -> int:
    """Return the sum, in bytes, of fields such as VmHWM in a process's /proc/PID/status; 0 if the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        wanted = tuple(f"{field}:" for field in fields)
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(wanted))
    return 0


def tree_cpu_s(pid: int | None = None) -> float:
    """Return the CPU seconds of a process (default: this process) and its live and ended descendants."""
    import psutil

    total, top = 0.0, psutil.Process(pid)
    for process in [top, *top.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def forget(files: Iterable[Path]) -> None:
    """Drop files from the page cache."""
    for path in files:
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
