"""Read run folders: messages, and files that describe the run.

Lines are decoded only in this module. A RunFolder drops and counts lines that are damaged or do not belong to their
file. A last line without a line feed is not read before it is complete. After a restart, steps since the last
checkpoint are trained again, and their new lines replace the earlier lines. A missing file counts as empty.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from raytrec.common.documents import find_document, from_line, validate_as
from raytrec.common.errors import RunError
from raytrec.common.formatting import as_dict, is_step
from raytrec.common.messages import CHECKS, EVENTS, METRICS, RANKS, Message, RankLine
from raytrec.common.reading import MAX_JSON_BYTES, UnreadableError, open_regular, parse_json, parse_yaml, read_text
from raytrec.tracking.aggregate import by_step, combine_shards, order_by_load
from raytrec.tracking.history import History

CONFIG, SCHEMA, PLAN, TAGS = "config.yaml", "schema.yaml", "plan.json", "tags.json"
DATA = "data.json"  # description of the data at the start of the run
FILES_KEY = "files"  # key in DATA for the files that were read, and the reasons why other files were not read
RESULT, REPORT, CHECK_RESULT = "result.json", "report.html", "check.json"
GROWING = (METRICS, RANKS, CHECKS, EVENTS)  # files to which messages are appended


class Line(NamedTuple):
    """Complete line of a file that is still being written.

    Attributes:
        data: Bytes of the line, including its line feed.
        begin: Offset of the line's first byte in the file.
        end: Offset of the byte after the line.
    """

    data: bytes
    begin: int
    end: int


def read_lines(path: Path, since: int = 0) -> Iterator[Line]:
    """Yield the complete lines of a file, starting at the byte offset `since`; a missing file has no lines.

    A last line without a line feed is not yielded.

    Raises:
        OSError: The file is not a regular file, or cannot be read.
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
    """Return the message in a line; None if the line is not valid JSON, e.g. because its writer died.

    Args:
        file: Name of the line's file, one of GROWING.
        data: The line.

    Raises:
        ValueError: The line is valid JSON but not a message of this file.
    """
    try:
        values = parse_json(data)
    except UnreadableError:
        return None
    return from_line(file, validate_as(values, dict[str, Any]))


def read_messages(folder: Path, file: str) -> Iterator[Any]:
    """Yield the messages of one file in a run folder, in the order of writing.

    Invalid lines are skipped, and a missing file has no messages.

    Args:
        folder: Run folder.
        file: Name of the file, one of GROWING, which determines the class of the messages.

    Raises:
        OSError: The file is not a regular file, or cannot be read.
    """
    for line in read_lines(folder / file):
        with suppress(ValueError):
            if (message := decode(file, line.data)) is not None:
                yield message


class RunFolder(History):
    """Messages and files of a run folder.

    `read_new` continues from the end of the previous read; `RunFolder.read` reads everything.

    The properties `config_text`, `config`, `files` and `schema` are read once, at the first access. They raise an
    OSError if their file exists but cannot be read, except `files`, which is then empty.

    Args:
        path: Path of the folder; the folder may be empty or missing.
        files: Names of the files to read, a subset of GROWING.

    Attributes:
        path: Path of the folder.
        dropped: Number of lines that were not valid JSON or did not belong to their file.
        plan: Table → its entry in plan.json; {} if the file is missing or invalid.

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
        """Return a RunFolder with everything that the folder currently contains; raise errors as `read_new`."""
        run = cls(path)
        run.read_new()
        return run

    def read_new(self) -> bool:
        """Read new lines, result.json and plan.json; return True if there are new lines, which may all be invalid.

        `result` and `plan` are set to {} if their files are missing or invalid.

        Raises:
            OSError: One of `files` is not a regular file, or cannot be read.
            DataError: The path of the folder is not UTF-8, or contains a null byte.
        """
        offsets = dict(self._read_to)
        for file in self._read_to:
            for line in read_lines(self.path / file, self._read_to[file]):
                self._read_to[file] = line.end
                message = None
                with suppress(ValueError):
                    message = decode(file, line.data)
                if message is None:
                    self.dropped += 1
                else:
                    self.add(message)
        self.result = find_document(str(self.path / RESULT), dict[str, Any]) or {}
        plan = find_document(str(self.path / PLAN), list[dict[str, Any]]) or []
        self.plan = {str(entry.get("table")): entry for entry in plan}
        self.__dict__.pop("tables", None)
        return self._read_to != offsets

    @cached_property
    def tables(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Return table → step → statistics combined over ranks; tables are ordered by descending bytes looked up."""
        series: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in order_by_load(self.ranks)}
        for step, lines in by_step(self.ranks).items():
            for name in {name for line in lines for name in line.tables}:
                series[name][step] = self.combine_ranks(lines, name)
        return series

    def combine_ranks(self, lines: list[RankLine], table: str) -> dict[str, Any]:
        """Return the combined statistics of a table's shards at one step (aggregate.combine_shards).

        `changed_share` is NaN for tables with `out_of_range: hash`, whose ids are meant to be changed. `lines` are the
        lines of all recorded ranks at the step.
        """
        replicated = self.planned(table).get("sharding_type") == "data_parallel"
        hashed = {"changed_share": nan} if self.table_spec(table).get("out_of_range") == "hash" else {}
        return combine_shards(lines, table, replicated) | hashed

    def planned(self, table: str) -> dict[str, Any]:
        """Return a table's entry in plan.json (embeddings.sharding.describe_plan); {} without an entry."""
        return self.plan.get(table, {})

    def table_spec(self, table: str) -> dict[str, Any]:
        """Return a table's entry in schema.yaml; {} without an entry."""
        return as_dict(as_dict(self.schema.get("tables")).get(table))

    def table_size(self, table: str) -> tuple[int, int] | None:
        """Return (rows, dim) of a table in schema.yaml; None if either is missing or not an integer of at least 0."""
        rows, dim = (self.table_spec(table).get(key) for key in ("rows", "dim"))
        return (rows, dim) if is_step(rows) and is_step(dim) else None

    @property
    def name(self) -> str:
        """Return the name of the run in result.json or config.yaml, or else the name of the folder."""
        named = self.result.get("name") or as_dict(self.config.get("run")).get("name")
        return str(named or self.path.absolute().name)

    @cached_property
    def config_text(self) -> str:
        """Return the text of config.yaml; "" if the file is missing."""
        return _read_if_exists(self.path / CONFIG)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the parsed values of config.yaml; {} if the file is missing or invalid."""
        return _parse_mapping(self.config_text)

    @cached_property
    def files(self) -> list[str]:
        """Return a text for each dataset that states how many files were read, and why other files were not read.

        The list is empty if data.json is missing, invalid or without these texts.
        """
        listed = as_dict((find_document(str(self.path / DATA), dict[str, Any]) or {}).get(FILES_KEY))
        return [f"{name}: {as_dict(values).get('text')}" for name, values in listed.items()]

    @cached_property
    def schema(self) -> dict[str, Any]:
        """Return the parsed values of schema.yaml; {} if the file is missing or invalid."""
        return _parse_mapping(_read_if_exists(self.path / SCHEMA))


def check_run_folder(place: str | Path) -> Path:
    """Return the path of a run folder, with ~ expanded, after checking that it exists and contains files of a run.

    Raises:
        RunError: The path is not a folder, the folder contains no files of a run, or either is unreadable.
    """
    folder, files = Path(os.path.expanduser(place)), (CONFIG, *GROWING, RESULT)
    if not os.path.isdir(folder):  # unlike the methods of Path, these functions raise no OSError
        raise RunError(
            "this path is not a folder" if os.path.exists(folder) else "the run folder does not exist or is unreadable",
            where=str(place),
            expected="the path of a local run folder, as printed by `raytrec train`",
        )
    if not any(os.path.isfile(folder / name) for name in files):
        raise RunError(
            "the folder contains no files of a run, or they are unreadable",
            where=str(place),
            expected=f"a folder with {', '.join(files[:-1])} or {files[-1]}",
            do="pass the run folder itself, not its parent",
        )
    return folder


def _read_if_exists(path: Path) -> str:
    return read_text(path, MAX_JSON_BYTES) if os.path.isfile(path) else ""


def _parse_mapping(text: str) -> dict[str, Any]:
    try:
        return as_dict(parse_yaml(text))
    except UnreadableError:
        return {}
