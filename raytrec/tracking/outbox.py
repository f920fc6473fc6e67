"""What waits to be written to MLflow, in order and in little memory."""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any

from raytrec.common.redaction import hide

NOT_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)  # MLflow takes letters, digits and these in names
NAME_LENGTH, PARAM_LENGTH, TAG_LENGTH = 250, 6000, 8000
METRICS, TEXTS = 1000, 100  # the most metrics, and params or tags, that MLflow takes in one call


@dataclass(frozen=True, slots=True)
class Record:
    """What one call handed over: metrics of one step, or params, or tags."""

    names: tuple[str, ...] = ()
    values: array = field(default_factory=lambda: array("d"))
    step: int = 0
    unix_ms: int = 0
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


class Outbox:
    """Records and files that have yet to be written. Any thread may put; one thread takes.

    Attributes:
        dropped: records and files that the store will never have.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._records: deque[Record] = deque()
        self._files: dict[tuple[Path, str], None] = {}  # as an ordered set
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._alone = 0  # so many of the next records are taken one by one
        self.dropped = 0

    def put_metrics(self, figures: Mapping[str, float | None], step: int, unix_s: float) -> None:
        """Metrics of one step. Those that are None or not finite are left out; names are made MLflow's."""
        known = {k: v for k, v in figures.items() if isinstance(v, (int, float)) and isfinite(v)}
        names, values = tuple(known), array("d", known.values())
        for i in range(0, len(names), METRICS):
            part = slice(i, i + METRICS)
            self._put(Record(self._known_as(names[part]), values[part], step, round(unix_s * 1000)))

    def put_params(self, values: Mapping[str, Any]) -> None:
        """Parameters of the run, nested, as section.key; secrets in addresses are hidden."""
        for part in _parts(_flatten(values), PARAM_LENGTH):
            self._put(Record(params=part))

    def put_tags(self, tags: Mapping[str, str]) -> None:
        """Tags of the run; secrets in addresses are hidden."""
        for part in _parts(tags, TAG_LENGTH):
            self._put(Record(tags=part))

    def put_file(self, path: Path, folder: str) -> None:
        """A file, read when it is written; one that waits already is not put again."""
        with self._lock:
            self._files.setdefault((path, folder))

    def first_records(self) -> list[Record]:
        """The oldest records that fit into one call together; they stay until `written` or `refused`."""
        taken: list[Record] = []
        metrics = params = tags = 0
        with self._lock:
            for record in self._records:
                metrics += len(record.names)
                params += len(record.params)
                tags += len(record.tags)
                if taken and (self._alone or metrics > METRICS or max(params, tags) > TEXTS):
                    break
                taken.append(record)
        return taken

    def written(self, records: int) -> None:
        """The oldest so many records are in the store."""
        with self._lock:
            self._alone = max(0, self._alone - records)
            for _ in range(records):
                self._records.popleft()

    def refused(self, records: int) -> None:
        """The store will never take these: a single one is dropped, of several each is to be tried alone."""
        if records > 1:
            self._alone = records
        else:
            self.written(records)
            self.lost()

    def first_file(self) -> tuple[Path, str] | None:
        """The file that has waited longest, and its folder; it stays until `uploaded`."""
        with self._lock:
            return next(iter(self._files), None)

    def uploaded(self, path: Path, folder: str, lost: bool = False) -> None:
        """The file is in the store or, if lost, never will be."""
        with self._lock:
            del self._files[path, folder]
        if lost:
            self.lost()

    def lost(self) -> None:
        """Counts something that the store will never have."""
        self.dropped += 1

    @property
    def records(self) -> int:
        """How many records wait."""
        return len(self._records)

    @property
    def files(self) -> int:
        """How many files wait."""
        return len(self._files)

    def _put(self, record: Record) -> None:
        with self._lock:
            self._records.append(record)

    def _known_as(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Names as MLflow takes them, the same tuple for the same names: after a day's outage it counts."""
        if names not in self._names:
            self._names[names] = tuple(NOT_IN_NAMES.sub("_", name)[:NAME_LENGTH] for name in names)
        return self._names[names]


def _parts(texts: Mapping[str, Any], length: int) -> list[dict[str, str]]:
    """As many at a time as MLflow takes, and as long."""
    items = [(key, hide(str(value))[:length]) for key, value in texts.items()]
    return [dict(items[i : i + TEXTS]) for i in range(0, len(items), TEXTS)]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.key → value; a mapping with keys that MLflow cannot take (patterns of tables) stays one."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and not any(NOT_IN_NAMES.search(inner) for inner in value):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
