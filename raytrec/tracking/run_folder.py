"""Reads a run folder: messages, and files that describe the run.

Lines are decoded here and nowhere else: one that is torn or not of its file is dropped and counted. After a
restart, steps since the last checkpoint are trained again; for these, later lines win. Nothing is required:
a file that is missing is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from raytrec.common.documents import find_document, from_line, typed
from raytrec.common.errors import RunError
from raytrec.common.formatting import as_dict, is_step
from raytrec.common.messages import CHECKS, EVENTS, METRICS, RANKS, Message, RankLine
from raytrec.common.reading import (
    MOST_JSON_BYTES,
    NotReadable,
    json_values,
    open_regular,
    read_text,
    yaml_values,
)
from raytrec.tracking.aggregate import by_step, combine_shards, order_by_load
from raytrec.tracking.history import History

CONFIG, SCHEMA, PLAN, TAGS = "config.yaml", "schema.yaml", "plan.json", "tags.json"
DATA = "data.json"  # what the data held when the run began
LISTED_FILES = "files"  # in it: which files were read, and why others were not
RESULT, REPORT, CHECK_RESULT = "result.json", "report.html", "check.json"
GROWING = (METRICS, RANKS, CHECKS, EVENTS)  # files of messages, to which lines are added


class Line(NamedTuple):
    """A whole line of a file, its first byte, and the byte behind its end."""

    data: bytes
    begin: int
    end: int


def read_lines(path: Path, since: int = 0) -> Iterator[Line]:
    """The lines of a file from a byte on; without a last one that has no end yet.

    Raises:
        OSError: the file cannot be read; one that does not exist is empty.
    """
    try:
        file = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    with open(file.fileno(), "rb", closefd=False) as stream, file:
        begin = stream.seek(since)
        for data in stream:
            if not data.endswith(b"\n"):
                return
            yield Line(data, begin, begin + len(data))
            begin += len(data)


def decode(file: str, data: bytes | str) -> Message | None:
    """The message of a line; None for one that a driver that died has left in part.

    Raises:
        ValueError: it is JSON, but not a line of that file.
    """
    try:
        values = json_values(data)
    except NotReadable:
        return None
    return from_line(file, typed(values, dict[str, Any]))


def messages_of(folder: Path, file: str) -> Iterator[Any]:
    """The messages of one file of a run folder, as they were written; the class is that of the file."""
    for line in read_lines(folder / file):
        with suppress(ValueError):
            if (message := decode(file, line.data)) is not None:
                yield message


class RunFolder(History):
    """A run folder. `read_new` reads on where it has stopped; `RunFolder.read` reads all.

    Args:
        path: of the folder; it may be empty, or not there.
        files: which of GROWING to read.

    Attributes:
        dropped: lines that were torn or not of their file.
        plan: table → its entry in plan.json.

    Example:
        >>> run = RunFolder("runs/dlrm-1", files=["metrics.jsonl"])
        >>> run.read_new()
        False
        >>> [line.figure("auc") for line in run.figures(messages.Eval)]
        []
    """

    def __init__(self, path: str | Path, files: Sequence[str] = GROWING):
        super().__init__()
        self.path, self.dropped = Path(path), 0
        self.plan: dict[str, dict[str, Any]] = {}
        self._read_to = dict.fromkeys(files, 0)

    @classmethod
    def read(cls, path: str | Path) -> RunFolder:
        """All that the folder has now."""
        run = cls(path)
        run.read_new()
        return run

    def read_new(self) -> bool:
        """Reads lines that were added since, result.json and plan.json; whether there are new lines.

        Raises:
            OSError: a file is not a file, or cannot be read.
        """
        before = dict(self._read_to)
        for file in self._read_to:
            for line in read_lines(self.path / file, self._read_to[file]):
                self._read_to[file] = line.end
                try:
                    message = decode(file, line.data)
                except ValueError:
                    message = None
                if message is None:
                    self.dropped += 1
                else:
                    self.add(message)
        self.result = find_document(str(self.path / RESULT), dict[str, Any]) or {}
        plan = find_document(str(self.path / PLAN), list[dict[str, Any]]) or []
        self.plan = {str(entry.get("table")): entry for entry in plan}
        self.__dict__.pop("tables", None)
        return self._read_to != before

    @cached_property
    def tables(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Table → step → `over_ranks`; the table with the most bytes looked up first."""
        series: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in order_by_load(self.ranks)}
        for step, lines in by_step(self.ranks).items():
            for name in {name for line in lines for name in line.tables}:
                series[name][step] = self.over_ranks(lines, name)
        return series

    def over_ranks(self, lines: list[RankLine], table: str) -> dict[str, Any]:
        """Return figures of a table's shards together, at one step (aggregate.combine_shards).

        `changed_share` is NaN for tables of out_of_range: hash, into which all text is hashed.
        """
        replicated = self.planned(table).get("sharding_type") == "data_parallel"
        hashed = {"changed_share": nan} if self.table_spec(table).get("out_of_range") == "hash" else {}
        return combine_shards(lines, table, replicated) | hashed

    def planned(self, table: str) -> dict[str, Any]:
        """The table's entry in plan.json; empty where there is none."""
        return self.plan.get(table, {})

    def table_spec(self, table: str) -> dict[str, Any]:
        """The table's entry in schema.yaml; empty where there is none."""
        return as_dict(as_dict(self.schema.get("tables")).get(table))

    def table_size(self, table: str) -> tuple[int, int] | None:
        """(rows, columns) of a whole table, from schema.yaml."""
        rows, dim = (self.table_spec(table).get(key) for key in ("rows", "dim"))
        return (rows, dim) if is_step(rows) and is_step(dim) else None

    @property
    def name(self) -> str:
        """Of the run."""
        named = self.result.get("name") or as_dict(self.config.get("run")).get("name")
        return str(named or self.path.absolute().name)

    @cached_property
    def config_text(self) -> str:
        """The text of config.yaml."""
        return _text(self.path / CONFIG)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The values of config.yaml."""
        return _mapping(self.config_text)

    @cached_property
    def files(self) -> list[str]:
        """A sentence for each dataset: how many files were read, and why others were left out."""
        listed = as_dict((find_document(str(self.path / DATA), dict[str, Any]) or {}).get(LISTED_FILES))
        return [f"{name}: {as_dict(values).get('text')}" for name, values in listed.items()]

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The values of schema.yaml."""
        return _mapping(_text(self.path / SCHEMA))


def existing_run(place: str | Path) -> Path:
    """The folder of a run.

    Raises:
        RunError: there is none, or nothing of a run is in it.
    """
    folder, files = Path(place).expanduser(), (CONFIG, *GROWING, RESULT)
    if not folder.is_dir():
        raise RunError(
            "there is no such run folder",
            where=str(place),
            expected="a folder that `raytrec train` printed (run.dir)",
        )
    if not any((folder / name).is_file() for name in files):
        raise RunError(
            "nothing of a run is in this folder",
            where=str(place),
            expected=f"one of {', '.join(files)}",
            do="name the folder of a run, not the one above it",
        )
    return folder


def _text(path: Path) -> str:
    return read_text(path, MOST_JSON_BYTES) if path.is_file() else ""


def _mapping(text: str) -> dict[str, Any]:
    try:
        return as_dict(yaml_values(text))
    except NotReadable:
        return {}
