"""Messages of a run as metrics of MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from raytrec.common.messages import Final, Measured, Message, Outcome, RankLine, Result
from raytrec.tracking.aggregate import ADDED, FIGURES, combine_shards, table_bytes
from raytrec.tracking.history import StepGroups

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
# A store takes about 1,000 metrics in a call; the run folder has all.
MOST_TABLES = 200  # the largest tables have series
MOST_RANK_TABLES = 64  # up to so many ranks × tables, each table has series of each rank


class Record(NamedTuple):
    """Metrics of one step: MLflow's names → values, all at one time."""

    figures: dict[str, float]
    step: int
    unix_ms: int


class Translator:
    """Makes a Record of a message, or of the lines of all ranks at a step, once the last of them is there."""

    def __init__(self) -> None:
        self._groups = StepGroups()

    def record(self, message: Message, begin: int) -> Record | None:
        """The metrics of a message; None: it has none, or none yet.

        Args:
            begin: the first byte of the message's line in its file.
        """
        if not isinstance(message, RankLine):
            return _of(message)
        lines = self._groups.add(message, begin)
        return None if lines is None else _record(rank_metrics(lines), message.step, message.unix_s)

    def begin_of_waiting(self) -> int | None:
        """Where in ranks.jsonl the first of the lines begins that wait for other ranks' lines."""
        return self._groups.begin_of_waiting()


def _of(message: Message) -> Record | None:
    if isinstance(message, Outcome):
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


def rank_metrics(lines: list[RankLine]) -> dict[str, float | None]:
    """MLflow's figures of one step.

    Args:
        lines: of all recorded ranks.

    Returns:
        watch/rank/R/…: load, memory and milliseconds of each phase a step; watch/table/NAME/…: figures of a
        table over ranks (aggregate.combine_shards); watch/rank/R/table/NAME/…; system/rank_R/….
    """
    out: dict[str, float | None] = {}
    held: dict[str, float] = {}
    for line in lines:
        out |= _of_rank(line)
        for name, entry in line.tables.items():
            held[name] = held.get(name, 0.0) + table_bytes(entry)
    if len(lines) * len(held) <= MOST_RANK_TABLES:
        for line in lines:
            for name, figures in line.tables.items():
                place = f"watch/rank/{line.rank}/table/{name}"
                out |= {f"{place}/{key}": figures.get(key) for key in FIGURES}
    for name in sorted(held, key=lambda name: (-held[name], name))[:MOST_TABLES]:
        figures = combine_shards(lines, name)
        out |= {f"watch/table/{name}/{key}": figures[key] for key in FIGURES}
    return out


def _of_rank(line: RankLine) -> dict[str, float | None]:
    place, steps = f"watch/rank/{line.rank}", max(1, line.steps)
    out: dict[str, float | None] = {
        f"{place}/{phase}_ms": 1e3 * seconds / steps for phase, seconds in line.phases_s.items()
    }
    out[f"{place}/step_ms"] = 1e3 * line.seconds / steps
    out |= {f"{place}/{key}": line.added(key) for key in ADDED}
    return out | system_metrics(line.rank, line.system)


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
