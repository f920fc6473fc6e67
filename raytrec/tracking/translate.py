"""What the lines of a run folder become in MLflow: names, values, step and time of metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from raytrec.common.messages import RANKS, Check, Final, Measured, Message, Result, from_line
from raytrec.tracking.aggregate import (
    ADDED,
    FIGURES,
    added,
    begin,
    entries_of,
    table_bytes,
    table_over_ranks,
)

# MLflow 3.17 shows metrics whose names begin with system/ on its page "System metrics", under these names and
# in these units where its own monitor (mlflow/system_metrics) has them.
MLFLOW_NAMES = {
    "cpu_percent": ("cpu_utilization_percentage", 1),
    "rss_bytes": ("process_memory_usage_megabytes", 1e-6),
    "host_memory_percent": ("system_memory_usage_percentage", 1),
    "network_sent_bytes_per_s": ("network_transmit_megabytes_per_s", 1e-6),
    "network_received_bytes_per_s": ("network_receive_megabytes_per_s", 1e-6),
    "gpu_percent": ("gpu_utilization_percentage", 1),
    "gpu_memory_bytes": ("gpu_memory_usage_megabytes", 1e-6),
}


SECTIONS = {"train": "train/", "eval": "eval/", "compared": ""}  # kind → what its names begin with
NOT_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)  # MLflow takes letters, digits and these in names
NAME_LENGTH = 250
# Up to so many ranks and tables have series of their own: a store takes about 1,000 metrics in a call, and a
# picture of more lines shows nobody anything. The run folder has them all.
MOST_RANKS, MOST_TABLES = 64, 200
RANK_IN_NAME = re.compile(r"^(watch/|system/)rank[/_]\d+/")


class Record(NamedTuple):
    """Metrics of one step: MLflow's names → values, all at one time."""

    figures: dict[str, float]
    step: int
    unix_ms: int


class Translator:
    """Makes a Record of a line, or of the lines of all ranks at a step, once the last of them is there.

    Args:
        max_series: tracking.max_rank_table_series.
    """

    def __init__(self, max_series: int):
        self._max_series, self._ranks = max_series, RankLines()

    def record(self, file: str, line: dict[str, Any], start: int | None = None) -> Record | None:
        """What a line is in MLflow; None: nothing, or nothing yet.

        Args:
            start: the line's first byte in its file.

        Raises:
            KeyError, TypeError, ValueError: it is no line of that file.
        """
        if file != RANKS:
            return _of(from_line(file, line))
        lines = self._ranks.add(line, start)
        if lines is None:
            return None
        return _record(rank_metrics(lines, self._max_series), line["step"], line["unix_s"])

    def begin_of_waiting(self) -> int | None:
        """Where in ranks.jsonl the first of the lines begins that wait for other ranks' lines."""
        return self._ranks.begin_of_waiting()


class RankLines:
    """Gathers lines of ranks.jsonl until there are those of all ranks of a step."""

    def __init__(self) -> None:
        self._waiting: dict[
            int, dict[int, tuple[dict[str, Any], int | None]]
        ] = {}  # step → rank → line, start
        self._attempt: int | None = None
        self._last: dict[int, int] = {}  # rank → step

    def add(self, line: dict[str, Any], start: int | None = None) -> list[dict[str, Any]] | None:
        """The lines of all ranks in their order, once the last has come.

        A line of another attempt, or that goes back behind its rank's last one, is of another group of
        workers (of another driver, too): what is left of the group before will never be complete.
        """
        step, rank = line["step"], line["rank"]
        if line["attempt"] != self._attempt or begin(line) < self._last.get(rank, 0):
            self._attempt, self._last, self._waiting = line["attempt"], {}, {}
        self._last[rank] = step
        group = self._waiting.setdefault(step, {})
        group[rank] = line, start
        if len(group) < line["world"]:
            return None
        self._waiting = {later: lines for later, lines in self._waiting.items() if later > step}
        return [group[rank][0] for rank in sorted(group)]

    def begin_of_waiting(self) -> int | None:
        """The smallest `start` of the lines that wait; None where there is none."""
        starts = [start for group in self._waiting.values() for _, start in group.values()]
        return min((start for start in starts if start is not None), default=None)


def _of(message: Message) -> Record | None:
    if isinstance(message, Check):
        place = f"watch/check/{message.check}"
        named = {place: int(message.passed), f"{place}_figure": message.figure}
    elif not isinstance(message, Measured) or isinstance(message, Final):  # its figures are in the result
        return None
    elif isinstance(message, Result):  # whose names begin with their section
        named = {name.replace(".", "/", 1): value for name, value in message.figures.items()}
    else:
        section = SECTIONS[message.KIND]
        named = {section + name: value for name, value in message.figures.items()}
    return _record(named, message.step, message.unix_s)


def _record(figures: Mapping[str, Any], step: int, unix_s: float) -> Record:
    """Without figures that are None or not finite; names as MLflow takes them."""
    known = {
        NOT_IN_NAMES.sub("_", name)[:NAME_LENGTH]: float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and isfinite(value)
    }
    return Record(known, step, round(unix_s * 1000))


def rank_metrics(lines: list[dict[str, Any]], max_series: int) -> dict[str, float | None]:
    """MLflow's figures of one step.

    Args:
        lines: of all ranks.
        max_series: up to so many ranks × tables, those of each table on each rank are among them.

    Returns:
        watch/rank/R/…: load, memory and milliseconds of each phase a step; watch/table/NAME/…: what
        `aggregate.table_over_ranks` makes of all ranks; watch/rank/R/table/NAME/…; system/rank_R/….
    """
    out: dict[str, float | None] = {}
    held: dict[str, float] = {}
    for line in lines:
        for name, entry in entries_of(line).items():
            held[name] = held.get(name, 0.0) + table_bytes(entry)
    names = sorted(held)
    of_ranks = [_of_rank(line) for line in lines]
    if len(lines) > MOST_RANKS:
        out |= over_ranks(of_ranks)
    else:
        for line, of_rank in zip(lines, of_ranks, strict=True):
            out |= of_rank
            if len(lines) * len(names) <= max_series:
                for name, figures in line["tables"].items():
                    place = f"watch/rank/{line['rank']}/table/{name}"
                    out |= {f"{place}/{key}": figures.get(key) for key in FIGURES}
    for name in sorted(names, key=lambda name: (-held[name], name))[:MOST_TABLES]:
        figures = table_over_ranks(lines, name)
        out |= {f"watch/table/{name}/{key}": figures[key] for key in FIGURES}
    return out


def over_ranks(of_ranks: list[dict[str, float | None]]) -> dict[str, float | None]:
    """The least, the median and the largest of each figure that ranks have: watch/ranks/NAME/min and so on,
    system/ranks/NAME/min."""
    values: dict[str, list[float]] = {}
    for figures in of_ranks:
        for name, value in figures.items():
            if isinstance(value, (int, float)) and isfinite(value):
                values.setdefault(RANK_IN_NAME.sub(r"\1ranks/", name), []).append(value)
    return {
        f"{name}/{kind}": combine(of_all)
        for name, of_all in values.items()
        for kind, combine in (("min", min), ("median", median), ("max", max))
    }


def _of_rank(line: dict[str, Any]) -> dict[str, float | None]:
    place, steps = f"watch/rank/{line['rank']}", max(1, line["steps"])
    out = {f"{place}/{phase}_ms": 1e3 * s / steps for phase, s in line["phases_s"].items()}
    out[f"{place}/step_ms"] = 1e3 * line["seconds"] / steps
    for key in ADDED:
        out[f"{place}/{key}"] = added(line, key)
    return out | system_metrics(line["rank"], line["system"])


def system_metrics(rank: int, sample: Mapping[str, float | None]) -> dict[str, float]:
    """A sample of `System` as MLflow metrics: system/rank_R/NAME; without what is None.

    Example:
        >>> system_metrics(1, {"cpu_percent": 98.0, "gpu_percent": None})
        {'system/rank_1/cpu_utilization_percentage': 98.0}
    """
    return {
        f"system/rank_{rank}/{name}": sample[key] * factor
        for key, (name, factor) in MLFLOW_NAMES.items()
        if sample.get(key) is not None
    }
