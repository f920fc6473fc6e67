"""What a run folder records, read back: figures, intervals of ranks, checks, events.

Nothing is required: files that are missing are empty, lines that are torn or no JSON are passed over. After a
restart, steps since the last checkpoint are trained again; for these, what was written later counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from math import nan
from pathlib import Path
from typing import Any

from raytrec.common.errors import RunError
from raytrec.common.formatting import is_step, number
from raytrec.common.messages import CHECKS, EVENTS, METRICS, RANKS
from raytrec.common.reading import (
    MOST_JSON_BYTES,
    NotReadable,
    json_lines,
    json_values,
    open_regular,
    read_text,
    yaml_values,
)
from raytrec.metrics.results import EVAL
from raytrec.metrics.selection import Figure, figures_of
from raytrec.tracking.aggregate import begin, by_step, entries_of, load_order, over_time, table_over_ranks

FILES = ("config.yaml", METRICS, RANKS, CHECKS, EVENTS, "result.json")
MOST_INTERVALS = 600  # of ranks.jsonl: of a longer run, neighbours are put together, again and again


@dataclass(frozen=True)
class History:
    """A run as its folder tells it.

    Attributes:
        metrics: lines of metrics.jsonl, by kind and step.
        ranks: lines of ranks.jsonl, by step and rank; at most about MOST_INTERVALS steps.
        checks: lines of checks.jsonl, by check and step.
        failures: all failed checks as they were written, also those of steps that were trained again.
        events: lines of events.jsonl, as they were written.
        progress: (unix_s, step) of all training figures as they were written, going back included.
    """

    folder: Path
    config_text: str
    schema: dict[str, Any]
    plan: list[dict[str, Any]]
    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    checks: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    events: list[dict[str, Any]]
    progress: list[tuple[float, int]]

    @classmethod
    def read(cls, folder: str | Path) -> History:
        """Reads what there is; an empty folder is a history in which nothing has happened."""
        folder = Path(folder)
        metrics, checks = (list(read_lines(folder / name, steps=True)) for name in (METRICS, CHECKS))
        intervals = _Intervals()
        for line in read_lines(folder / RANKS, steps=True):
            intervals.add(_sound(line))
        plan, result = (_json(folder / name) for name in ("plan.json", "result.json"))
        return cls(
            folder=folder,
            config_text=_text(folder / "config.yaml"),
            schema=_mapping(_text(folder / "schema.yaml")),
            plan=[entry for entry in plan if isinstance(entry, dict)] if isinstance(plan, list) else [],
            result=result if isinstance(result, dict) else {},
            metrics=_newest(metrics, "kind"),
            ranks=intervals.lines(),
            checks=_newest(checks, "check"),
            failures=[line for line in checks if line.get("passed") is False],
            events=list(read_lines(folder / EVENTS)),
            progress=[(when(m), m["step"]) for m in metrics if m.get("kind") == "train"],
        )

    @cached_property
    def config(self) -> dict[str, Any]:
        """The values of config.yaml."""
        return _mapping(self.config_text)

    @property
    def name(self) -> str:
        """What the run is called."""
        section = self.config.get("run")
        named = section.get("name") if isinstance(section, dict) else None
        return str(self.result.get("name") or named or self.folder.absolute().name)

    @cached_property
    def metrics_of_tasks(self) -> list[Figure]:
        """The metrics that lines of `metrics` have, as the run described them."""
        starts = [event for event in reversed(self.events) if event.get("event") == "start"]
        given = {key for line in self.metrics for key in line}
        given |= {key.removeprefix(EVAL) for key in self.result}
        return [figure for figure in figures_of(*starts, self.result) if figure.key in given]

    def figures(self, *kinds: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl of these kinds, in the order of their steps."""
        return sorted((m for m in self.metrics if m.get("kind") in kinds), key=lambda m: m["step"])

    def restarts(self) -> list[int]:
        """Steps at which the run began again: after a failure, a resize, or with --resume."""
        starts = [e.get("step") for e in self.events if e.get("event") == "start"]
        return [step for step in starts[1:] if is_step(step)]

    def table_size(self, table: str) -> tuple[int, int] | None:
        """(rows, columns) of a whole table, from schema.yaml."""
        spec = self.table_spec(table)
        if is_step(spec.get("rows")) and is_step(spec.get("dim")):
            return spec["rows"], spec["dim"]
        return None

    def table_spec(self, table: str) -> dict[str, Any]:
        """The table's entry in schema.yaml; empty where there is none."""
        tables = self.schema.get("tables")
        spec = tables.get(table) if isinstance(tables, dict) else None
        return spec if isinstance(spec, dict) else {}

    def over_ranks(self, lines: list[dict[str, Any]], table: str) -> dict[str, Any]:
        """What a table's shards come to together, at one step (`aggregate.table_over_ranks`)."""
        return table_over_ranks(lines, table, self.planned(table).get("sharding_type") == "data_parallel")

    @cached_property
    def tables(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Table → step → `over_ranks`; the table with the most bytes looked up first."""
        series: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in load_order(self.ranks)}
        for step, lines in by_step(self.ranks).items():
            for name in {name for line in lines for name in entries_of(line)}:
                series[name][step] = self.over_ranks(lines, name)
        return series

    @cached_property
    def _plans(self) -> dict[str, dict[str, Any]]:
        return {str(entry.get("table")): entry for entry in self.plan}

    def planned(self, table: str) -> dict[str, Any]:
        """The table's entry in plan.json; empty where there is none."""
        return self._plans.get(table, {})


def run_folder(place: str | Path) -> Path:
    """The folder of a run, looked at before anything is done with it.

    Raises:
        RunError: there is none, or nothing of a run is in it.
    """
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise RunError(
            "there is no such run folder",
            where=str(place),
            expected="a folder that `raytrec train` printed (run.dir)",
        )
    if not any((folder / name).is_file() for name in FILES):
        raise RunError(
            "nothing of a run is in this folder",
            where=str(place),
            expected=f"one of {', '.join(FILES)}",
            do="name the folder of a run, not the one above it",
        )
    return folder


def when(line: dict[str, Any]) -> float:
    """The seconds since 1970 of a line; NaN where it does not say them, or a time that cannot be."""
    unix_s = number(line.get("unix_s"))
    return unix_s if 0 < unix_s < 1e11 else nan


class _Intervals:
    """Takes lines of ranks.jsonl as they were written; keeps those that count.

    A line of another attempt, or one that begins before its rank's last one has ended, means that the run has
    gone back to where it begins: all later steps are about to be trained again, maybe by fewer ranks.
    """

    def __init__(self):
        self._steps: dict[int, dict[int, dict]] = {}
        self._attempt, self._last = None, {}

    def add(self, line: dict[str, Any]) -> None:
        step, rank = line["step"], line.get("rank")
        if not is_step(rank):
            return
        if line.get("attempt") != self._attempt or begin(line) < self._last.get(rank, 0):
            self._steps = {s: lines for s, lines in self._steps.items() if s <= begin(line)}
            self._attempt, self._last = line.get("attempt"), {}
        self._last[rank] = step
        self._steps.setdefault(step, {})[rank] = line
        if len(self._steps) > MOST_INTERVALS:
            self._halve()

    def lines(self) -> list[dict[str, Any]]:
        return [self._steps[step][rank] for step in sorted(self._steps) for rank in sorted(self._steps[step])]

    def _halve(self) -> None:
        """Puts neighbours together, but not the newest, for which there may be lines to come."""
        steps = sorted(self._steps)
        for earlier, later in zip(steps[:-2:2], steps[1:-2:2], strict=False):
            one, other = self._steps[earlier], self._steps[later]
            if all(rank in one and begin(line) == earlier for rank, line in other.items()):
                pairs = [line for rank in other for line in (one[rank], other[rank])]
                self._steps[later] = {line["rank"]: line for line in over_time(pairs)}
                del self._steps[earlier]


def _sound(line: dict[str, Any]) -> dict[str, Any]:
    """A line of ranks.jsonl in which every table's figures are a mapping."""
    tables = line.get("tables")
    tables = tables if isinstance(tables, dict) else {}
    return {**line, "tables": {name: entry for name, entry in tables.items() if isinstance(entry, dict)}}


def _newest(lines: Iterable[dict], key: str) -> list[dict]:
    """Of each kind, the lines of steps that were not trained again later."""
    kept: dict[str, list[dict]] = {}
    for line in lines:
        series = kept.setdefault(str(line.get(key)), [])
        while series and series[-1]["step"] >= line["step"]:
            series.pop()
        series.append(line)
    return [line for series in kept.values() for line in series]


def read_lines(path: Path, steps: bool = False) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; with `steps`, those that say their step."""
    if not path.is_file():
        return
    with BufferedReader(open_regular(path)) as file:
        for line in json_lines(file):  # torn ones, from a driver that died while it wrote, are passed over
            if not steps or is_step(line.get("step")):
                yield line


def _text(path: Path) -> str:
    return read_text(path, MOST_JSON_BYTES) if path.is_file() else ""


def _json(path: Path) -> Any:
    try:
        return json_values(_text(path) or "null")
    except NotReadable:
        return None


def _mapping(text: str) -> dict[str, Any]:
    try:
        values = yaml_values(text)
    except NotReadable:
        return {}
    return values if isinstance(values, dict) else {}
